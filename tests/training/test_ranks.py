"""Several processes train one network: the same result as one, whatever happens to them."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from dataclasses import fields
from pathlib import Path

import pytest
import runs

from maskconnect.errors import ConfigError
from maskconnect.training.agreement import first_difference, stated
from maskconnect.training.network import is_synced
from maskconnect.training.options import Options
from maskconnect.training.ranks import Ranks, join, lost, reason
from maskconnect.training.step import parts_of

HERE = Path(__file__).parent.parent
SHORT = ["--set=phase.freeze.epochs=1", "--set=phase.fine.epochs=1", "--set=phase.finer.epochs=1", "--threads=1"]
LONG = ["--set=phase.learn.epochs=25", *SHORT, "--checkpoint-every=0.5"]
RESNEXT = ["architecture=resnext", "depth=11", "width=4", "cardinality=4"]


@pytest.fixture
def folder(tmp_path):
    """A folder with the recipe of the tests."""
    runs.tiny(tmp_path)
    return tmp_path


def finish(process, seconds=180):
    said, errors = process.communicate(timeout=seconds)
    return process.returncode, said, errors


def train(folder, *words, out, nproc=2):
    processes = [] if nproc == 1 else [f"--nproc={nproc}"]
    code, said, errors = finish(runs.command("train", "tiny.toml", f"--out={out}", *processes, *words, cwd=folder))
    assert (code, errors) == (0, ""), errors
    return said


def torchrun(script, *options, ranks=2):
    """Run a script of tests/workers."""
    words = ["-m", "torch.distributed.run", f"--nproc-per-node={ranks}", "--standalone", *options]
    path = os.pathsep.join([str(HERE.parent / "examples"), str(HERE)])
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": path}
    return subprocess.run(
        [sys.executable, *words, str(script)], capture_output=True, text=True, env=environment, timeout=180, check=False
    )


def workers(launcher):
    """The processes of the ranks that a process has started, by rank."""
    found = {}
    for place in Path("/proc").iterdir():
        try:
            parent = int((place / "stat").read_text().rpartition(")")[2].split()[1])
            variables = dict(v.split("=", 1) for v in (place / "environ").read_text().split("\0") if "=" in v)
        except (OSError, ValueError, IndexError, UnicodeDecodeError):
            continue
        if parent == launcher.pid and "RANK" in variables:
            found[int(variables["RANK"])] = int(place.name)
    return found


def catches(process, number):
    """Whether a process has set a handler for a signal."""
    status = Path(f"/proc/{process}/status").read_text()
    (mask,) = [line.split()[1] for line in status.splitlines() if line.startswith("SigCgt")]
    return bool(int(mask, 16) >> (number - 1) & 1)


def until_saved(folder, seconds=90):
    deadline = time.monotonic() + seconds
    while not any((folder / "checkpoints").glob("step-*")):
        assert time.monotonic() < deadline
        time.sleep(0.02)


def flat(value):
    """Numbers as a list; -1 where there is none."""
    values = value.values() if isinstance(value, dict) else value if isinstance(value, list) else [value]
    return [number for v in values for number in (flat(v) if isinstance(v, dict) else [-1.0 if v is None else v])]


@pytest.mark.slow
@pytest.mark.parametrize(
    "settings",
    [
        pytest.param([], id="resnet"),
        pytest.param([*RESNEXT, "fan_in=1"], id="resnext"),
        pytest.param([*RESNEXT, "norm=sum"], id="resnext with norms of sums"),
        pytest.param(["training.accumulate=2"], id="parts of a batch"),
        pytest.param(["training.norm_group=16"], id="groups of images"),
        pytest.param([*RESNEXT, "training.norm_group=8", "training.accumulate=2"], id="groups, and parts of a batch"),
    ],
)
def test_two_ranks_give_the_result_of_one(folder, settings):
    words = [f"--set={s if '.' in s else f'model.{s}'}" for s in settings]
    words += [*SHORT, "--precision=fp64", "--log-every=1", "--set=data.test_images=61"]
    if not any("norm_group" in word for word in words):  # a last batch of 10 is one group on one rank, two on two
        words.append("--set=data.train_images=170")
    train(folder, *words, out="one", nproc=1)
    train(folder, *words, out="two")
    one, two = (runs.metrics(folder / name) for name in ("one", "two"))
    assert [line["kind"] for line in one] == [line["kind"] for line in two]
    for first, second in zip(one, two, strict=True):
        assert first.keys() - {"draws"} == second.keys() - {"draws"}
        for key in first.keys() & {"loss", "accuracy", "mask_entropy", "test", "drawn", "frozen", "activation_scales"}:
            a, b = (flat(line[key]) for line in (first, second))
            assert a == pytest.approx(b, rel=1e-6, abs=2e-6), (key, first["step"])
        if first["kind"] == "step":
            assert "draws" not in first
            assert len(second["draws"]) == 2
            assert second["draws"][0] == second["draws"][1]
    for name in ("wiring.json", "data.json"):
        assert (folder / "one" / name).read_bytes() == (folder / "two" / name).read_bytes()


@pytest.mark.slow
def test_norms_of_each_rank_alone_are_another_network(folder):
    words = [*SHORT, "--precision=fp64", "--log-every=1"]
    train(folder, *words, out="together")
    train(folder, *words, "--norm=local", out="apart")
    train(folder, *words, "--set=training.norm_group=16", out="groups", nproc=1)
    together, apart, groups = (runs.metrics(folder / name)[-1]["loss"] for name in ("together", "apart", "groups"))
    assert apart == pytest.approx(groups, rel=1e-8), "which is the one whose norms see groups of that size"
    assert abs(apart - together) > 1e-3


@pytest.mark.slow
def test_a_killed_worker_is_started_again_and_the_result_is_the_same(folder):
    train(folder, *LONG, out="quiet")
    process = runs.command("train", "tiny.toml", "--out=killed", "--nproc=2", *LONG, cwd=folder)
    until_saved(folder / "killed")
    os.kill(workers(process)[1], signal.SIGKILL)
    code, said, errors = finish(process)
    assert code == 0
    assert "resuming from step" in said
    assert "another rank has stopped" in errors
    assert runs.results(folder / "killed") == runs.results(folder / "quiet")


@pytest.mark.slow
@pytest.mark.parametrize(("number", "expected"), [(signal.SIGTERM, 143), (signal.SIGUSR2, 128 + signal.SIGUSR2)])
def test_a_signal_to_any_rank_stops_all_at_one_step_and_any_number_of_ranks_continues(folder, number, expected):
    process = runs.command("train", "tiny.toml", "--out=run", "--nproc=2", *LONG, cwd=folder)
    until_saved(folder / "run")
    os.kill(workers(process)[1], number)
    code, said, errors = finish(process)
    assert (code, errors) == (expected, ""), said
    assert said.count("progress is saved") == 1
    assert "--nproc 2" in said.splitlines()[-1]
    assert not (folder / "run/summary.json").exists()
    if number == signal.SIGTERM:
        said = train(folder, *LONG, out="run", nproc=1)
        assert "resuming from step" in said
        assert "note: ranks was 2 and is 1, so the result will not be bitwise identical" in said
    else:
        train(folder, *LONG, out="run")
        train(folder, *LONG, out="quiet")
        assert runs.results(folder / "run") == runs.results(folder / "quiet")


@pytest.mark.slow
def test_control_c_stops_all(folder):
    process = runs.command("train", "tiny.toml", "--out=run", "--nproc=2", *LONG, cwd=folder)
    until_saved(folder / "run")
    process.send_signal(signal.SIGINT)
    code, said, errors = finish(process)
    assert (code, errors) == (130, "")
    assert "stopped by SIGINT; progress is saved" in said


@pytest.mark.slow
def test_when_one_of_two_machines_is_lost_the_other_continues(folder):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    words = ["-m", "torch.distributed.run", "--nnodes=1:2", "--nproc-per-node=1", "--rdzv-backend=c10d"]
    words += [f"--rdzv-endpoint=127.0.0.1:{port}", "--rdzv-id=test", "--max-restarts=3"]
    words += ["--rdzv-conf=last_call_timeout=3,keep_alive_interval=1,keep_alive_max_attempt=3"]
    words += ["-m", "maskconnect", "train", "tiny.toml", "--out=run", *LONG, "--set=phase.learn.epochs=60"]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    host = subprocess.Popen([sys.executable, *words], cwd=folder, env=environment, **pipes)
    time.sleep(3)  # so that this one hosts the store
    other = subprocess.Popen([sys.executable, *words], cwd=folder, env=environment, **pipes)
    until_saved(folder / "run", 120)
    assert json.loads((folder / "run/environment.json").read_text())[0]["ranks"] == 2
    for number in (*workers(other).values(), other.pid):  # the machine, with all that runs on it
        os.kill(number, signal.SIGKILL)
    other.communicate()
    said, _ = host.communicate(timeout=240)
    assert host.returncode == 0, said[-2000:]
    assert "resuming from step" in said
    assert [start["ranks"] for start in json.loads((folder / "run/environment.json").read_text())] == [2, 1]
    assert (folder / "run/summary.json").exists()


@pytest.mark.slow
def test_draws_that_differ_are_an_error_that_names_the_ranks():
    done = torchrun(HERE / "workers/draws.py")
    assert done.returncode == 0, done.stderr
    for rank in (0, 1):
        assert f"rank {rank} says: step 2: rank 1 drew different masks than rank 0 (checksums " in done.stdout


@pytest.mark.slow
def test_numbers_rows_errors_and_norms_go_between_ranks():
    done = torchrun(HERE / "workers/gathers.py")
    assert (done.returncode, done.stdout) == (0, "all is well\n"), done.stderr


@pytest.mark.slow
def test_a_loop_of_ones_own_with_torchs_own_wrapper():
    done = torchrun(HERE.parent / "examples/several_gpus.py")
    assert re.match(r"learned  wiring: \d+\.\d % correct with 2 process", done.stdout), done.stderr
    at_exit = "terminate called without an active exception"  # what torch may do to a process after its last line
    assert done.returncode == 0 or at_exit in done.stderr, done.stderr
    one, two = (torchrun(HERE / "workers/own_loop.py", ranks=n) for n in (1, 2))
    assert one.returncode == two.returncode == 0, one.stderr + two.stderr
    assert one.stdout == two.stdout


@pytest.mark.slow
def test_three_ranks_that_resume_add_gradients_in_the_same_order():
    done = torchrun(HERE / "workers/wrapped_again.py", ranks=3)
    assert (done.returncode, done.stdout) == (0, "equal\n"), done.stderr


@pytest.mark.slow
def test_a_loop_with_accelerate():
    pytest.importorskip("accelerate")
    done = torchrun(HERE / "workers/accelerated.py")
    assert done.returncode == 0, done.stderr
    assert "2 ranks: block 5 reads" in done.stdout


def two_ranks(folder, *differ):
    """Two processes that meet as torchrun's do, the second started with some other words; what became of each."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1]), "WORLD_SIZE": "2"}
    words = ("train", "tiny.toml", "--out=run", *SHORT)
    each = [(*words,), (*words, *differ)]
    both = [runs.command(*each[rank], cwd=folder, environment=place | {"RANK": str(rank)}) for rank in (0, 1)]
    try:
        return [finish(process, 60) for process in both]
    finally:
        for process in both:
            process.kill()
            process.communicate()


