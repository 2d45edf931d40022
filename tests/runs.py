"""Runs small enough for tests: all four phases on a few digits in a second or two."""

import json
import os
import signal
import subprocess
import sys
from dataclasses import replace

from maskconnect.recipes import load
from maskconnect.training.options import Options
from maskconnect.training.progress import Silent
from maskconnect.training.run import train

TINY = """
about = "a run of a test"
[data]
name = "digits"
train_images = 160
test_images = 60
[augmentation]
size = 8
pad = 1
[model]
architecture = "resnet"
depth = 14
fan_in = 2
[training]
batch_size = 32
weight_decay = 1e-4
[[phase]]
name = "learn"
epochs = 2
lr = 0.1
mask_lr = 0.3
[[phase]]
name = "freeze"
epochs = 2
lr = 0.1
[[phase]]
name = "fine"
epochs = 1
lr = 0.01
[[phase]]
name = "finer"
epochs = 1
lr = 0.001
"""

MIXED = (
    "model.architecture=mixed",
    "model.depth=none",
    "model.layers=[1, 1]",
    "model.width=4",
    "model.kinds=['conv3x3', 'maxpool3x3', 'identity', 'globalmean']",
)
"""Settings that make the recipe's network one of unlike branches."""

__all__ = ["MIXED", "Silent", "command", "metrics", "results", "run", "tiny", "train"]

TIMES = ("images_per_second", "seconds", "waiting_for_data")


def tiny(folder, *settings, **fields):
    """The recipe of the tests, with some of it changed."""
    place = folder / "tiny.toml"
    place.write_text(TINY)
    return replace(load(str(place), settings), **fields)


def run(recipe, out, show=None, **options):
    return train(recipe, out, Options(threads=1, **options), show)


def without_times(lines):
    return [{key: value for key, value in line.items() if key not in TIMES} for line in lines]


def metrics(out):
    """What a run has recorded, except for its speed."""
    return without_times(map(json.loads, (out / "metrics.jsonl").read_text().splitlines()))


def epochs_of(out):
    """The lines of epochs."""
    return [line for line in metrics(out) if line["kind"] == "epoch"]


def results(out):
    """Every file of a finished run that must not depend on when it was stopped, and its metrics."""
    names = sorted(p for part in ("final", "masks") for p in (out / part).iterdir())
    files = {str(p.relative_to(out)): p.read_bytes() for p in [*names, out / "wiring.json", out / "data.json"]}
    summary = json.loads((out / "summary.json").read_text())
    for key in ("seconds", "step_seconds"):
        summary.pop(key)
    return files, metrics(out), summary


def command(*arguments, environment=(), **options):
    """A real process of the command line."""
    variables = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"} | dict(environment)
    return subprocess.Popen(
        [sys.executable, "-m", "maskconnect", *map(str, arguments)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=variables,
        **options,
    )


KILLED = """
import os, signal
sync, left = os.fsync, {number}
def fsync(handle):
    global left
    left -= 1
    if not left:
        os.kill(os.getpid(), signal.SIGKILL)
    sync(handle)
os.fsync = fsync
{code}
"""


def killed(code, number, cwd):
    """Run some code in a process that SIGKILL ends as a file or folder is synced for the so-manieth time.

    Returns whether it came to that.
    """
    words = [sys.executable, "-c", KILLED.format(code=code, number=number)]
    done = subprocess.run(words, cwd=cwd, capture_output=True, text=True, check=False)
    assert done.returncode in (0, -signal.SIGKILL), done.stderr
    return done.returncode != 0


def killed_command(words, number, cwd):
    """The same for a command."""
    typed = [str(word) for word in words]
    return killed(f"from maskconnect.cli.main import main\nraise SystemExit(main({typed!r}))", number, cwd)
