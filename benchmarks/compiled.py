"""Learning steps under torch.compile: the time of a step, the time to compile it, and the number of kernels.

Plain, learning (`mc.Draw`) and blending (`mc.Blend`), each in eager mode and compiled by Inductor, in turn.
Compile times include what Inductor finds in its cache. Needs a C++ compiler.

    OMP_NUM_THREADS=1 python benchmarks/compiled.py        # four minutes or more on one core
"""

from __future__ import annotations

import argparse
import time

import torch
from torch._inductor import metrics

from maskconnect.bench.cases import CASES
from maskconnect.bench.forms import Form
from maskconnect.bench.steps import make, training_step
from maskconnect.ship.measure import interleaved
from maskconnect.training.options import keep_memory

FORM = Form(layout="channels last", sgd="fused")


def main() -> None:
    """Time the steps and print the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", default="resnet38", choices=[name for name in CASES if name.startswith("resnet")])
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--seconds", type=float, default=60.0)
    args = parser.parse_args()
    keep_memory()
    steps = {}
    for variant in ("plain", "learning", "blending"):
        steps[variant] = training_step(make(CASES[args.case], variant), args.batch, FORM)
        network = make(CASES[args.case], variant)
        network.compile(fullgraph=True, dynamic=False)
        name = f"{variant}, compiled"
        steps[name] = training_step(network, args.batch, FORM)
        metrics.reset()
        before = time.perf_counter()
        steps[name]()
        seconds = time.perf_counter() - before
        print(f"{name}: {seconds:.0f} s to compile, {metrics.generated_kernel_count} kernels", flush=True)
    times = interleaved(steps, 1000, args.seconds, least=5)
    for name, found in times.items():
        eager, same = found.over(times["plain"]), found.over(times["plain, compiled"])
        print(
            f"{name:20s} {found.median:.3f} s  {eager.rounds:.2f} ({eager.minima:.2f}) times plain, "
            f"{same.rounds:.2f} ({same.minima:.2f}) times plain compiled, {len(found.seconds)} rounds"
        )
    print(f"graphs compiled: {torch._dynamo.utils.counters['stats']['unique_graphs']}")


if __name__ == "__main__":
    main()