@pytest.mark.parametrize(
    ("other", "sentence"),
    [
        ("--set=phase.learn.lr=0.2", "phase.learn.lr is 0.1 on rank 0 and 0.2 on rank 1"),
        pytest.param(
            "--set=training.batch_size=64",
            "training.batch_size is 32 on rank 0 and 64 on rank 1",
            marks=pytest.mark.slow,
        ),
        pytest.param("--precision=fp64", "--precision is fp32 on rank 0 and fp64 on rank 1", marks=pytest.mark.slow),
    ],
)
def test_ranks_that_were_started_differently_stop_with_the_field_that_differs(folder, other, sentence):
    (code, _, errors), (other_code, _, other_errors) = two_ranks(folder, other)
    assert (code, other_code, other_errors) == (2, 2, "")
    assert errors == f"error: {sentence}; start all ranks with the same recipe and options.\n"
    assert not (folder / "run").exists()


@pytest.mark.slow
def test_ranks_may_differ_in_what_does_not_change_the_result(folder):
    done = two_ranks(folder, "--data=elsewhere", "--workers=1", "--checkpoint-every=7", "--device=cpu")
    assert [code for code, _, _ in done] == [0, 0], done
    assert (folder / "run/summary.json").exists()


@pytest.mark.slow
def test_a_mistake_is_said_once_and_not_tried_again(folder):
    (folder / "full").mkdir()
    (folder / "full/thesis.tex").write_text("x")
    code, _, errors = finish(runs.command("train", "tiny.toml", "--out=full", "--nproc=2", cwd=folder))
    assert (code, errors.count("\n")) == (2, 1), errors
    assert "full is not empty and does not hold a run" in errors
    words = ["--set=training.batch_size=33", "--out=odd", "--nproc=2"]
    code, _, errors = finish(runs.command("train", "tiny.toml", *words, cwd=folder))
    assert (code, errors.count("\n")) == (2, 1), errors
    assert "the batch size is 33; it must be a multiple of the number of ranks, 2" in errors


