"""Learn the wiring of a convolutional network on handwritten digits: nine residual blocks, each reads three.

Run it with: python examples/convnet.py (55 seconds on one core)
Result here, mean of 3 seeds: learned 95.9 %, chain 96.2 %, random 96.4 %. Blocks that are alike leave little to choose.
"""

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional as F

import maskconnect as mc


class Block(nn.Module):
    """A residual block with the parameter-free shortcut of ResNet."""

    def __init__(self, inputs, outputs):
        super().__init__()
        self.stride, self.extra = outputs // inputs, outputs - inputs
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride=self.stride, padding=1, bias=False)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
        self.norm1, self.norm2 = nn.BatchNorm2d(outputs), nn.BatchNorm2d(outputs)

    def forward(self, x):
        shortcut = F.pad(x[:, :, :: self.stride, :: self.stride], (0, 0, 0, 0, 0, self.extra))
        return F.relu(self.norm2(self.conv2(F.relu(self.norm1(self.conv1(x))))) + shortcut)


def network(connectivity, seed, fan_in=3):
    widths = [(16, 16)] * 3 + [(16, 32)] + [(32, 32)] * 2 + [(32, 64)] + [(64, 64)] * 2
    stack = mc.MaskedStack([Block(*pair) for pair in widths], fan_in, connectivity=connectivity, seed=seed)
    pool = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten())
    return nn.Sequential(nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), stack, pool, nn.Linear(64, 10))


def train(connectivity="learned", seed=0, how=mc.Blend(steps=120), mask_lr=0.03):
    """Learn for 6 epochs of 20 steps, freeze, then fine-tune for 6 epochs at a tenth of the learning rate."""
    digits = load_digits()
    x, y = torch.tensor(digits.images[:, None] / 8 - 1, dtype=torch.float32), torch.tensor(digits.target)
    torch.manual_seed(seed)
    model = network(connectivity, seed)
    optimizer = torch.optim.SGD(mc.param_groups(model, lr=0.05, mask_lr=mask_lr, weight_decay=1e-4), momentum=0.9)
    mc.attach(optimizer, model, how)
    for epoch in range(12):
        if epoch == 6:
            mc.freeze(model)
            optimizer.param_groups[0]["lr"] /= 10
        for index in torch.randperm(1000).split(50):
            F.cross_entropy(model(x[index]), y[index]).backward()
            optimizer.step()
            optimizer.zero_grad()
    return model, (model.eval()(x[1000:]).argmax(dim=1) == y[1000:]).float().mean().item()


if __name__ == "__main__":
    torch.set_num_threads(1)  # this network is too small to gain from more
    for connectivity in ("learned", "prev", "random"):
        accuracies = [train(connectivity, seed)[1] for seed in range(3)]
        print(f"{connectivity:8} wiring: {100 * sum(accuracies) / 3:.1f} % of test images correct")
