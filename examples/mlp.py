"""Learn which two of eight MLPs to read. Only MLPs 2 and 5 see the signal, so the best wiring is known.

Run it with: python examples/mlp.py (10 seconds on one core)
Result here, mean of 3 seeds: learned 98.3 %, random 58.4 %, reading all eight 97.7 %. Learning found 2 and 5 each time.
"""

import torch
from torch import nn
from torch.nn import functional as F

import maskconnect as mc

SIGNAL = (2, 5)  # these two MLPs see the numbers that decide the label; the other six see noise


class Window(nn.Module):
    """An MLP that sees four numbers of the input."""

    def __init__(self, index):
        super().__init__()
        self.window = slice(4 * index, 4 * index + 4)
        self.layers = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 16))

    def forward(self, x):
        return self.layers(x[:, self.window])


def batch(size, seed):
    """Return random inputs, and whether the numbers that the SIGNAL windows see have a positive sum."""
    x = torch.randn(size, 32, generator=torch.Generator().manual_seed(seed))
    total = sum(x[:, 4 * k : 4 * k + 4].sum(dim=1) for k in SIGNAL)
    return x, (total > 0).long()


def train(connectivity="learned", seed=0, how=mc.Blend(steps=400), mask_lr=0.03, steps=400):
    torch.manual_seed(seed)
    reader = nn.Sequential(nn.ReLU(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 2))
    model = mc.MaskedStack([[Window(k) for k in range(8)], [reader]], fan_in=2, connectivity=connectivity, seed=seed)
    optimizer = torch.optim.SGD(mc.param_groups(model, lr=0.1, mask_lr=mask_lr), momentum=0.9)
    mc.attach(optimizer, model, how)
    for step in range(steps):
        x, y = batch(128, seed * steps + step)
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
    mc.freeze(model)
    x, y = batch(10_000, 2**32)
    return model, (model.eval()(x).argmax(dim=1) == y).float().mean().item()


if __name__ == "__main__":
    torch.set_num_threads(1)  # this network is too small to gain from more
    for connectivity in ("learned", "random", "full"):
        runs = [train(connectivity, seed) for seed in range(3)]
        mean = sum(accuracy for _, accuracy in runs) / len(runs)
        reads = ", ".join(str(mc.wiring_of(model)[1][0]) for model, _ in runs)
        print(f"{connectivity:8} wiring: {100 * mean:.1f} % of test inputs correct; the reader reads {reads}")