@pytest.mark.slow
def test_a_signal_to_a_rank_that_has_just_begun_stops_all(folder):
    process = runs.command("train", "tiny.toml", "--out=run", "--nproc=2", *LONG, cwd=folder)
    deadline = time.monotonic() + 60
    while not (1 in (found := workers(process)) and catches(found[1], signal.SIGTERM)):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    os.kill(found[1], signal.SIGTERM)
    code, _, _ = finish(process)
    assert code == 143
    assert not (folder / "run/summary.json").exists()


@pytest.mark.slow
def test_workers_do_not_outlive_the_process_that_started_them(folder):
    process = runs.command("train", "tiny.toml", "--out=run", "--nproc=2", *LONG, cwd=folder)
    until_saved(folder / "run")
    found = workers(process)
    process.kill()
    process.communicate()
    deadline = time.monotonic() + 30
    while any(Path(f"/proc/{number}").exists() for number in found.values()):
        assert time.monotonic() < deadline
        time.sleep(0.1)
    assert not (folder / "run/summary.json").exists()


@pytest.mark.parametrize(
    ("words", "sentence"),
    [(["--nproc", "0"], "--nproc is 0; it must be 1 or more"), (["--norm", "loacl"], "Did you mean 'local'?")],
)
def test_what_cannot_be_meant_is_one_sentence(folder, type_in, words, sentence):
    code, _, errors = type_in("train", "tiny.toml", *words)
    assert (code, errors.count("\n")) == (2, 1)
    assert sentence in errors


