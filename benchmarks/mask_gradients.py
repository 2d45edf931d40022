"""Does the mask gradient early in training measure how useful a candidate is, or how large?

`quick/cifar100` is trained with fixed uniform masks. For every block, this prints the mean gradient of each candidate
over the steps of some epochs, the mean norm of its contribution, and their correlation; then the same with
`credit="new"`.

    python benchmarks/mask_gradients.py --data data
"""

from __future__ import annotations

import argparse
import itertools
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.nn import functional as F

import maskconnect as mc
from maskconnect.core.aggregate import masked_total
from maskconnect.core.credit import Seen
from maskconnect.core.lookup import masks_of
from maskconnect.recipes import load
from maskconnect.training import images
from maskconnect.training.options import Options, prepare


def main() -> None:
    """Measure both kinds of credit."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=Path("data"))
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    for credit in ("whole", "new"):
        print(f"credit={credit!r}: mean gradients, in thousandths, and in brackets the norm of each candidate")
        for block, (gradient_S, length_S) in measure(credit, args.data, args.epochs, args.seed).items():
            pairs = zip(gradient_S.tolist(), length_S.tolist(), strict=True)
            found = " ".join(f"{1e3 * gradient:+.2f} ({length:.0f})" for gradient, length in pairs)
            correlation = torch.corrcoef(torch.stack([gradient_S, length_S]))[0, 1]
            print(f"  block {block}: {found}  correlation {correlation:+.2f}")


def measure(credit: str, data: Path, epochs: int, seed: int) -> dict[int, tuple[Tensor, Tensor]]:
    """Return mean gradients and mean norms of the candidates, for every block with at least three."""
    recipe, options = load("quick/cifar100"), Options(device="cpu", threads=1, data=data)
    prepare(options)
    batches = images.prepare(recipe, options, torch.device("cpu")).train
    torch.manual_seed(seed)
    model = mc.resnet(20, 20, recipe.model.fan_in, seed=seed)
    groups = mc.param_groups(model, lr=recipe.phase[0].lr, mask_lr=0.0, weight_decay=recipe.training.weight_decay)
    optimizer = torch.optim.SGD(groups, momentum=recipe.training.momentum)
    mc.attach(optimizer, model, mc.Draw(credit=credit))
    (masks,) = masks_of(model)
    lengths: defaultdict[int, list[Tensor]] = defaultdict(list)

    def noted(mask_S: Tensor, sources: Sequence[Tensor], divisor: float, seen: Seen, *args: Any) -> Tensor:
        terms = [[factor * y for y in candidates.tensors] for factor, candidates in seen.terms]  # type: ignore[union-attr]
        found = [torch.stack(parts).sum(dim=0) for parts in zip(*terms, strict=True)]
        lengths[len(found)].append(torch.stack([y.norm() for y in found]))
        return masked_total(mask_S, sources, divisor, seen, *args)

    total_TS, steps = torch.zeros_like(masks.real), 0
    with patch("maskconnect.core.targets.masked_total", noted):
        for x, y in itertools.chain.from_iterable(map(batches.epoch, range(epochs))):
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()  # type: ignore[no-untyped-call]
            assert masks.real.grad is not None
            total_TS += masks.real.grad
            steps += 1
            optimizer.step()
    mean_TS = total_TS.detach() / steps
    return {n: (mean_TS[n - 1, :n], torch.stack(found).mean(0)) for n, found in lengths.items() if n > 2}


if __name__ == "__main__":
    main()
