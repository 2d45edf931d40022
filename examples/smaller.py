"""Make a trained ViT half as large: learn which blocks to skip, fine-tune, and remove the others.

python examples/smaller.py
"""

import time

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional as F

import maskconnect as mc

X, Y = map(torch.tensor, load_digits(return_X_y=True))
X = X.float().reshape(-1, 1, 8, 8) / 16


class ViT(nn.Module):
    def __init__(self, depth=12, width=32):
        super().__init__()
        self.patch, self.place = nn.Conv2d(1, width, 2, 2), nn.Parameter(torch.randn(1, 16, width) / 50)
        layer = {"dropout": 0.0, "batch_first": True, "norm_first": True}
        self.blocks = nn.ModuleList(nn.TransformerEncoderLayer(width, 4, 64, **layer) for _ in range(depth))
        self.head = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 10))

    def forward(self, x):
        x = self.patch(x).flatten(2).mT + self.place
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean(dim=1))


def train(model, optimizer, steps):
    for batch in torch.randint(0, 1400, (steps, 64)):
        F.cross_entropy(model.train()(X[batch]), Y[batch]).backward(), optimizer.step(), optimizer.zero_grad()


@torch.no_grad()
def show(name, model):
    right = (model.eval()(X[1400:]).argmax(dim=1) == Y[1400:]).float().mean().item()
    times = [(time.perf_counter(), model(X[:100]), time.perf_counter()) for _ in range(20)]
    size = f"{mc.count_parameters(model).weights:,} weights, {1000 * min(b - a for a, _, b in times):.1f} ms"
    print(f"{name}: {100 * right:.1f} % of test images right, {size}")


if __name__ == "__main__":
    torch.manual_seed(0), torch.set_num_threads(1)
    model = ViT()
    train(model, torch.optim.AdamW(model.parameters(), lr=2e-3), 600)
    show("trained", model)
    mc.rewire(model, "blocks", fan_in=1)  # each block reads one block before it, and so may skip some
    optimizer = torch.optim.AdamW(mc.param_groups(model, lr=1e-3, mask_lr=0.01))
    mc.attach(optimizer, model, mc.Blend(steps=300, keep=0.5))  # use at most half of the blocks' parameters
    train(model, optimizer, 300)
    mc.freeze(model)
    train(model, optimizer, 300)  # fine-tune
    print(*(f"block {j} reads {k}" for j, [k] in enumerate(mc.wiring_of(model)[1:], start=1)), sep=", ")
    show("smaller", mc.prune(model, X[:2]))  # checked to compute the same
