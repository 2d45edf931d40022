"""Learn the wiring of a network that is no classifier: six conv blocks that take the noise out of handwritten digits.

python examples/denoise.py
"""

import torch
from torch import nn
from torch.nn import functional as F

import maskconnect as mc
from maskconnect.errors import need


class Block(nn.Module):
    """A convolution, a norm, a ReLU."""

    def __init__(self, width):
        super().__init__()
        self.layers = nn.Sequential(nn.Conv2d(width, width, 3, padding=1), nn.BatchNorm2d(width), nn.ReLU())

    def forward(self, x):
        return self.layers(x)


def network(connectivity, seed, blocks=6, width=16):
    stack = mc.MaskedStack([Block(width) for _ in range(blocks)], 2, connectivity=connectivity, seed=seed)
    return nn.Sequential(nn.Conv2d(1, width, 3, padding=1), nn.ReLU(), stack, nn.Conv2d(width, 1, 3, padding=1))


def noisy(x, seed):
    return x + torch.randn(x.shape, generator=torch.Generator().manual_seed(seed))


def train(connectivity="learned", seed=0, epochs=16):
    """Learn for half of the epochs, freeze, fine-tune at a tenth of the rate; the squared error on new digits."""
    digits = need("sklearn.datasets", extra="data").load_digits()
    x = torch.tensor(digits.images[:, None] / 8 - 1, dtype=torch.float32)
    torch.manual_seed(seed)
    model = network(connectivity, seed)
    optimizer = torch.optim.SGD(mc.param_groups(model, lr=0.05, mask_lr=0.03), momentum=0.9)
    mc.attach(optimizer, model, mc.Blend(steps=epochs // 2 * 20))
    for epoch in range(epochs):
        if epoch == epochs // 2:
            mc.freeze(model)
            optimizer.param_groups[0]["lr"] /= 10
        for number, index in enumerate(torch.randperm(1000).split(50)):
            loss = F.mse_loss(model(noisy(x[index], 1000 * epoch + number)), x[index])
            loss.backward(), optimizer.step(), optimizer.zero_grad()
    return model, F.mse_loss(model.eval()(noisy(x[1000:], -1)), x[1000:]).item()


if __name__ == "__main__":
    torch.set_num_threads(1)  # so small a network is faster on one core than on many
    found = {kind: train(kind) for kind in ("learned", "prev", "random")}
    for kind, (_, error) in found.items():
        print(f"{kind:8} wiring: squared error {error:.4f} (the noise has 1)")
    for block, sources in enumerate(mc.wiring_of(found["learned"][0])):
        print(f"block {block} reads", *sources or ["the stem"])
