"""Time pruned networks relative to plain ones: K=1 ResNeXt {29,8,8} and learned K=10 ResNet-38.

There are two plain networks. One is written in PyTorch alone (bench/plain.py, ResNeXt as published) and folded by
torch's `fuse`; the other, which is faster, is ours with fixed connectivity, pruned, folded and merged like the pruned
ones. Ratios are medians over interleaved rounds in one process, below 1 where the pruned network is faster.

    python benchmarks/pruned_inference.py                       # about ten minutes on two cores
    python benchmarks/pruned_inference.py --wirings 4 --seconds 3
"""

from __future__ import annotations

import argparse
import json
import statistics
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.fx.experimental.optimization import fuse

import maskconnect as mc
from maskconnect.bench.plain import PlainResNet, PlainResNeXt
from maskconnect.ship.measure import latency

HERE = Path(__file__).parent
LEARNED = HERE / "resnet38_learned.json"
"""The wiring that a short run on CIFAR-100 learned, and the command of that run."""

BATCHES = (64, 1)


def main() -> None:
    """Time all networks, and print a line per network."""
    parser = argparse.ArgumentParser(description="Time pruned networks relative to plain ones.")
    parser.add_argument("--wirings", type=int, default=20, help="number of random wirings (default: 20)")
    parser.add_argument("--seconds", type=float, default=8.0, help="time per network and batch size (default: 8)")
    parser.add_argument("--threads", type=int, default=2, help="CPU threads (default: 2)")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    torch.manual_seed(0)

    print(f"ResNeXt {{29,8,8}}, K=1, pruned, over plain ResNeXt; {args.threads} threads")
    baselines = {
        "by hand": fuse(PlainResNeXt("cifar", [3, 3, 3], 8, 8, 100, "sum").eval()),
        "ours": slim(mc.resnext(29, 8, 8, 100, connectivity="full")),
    }
    networks = {
        f"random {seed}": slim(mc.resnext(29, 8, 8, 100, 1, connectivity="random", seed=seed))
        for seed in range(args.wirings)
    }
    compare(networks, baselines, args.seconds)

    print(f"\nResNet-38, K=10, pruned, over plain ResNet-38; {args.threads} threads")
    baselines = {
        "by hand": fuse(PlainResNet("cifar", [6, 6, 6], 100).eval()),
        "ours": slim(mc.resnet(38, 100, connectivity="prev")),
    }
    wiring = json.loads(LEARNED.read_text())["wiring"]
    compare({"learned": slim(mc.resnet(38, 100, connectivity=wiring))}, baselines, args.seconds)
    networks = {
        f"random {seed}": slim(mc.resnet(38, 100, 10, connectivity="random", seed=seed))
        for seed in range(min(5, args.wirings))
    }
    compare(networks, baselines, args.seconds)


def slim(model: nn.Module) -> nn.Module:
    """Prune, fold and merge a frozen model, after a batch for its batch norms."""
    model(images(16))
    return mc.prune(model.eval(), images(2), fold=True).eval()


def images(count: int) -> Tensor:
    """Return noise of the size of CIFAR images."""
    return torch.randn(count, 3, 32, 32)


def compare(networks: dict[str, nn.Module], baselines: dict[str, nn.Module], seconds: float) -> None:
    """Print a line per network, and the median over all."""
    found: dict[tuple[int, str], list[float]] = {(batch, name): [] for batch in BATCHES for name in baselines}
    for name, network in networks.items():
        line = f"  {name:10s} {sum(p.numel() for p in network.parameters()):9,d} parameters"
        for batch in BATCHES:
            times = latency({"pruned": network, **baselines}, images(batch), seconds=seconds)
            for plain in baselines:
                ratio = times["pruned"].over(times[plain]).rounds
                found[batch, plain].append(ratio)
                line += f"   {ratio:.3f} of {plain} at batch {batch}"
        print(line, flush=True)
    if len(networks) > 1:
        for (batch, plain), ratios in found.items():
            median, spread = statistics.median(ratios), f"{min(ratios):.3f} to {max(ratios):.3f}"
            print(f"  median over {len(ratios)}: {median:.3f} of {plain} at batch {batch} ({spread})")


if __name__ == "__main__":
    main()
