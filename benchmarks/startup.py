"""Time `maskconnect --help`, the first training step of digits, and how long training waits for data.

Each command is a separate process, timed from its start.

    python benchmarks/startup.py                         # under a minute
    python benchmarks/startup.py quick/cifar10 --data ~/cifar
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

COMMAND = [sys.executable, "-m", "maskconnect"]


def help_seconds() -> float:
    """Return the time from the start of the process to its end."""
    started = time.perf_counter()
    subprocess.run([*COMMAND, "--help"], check=True, capture_output=True)
    return time.perf_counter() - started


def train(folder: Path, recipe: str, *options: str) -> tuple[float, list[float]]:
    """Return the seconds to the first line of metrics (that of the first step), and the share of time for data in %."""
    words = [*COMMAND, "train", recipe, "--out", str(folder), "--log-every", "1", *options]
    started, first = time.perf_counter(), float("nan")
    metrics = folder / "metrics.jsonl"
    with subprocess.Popen(words, stdout=subprocess.DEVNULL) as process:
        while process.poll() is None:
            if metrics.exists() and metrics.stat().st_size:
                first = time.perf_counter() - started
                break
            time.sleep(0.01)
        process.wait()
    lines = [json.loads(line) for line in metrics.read_text().splitlines()]
    return first, [line["waiting_for_data"] for line in lines if line["kind"] == "epoch"]


def main() -> None:
    """Measure, and print the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipe", nargs="?", default="quick/digits", help="what to train (default: quick/digits)")
    parser.add_argument("--data", help="the folder of the data set")
    parser.add_argument("--runs", type=int, default=3, help="number of runs (default: 3)")
    args = parser.parse_args()
    print(f"maskconnect --help: {statistics.median(help_seconds() for _ in range(7)):.2f} s, median of 7")
    options = [f"--set=phase.{name}.epochs=1" for name in ("learn", "freeze", "fine", "finer")]
    options += ["--data", args.data] if args.data else []
    with tempfile.TemporaryDirectory() as place:
        for number in range(args.runs):
            first, waiting = train(Path(place) / str(number), args.recipe, *options)
            print(f"{args.recipe}: first step after {first:.2f} s; waiting for data: {max(waiting):.2f} % of the time")


if __name__ == "__main__":
    main()
