"""Learn which of eight MLPs to read, where the right answer is known: only two of them see the signal.

python examples/mlp.py
"""

import torch
from torch import nn
from torch.nn import functional as F

import maskconnect as mc

SIGNAL = (2, 5)  # the label is the sign of the sum of all that these two see; the other six see noise


class Eye(nn.Module):
    """An MLP that sees four numbers of the input."""

    def __init__(self, index):
        super().__init__()
        self.seen = slice(4 * index, 4 * index + 4)
        self.net = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 16))

    def forward(self, x):
        return self.net(x[:, self.seen])


def batch(size, seed):
    x = torch.randn(size, 32, generator=torch.Generator().manual_seed(seed))
    return x, (sum(x[:, 4 * k : 4 * k + 4].sum(dim=1) for k in SIGNAL) > 0).long()


def train(connectivity="learned", seed=0, mask_lr=0.03, steps=400, blend=True, show=()):
    torch.manual_seed(seed)
    reader = nn.Sequential(nn.ReLU(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 2))
    model = mc.MaskedStack([[Eye(k) for k in range(8)], [reader]], fan_in=2, connectivity=connectivity, seed=seed)
    optimizer = torch.optim.SGD(mc.param_groups(model, lr=0.1, mask_lr=mask_lr), momentum=0.9)
    mc.attach(optimizer, model, mc.Blend(steps=steps) if blend else mc.Draw())
    for step in range(steps):
        x, y = batch(128, seed * steps + step)
        loss = F.cross_entropy(model(x), y)
        if step in show:
            print(f"{step:5d}  {loss:.3f}", *(f"{100 * m:5.0f}" for m in model.masks.real[0]))
        loss.backward(), optimizer.step(), optimizer.zero_grad()
    mc.freeze(model)
    x, y = batch(10_000, 2**32)
    return model, (model.eval()(x).argmax(dim=1) == y).float().mean().item()


if __name__ == "__main__":
    torch.set_num_threads(1)  # so small a network is faster on one core than on many
    print("Eight MLPs each see a part of the input; only", *SIGNAL, "see the signal. A reader takes in 2 of the 8.")
    print("\n             the mask of the reader: how much it wants each of them, in %")
    print(" step   loss", *(f"{k:5d}" for k in range(8)))
    learned = train(show=(0, 50, 100, 150, 200, 399))
    print("\nwiring of the reader    test accuracy   it reads")
    wirings = {"learned, 2 of 8": learned, "random, 2 of 8": train("random"), "full, all 8": train("full")}
    for kind, (model, accuracy) in wirings.items():
        print(f"{kind:20}  {100 * accuracy:13.1f} %  ", *mc.wiring_of(model)[1][0])
