"""Make a trained ViT half as large: learn which blocks to skip, fine-tune, and remove the others.

Run it with: python examples/smaller.py (75 seconds on one core)
Result here, one seed: learned 88.9 %, evenly spaced 89.7 %, half of the weights each; 87.4 % before. No gain.
"""

import copy

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
        options = {"dropout": 0.0, "batch_first": True, "norm_first": True}
        self.blocks = nn.ModuleList(nn.TransformerEncoderLayer(width, 4, 64, **options) for _ in range(depth))
        self.head = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 10))

    def forward(self, x):
        x = self.patch(x).flatten(2).mT + self.place
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean(dim=1))


def train(model, optimizer, steps):
    for index in torch.randint(0, 1400, (steps, 64)):
        F.cross_entropy(model.train()(X[index]), Y[index]).backward()
        optimizer.step()
        optimizer.zero_grad()


def shrink(model, connectivity):
    """Train 300 steps while masks learn (if they do), freeze, train 300 steps more, and prune."""
    torch.manual_seed(1)  # the same batches for each connectivity
    mc.rewire(model, "blocks", fan_in=1, connectivity=connectivity)  # a block reads one earlier block: it may skip some
    optimizer = torch.optim.AdamW(mc.param_groups(model, lr=1e-3, mask_lr=0.01))
    if connectivity == "learned":
        mc.attach(optimizer, model, mc.Blend(steps=300, keep=0.5))  # keep at most half of the blocks' parameters
    train(model, optimizer, 300)
    mc.freeze(model)
    train(model, optimizer, 300)
    return mc.prune(model, X[:2])  # checks that the outputs are equal


def show(name, model):
    accuracy = (model.eval()(X[1400:]).argmax(dim=1) == Y[1400:]).float().mean().item()
    print(f"{name}: {100 * accuracy:.1f} % of test images correct, {mc.count_parameters(model).weights:,} weights")


if __name__ == "__main__":
    torch.manual_seed(0)
    torch.set_num_threads(1)  # this network is too small to gain from more
    model = ViT()
    train(model, torch.optim.AdamW(model.parameters(), lr=2e-3), 600)
    show("before, 12 blocks", model)
    show("learned wiring, 6 blocks", shrink(copy.deepcopy(model), "learned"))
    kept = [0, 2, 4, 7, 9, 11]
    evenly = [[block for block in kept if block < reader][-1:] for reader in range(12)]  # each reads the last kept one
    show("evenly spaced wiring, 6 blocks", shrink(copy.deepcopy(model), evenly))
