"""Learn the wiring of a network that is not a classifier: six convolutions that remove noise from digits.

Run it with: python examples/denoise.py (35 seconds on one core)
Result here, mean of 3 seeds: learned 0.1625, chain 0.1514, random 0.1570 (less is better). Learning does not help.
"""

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional as F

import maskconnect as mc


def block(width):
    return nn.Sequential(nn.Conv2d(width, width, 3, padding=1), nn.BatchNorm2d(width), nn.ReLU())


def network(connectivity, seed, blocks=6, width=16):
    stack = mc.MaskedStack([block(width) for _ in range(blocks)], 2, connectivity=connectivity, seed=seed)
    return nn.Sequential(nn.Conv2d(1, width, 3, padding=1), nn.ReLU(), stack, nn.Conv2d(width, 1, 3, padding=1))


def with_noise(x, seed):
    return x + torch.randn(x.shape, generator=torch.Generator().manual_seed(seed))


def train(connectivity="learned", seed=0, epochs=16):
    """Learn for half of the epochs, freeze, then fine-tune at a tenth of the learning rate."""
    x = torch.tensor(load_digits().images[:, None] / 8 - 1, dtype=torch.float32)
    torch.manual_seed(seed)
    model = network(connectivity, seed)
    optimizer = torch.optim.SGD(mc.param_groups(model, lr=0.05, mask_lr=0.03), momentum=0.9)
    mc.attach(optimizer, model, mc.Blend(steps=epochs // 2 * 20))
    for epoch in range(epochs):
        if epoch == epochs // 2:
            mc.freeze(model)
            optimizer.param_groups[0]["lr"] /= 10
        for number, index in enumerate(torch.randperm(1000).split(50)):
            F.mse_loss(model(with_noise(x[index], 1000 * epoch + number)), x[index]).backward()
            optimizer.step()
            optimizer.zero_grad()
    return model, F.mse_loss(model.eval()(with_noise(x[1000:], -1)), x[1000:]).item()


if __name__ == "__main__":
    torch.set_num_threads(1)  # this network is too small to gain from more
    for connectivity in ("learned", "prev", "random"):
        errors = [train(connectivity, seed)[1] for seed in range(3)]
        print(f"{connectivity:8} wiring: squared error {sum(errors) / 3:.4f} (the noise has 1)")