def test_torchrun_in_torchrun_is_one_sentence(folder, type_in, monkeypatch):
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "1")
    code, _, errors = type_in("train", "tiny.toml", "--nproc", "2")
    assert code == 2
    assert "but torchrun started this process; leave --nproc out." in errors


def test_batch_norms_see_what_the_recipe_says(folder):
    whole, groups = runs.tiny(folder), runs.tiny(folder, "training.norm_group=16")  # of batches of 32
    assert is_synced(whole, 2, "recipe")
    assert not is_synced(whole, 1, "sync")
    assert not is_synced(whole, 2, "local")
    assert not is_synced(groups, 2, "recipe")
    assert is_synced(groups, 2, "sync")
    with pytest.raises(ConfigError, match="it must divide the 8 images per batch that each of 4 ranks has"):
        is_synced(groups, 4, "recipe")


@pytest.mark.parametrize(("images", "parts", "count"), [(42, 2, 2), (10, 3, 2), (128, 1, 8), (17, 4, 3), (5, 5, 1)])
def test_parts_of_a_batch_are_the_same_images_on_any_number_of_ranks(images, parts, count):
    whole = [list(range(images))[part] for part in parts_of(images, parts)]
    assert [image for part in whole for image in part] == list(range(images))
    assert max(map(len, whole)) - min(map(len, whole)) <= 1
    shared = [[] for _ in range(parts)]
    for rank in range(count):
        own = list(range(images))[rank::count]
        for number, part in enumerate(parts_of(images, parts, Ranks(rank, count))):
            shared[number] += own[part]
    assert [sorted(part) for part in shared] == whole


@pytest.mark.parametrize(
    ("setting", "sentence"),
    [
        ("phase.fine.epochs=9", "phase.fine.epochs is 1 on rank 0 and 9 on rank 2"),
        ("model.fan_in=3", "model.fan_in is 2 on rank 0 and 3 on rank 2"),
        ("seed=4", "seed is 0 on rank 0 and 4 on rank 2"),
        ("init_from=runs/a", 'init_from is not set on rank 0 and "given" on rank 2'),
        ("about=other words", None),
    ],
)
def test_every_field_of_a_recipe_is_compared_except_for_words_about_it(folder, setting, sentence):
    ours, other = stated(runs.tiny(folder), Options()), stated(runs.tiny(folder, setting), Options())
    assert first_difference([ours, ours, other]) == sentence


def test_options_are_compared_where_they_change_what_is_computed(folder):
    recipe = runs.tiny(folder)
    for field in fields(Options):
        value = {"norm": "sync", "precision": "bf16", "device": "meta", "data": Path("x")}.get(field.name, 7)
        found = first_difference([stated(recipe, Options()), stated(recipe, Options(**{field.name: value}))])
        assert (found is None) == (field.name in ("data", "threads", "workers", "checkpoint_every")), field.name


def test_one_process_needs_nobody(monkeypatch):
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    assert join() == Ranks()
    monkeypatch.setenv("WORLD_SIZE", "two")
    with pytest.raises(ConfigError, match="WORLD_SIZE is 'two'"):
        join()
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "0")
    monkeypatch.delenv("MASTER_ADDR", raising=False)
    with pytest.raises(ConfigError, match="MASTER_ADDR expected, but not set; launch with torchrun"):
        join()


def test_the_loss_of_a_rank_is_distinguished_from_other_errors():
    gone = RuntimeError("[/src/gloo/pair.cc:553] Connection closed by peer [127.0.0.1]:4. This is typically caused by")
    assert lost(gone)
    assert reason(gone) == "Connection closed by peer [127.0.0.1]:4"
    assert not lost(RuntimeError("mat1 and mat2 shapes cannot be multiplied"))
    assert not lost(ValueError("gloo"))
