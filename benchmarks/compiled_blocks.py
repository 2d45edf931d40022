"""Does torch.compile of the blocks make learning steps faster? It fuses pointwise chains and keeps convolutions.

Masks are not compiled, so a new draw never triggers a recompilation. Needs a C++ compiler.

    python benchmarks/compiled_blocks.py                 # about three minutes on two cores
"""

from __future__ import annotations

import argparse
from typing import cast

import torch

from maskconnect.bench.cases import CASES
from maskconnect.bench.forms import LAYOUTS, Form
from maskconnect.bench.steps import make, training_step
from maskconnect.core.stack import MaskedStack
from maskconnect.ship.measure import interleaved
from maskconnect.training.options import keep_memory


def main() -> None:
    """Time the steps and print the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", default="resnet38", choices=CASES)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--seconds", type=float, default=30.0)
    args = parser.parse_args()
    keep_memory()
    torch._dynamo.config.recompile_limit = 64  # several shapes, with and without gradients, two layouts
    case, steps = CASES[args.case], {}
    for layout in LAYOUTS:
        for variant in ("plain", "learning", "learning, compiled"):
            network = make(case, variant.partition(",")[0])
            if "compiled" in variant:
                for block in cast(MaskedStack, network.stack).blocks:
                    block.compile(dynamic=False)
            steps[f"{variant}, {layout}"] = training_step(network, args.batch, Form(layout=layout))
    times = interleaved(steps, 1000, args.seconds, least=5)
    fastest = min((name for name in times if name.startswith("plain")), key=lambda name: times[name].median)
    for name, found in times.items():
        ratio = found.over(times[fastest])
        print(f"{name:40s} {found.median:.3f} s  {ratio.rounds:.2f} ({ratio.minima:.2f}) times {fastest}")
    print(f"graphs compiled: {torch._dynamo.utils.counters['stats'].get('unique_graphs', 0)}")


if __name__ == "__main__":
    main()
