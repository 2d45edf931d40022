"""Count what a training step of the ImageNet networks computes, moves and holds per image, on the meta device.

No network is trained; the counts need only shapes.

    python benchmarks/imagenet_arithmetic.py             # three minutes
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

from torch import nn

from maskconnect.bench import steps
from maskconnect.bench.arithmetic import count
from maskconnect.bench.cases import CLASSES, Case
from maskconnect.bench.forms import COUNTED
from maskconnect.bench.plain import PlainResNet, PlainResNeXt
from maskconnect.models import ResNetSpec, ResNeXtSpec, build

HERE = Path(__file__).parent
STAGES = {50: [3, 4, 6, 3], 101: [3, 4, 23, 3]}


def cases() -> dict[str, Case]:
    """Return the networks of table 3 of the paper, and its ResNet-50."""
    found = {}
    spec = ResNetSpec(depth=50, num_classes=CLASSES, fan_in=10, stem="imagenet")
    found["ResNet-50, K=10"] = case_of(spec, partial(PlainResNet, "imagenet", STAGES[50], CLASSES, deep=True))
    for depth, stages in STAGES.items():
        wide = ResNeXtSpec(depth=depth, width=4, cardinality=32, num_classes=CLASSES, fan_in=16, stem="imagenet")
        plain = partial(PlainResNeXt, "imagenet", stages, 4, 32, CLASSES, "sum", 64)
        found[f"ResNeXt {{{depth},4,32}}, K=16"] = case_of(wide, plain)
    return found


def case_of(spec: ResNetSpec | ResNeXtSpec, plain: Callable[[], nn.Module]) -> Case:
    """Return a case without limits, because nothing is timed."""
    return Case(
        about="",
        network=lambda connectivity: build(replace(spec, connectivity=connectivity)),
        plain=plain,
        has_lean=isinstance(spec, ResNeXtSpec),
    )


def main() -> None:
    """Count and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", type=int, default=32, help="images per step (default: 32)")
    parser.add_argument("--numbers", type=Path, default=HERE / "imagenet_arithmetic.json")
    args = parser.parse_args()
    steps.SIDE = 224
    found = {"batch": args.batch, "side": steps.SIDE, "networks": {}}
    print(f"per image, at batch {args.batch}  {'':12s} {'GFLOP':>8s} {'GB moved':>9s} {'MB held':>8s}   over plain")
    for name, case in cases().items():
        networks = found["networks"].setdefault(name, {})
        for variant in (v for v in case.variants if v != "reference"):
            step = steps.step_of(case, variant, args.batch, COUNTED, device="meta")
            networks[variant] = count(step).describe()
            own, plain = networks[variant], networks["plain"]
            each = [own[what] / args.batch for what in ("flops", "traffic", "peak")]
            over = ", ".join(f"{own[what] / plain[what]:.1f}" for what in ("flops", "traffic", "peak"))
            print(
                f"{name:24s} {variant:10s} {each[0] / 1e9:8.1f} {each[1] / 1e9:9.2f} {each[2] / 1e6:8.0f}   {over}",
                flush=True,
            )
    args.numbers.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
