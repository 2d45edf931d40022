"""Measure how the cost of learning grows with the number of blocks L, the fan-in K and the cardinality C.

Time of a learning step over a plain one: medians over rounds, interleaved in one process. Memory: all tensors at the
peak of a step, counted on the meta device. Writes a figure and the numbers.

    python benchmarks/growth.py                          # about five minutes on two cores
    python benchmarks/growth.py --seconds 2 --figure growth.svg --numbers growth.json
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from maskconnect.bench.cases import Case, resnet_case, resnext_case
from maskconnect.bench.forms import Form
from maskconnect.bench.machine import machine
from maskconnect.bench.steps import count_steps, step_of
from maskconnect.ship.measure import interleaved
from maskconnect.training.options import keep_memory

HERE = Path(__file__).parent
BATCH = 16
DEPTHS = (38, 74, 110, 146, 218)
FAN_INS = (1, 5, 10, 20, 35, 53)
CARDINALITIES = (2, 4, 8, 16, 32)


def sweeps() -> dict[str, dict[int, Case]]:
    """Return the cases of each panel, by the value that varies."""
    return {
        "blocks L (ResNet, K=10)": {(depth - 2) // 2: resnet_case(depth, 10) for depth in DEPTHS},
        "fan-in K (ResNet-110, L=54)": {fan_in: resnet_case(110, fan_in) for fan_in in FAN_INS},
        "cardinality C (ResNeXt {29,8,C}, K=C/2)": {C: resnext_case(8, C, C // 2) for C in CARDINALITIES},
    }


def measure(case: Case, seconds: float) -> dict[str, Any]:
    """Return time and memory of a learning step over a plain one."""
    form = Form(layout="channels first" if case.has_lean else "channels last")  # for ResNeXt, for ResNet
    steps = {name: step_of(case, name, BATCH, form) for name in ("plain", "learning")}
    times = interleaved(steps, 1000, seconds, least=5)
    counted = count_steps(case, BATCH, ("plain", "learning"))
    return {
        "seconds": {name: found.median for name, found in times.items()},
        "time": times["learning"].over(times["plain"]).rounds,
        "memory": counted["learning"].peak / counted["plain"].peak,
        "arithmetic": {name: found.describe() for name, found in counted.items()},
    }


def draw(found: dict[str, Any], path: Path) -> None:
    """Draw time above and memory below."""
    import matplotlib as mpl
    from matplotlib import pyplot as plt

    mpl.rcParams.update({"svg.hashsalt": "maskconnect", "svg.fonttype": "none", "font.size": 9})
    figure, axes = plt.subplots(2, 3, figsize=(10, 5), sharex="col", layout="constrained")
    for column, (name, points) in zip(axes.T, found["sweeps"].items(), strict=True):
        at = [int(x) for x in points]
        for axis, what in zip(column, ("time", "memory"), strict=True):
            axis.plot(at, [point[what] for point in points.values()], marker="o", color="#2a6f97")
            axis.set_ylim(0, 1.15 * max(point[what] for point in points.values()))
            axis.axhline(1, color="0.6", linewidth=0.8, linestyle="--")
            axis.grid(axis="y", color="0.92")
            axis.set_xticks(at)
            axis.spines[["top", "right"]].set_visible(False)
        column[1].set_xlabel(name)
    figure.suptitle(f"A learning step over a plain one, at batch {found['batch']}", fontsize=10)
    axes[0, 0].set_ylabel("time")
    axes[1, 0].set_ylabel("memory")
    figure.savefig(path, metadata={"Date": None})


def main() -> None:
    """Measure, print, draw."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=15.0, help="time per point (default: 15)")
    parser.add_argument("--figure", type=Path, default=HERE.parent / "docs/images/growth.svg")
    parser.add_argument("--numbers", type=Path, default=HERE / "growth.json")
    args = parser.parse_args()
    keep_memory()
    found: dict[str, Any] = {"machine": machine(), "batch": BATCH, "sweeps": {}}
    for name, cases in sweeps().items():
        points = found["sweeps"].setdefault(name, {})
        for x, case in cases.items():
            points[str(x)] = point = measure(case, args.seconds)
            print(f"{name} {x:4d}  time {point['time']:.2f}  memory {point['memory']:.2f}", flush=True)
    args.numbers.write_text(json.dumps(found, indent=1) + "\n")
    draw(found, args.figure)


if __name__ == "__main__":
    main()
