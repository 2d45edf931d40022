"""Count the bytes that ranks send each other per training step, from shapes alone, on the meta device.

    python benchmarks/ranks_traffic.py             # half a minute

gradients    of weights and masks, averaged over ranks by DistributedDataParallel (4 bytes each)
statistics   running means and variances of batch norms, averaged every step if norms are local
synced       instead of these, the data of norms over all ranks: two sums per channel in float64 in the forward pass,
             two in float32 in the backward pass; a norm that branches share counts once
In a ring of R ranks, every rank sends and receives 2 (R-1)/R times as much.
"""

from __future__ import annotations

import json
from pathlib import Path

import torch
from torch import nn

from maskconnect.models import build
from maskconnect.recipes import load
from maskconnect.training.norms import statistics

HERE = Path(__file__).parent
RECIPES = (
    "cifar100-resnet38-learned",
    "cifar100-resnext29-8-8-learned-k4",
    "imagenet-resnet50-learned",
    "imagenet-resnext50-4-32-learned",
    "imagenet-resnext101-4-64-learned",
)


def main() -> None:
    """Count and print."""
    found = {}
    print(f"{'MB per step':36s} {'gradients':>9s} {'statistics':>10s} {'synced':>7s} {'norms':>6s}")
    for name in RECIPES:
        recipe = load(f"paper/{name}")
        classes = 1000 if recipe.data.name == "imagenet" else 100
        with torch.device("meta"):
            network = build(recipe.model.spec(num_classes=classes, in_channels=3, seed=0))
        norms = [part for part in network.modules() if isinstance(part, nn.BatchNorm2d)]
        channels = sum(norm.num_features for norm in norms)
        sizes = {
            "gradients": sum(p.numel() for p in network.parameters() if p.requires_grad) * 4,
            "statistics": sum(b.numel() for b in statistics(network) if b.is_floating_point()) * 4,
            "synced": channels * 2 * (8 + 4),
            "norms": len(norms),
        }
        found[name] = sizes
        mb = [sizes[key] / 1e6 for key in ("gradients", "statistics", "synced")]
        print(f"{name:36s} {mb[0]:9.1f} {mb[1]:10.2f} {mb[2]:7.2f} {sizes['norms']:6d}", flush=True)
    (HERE / "ranks_traffic.json").write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
