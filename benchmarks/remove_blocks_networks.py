"""The ResNet and the ViT of remove_blocks.py, each as a list of parts that run from first to last."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class BasicBlock(nn.Module):
    """Two 3x3 convolutions and a shortcut."""

    def __init__(self, width: int, stride: int = 1) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(width, width, 3, stride, 1, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(),
            nn.Conv2d(width, width, 3, 1, 1, bias=False),
            nn.BatchNorm2d(width),
        )
        self.shortcut: nn.Module = nn.Identity()
        if stride > 1:
            self.shortcut = nn.Sequential(nn.Conv2d(width, width, 1, stride, bias=False), nn.BatchNorm2d(width))

    def forward(self, x: Tensor) -> Tensor:
        """Return the ReLU of their sum."""
        return F.relu(self.shortcut(x) + self.body(x))


class Attention(nn.Module):
    """A pre-norm transformer block."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        """Apply attention, then the MLP."""
        batch, tokens, width = x.shape
        qkv = self.qkv(self.norm1(x)).view(batch, tokens, 3, self.heads, width // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        read = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(batch, tokens, width)
        x = x + self.out(read)
        y: Tensor = x + self.mlp(self.norm2(x))
        return y


class Patches(nn.Module):
    """An image as 16 tokens with learned positions."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.project = nn.Conv2d(3, width, 4, 4)
        self.place = nn.Parameter(torch.randn(1, 16, width) * 0.02)

    def forward(self, x: Tensor) -> Tensor:
        """Return tokens, N x 16 x width."""
        tokens: Tensor = self.project(x).flatten(2).transpose(1, 2) + self.place
        return tokens


class TokenMean(nn.Module):
    """The mean over all tokens."""

    def forward(self, x: Tensor) -> Tensor:
        """Return the mean, N x width."""
        return x.mean(dim=1)


def parts_of(network: str) -> list[nn.Module]:
    """Return the network as a list that runs from first to last: a stem, 12 blocks, a classifier."""
    if network == "vit":
        blocks: list[nn.Module] = [Attention(48, 4) for _ in range(12)]
        return [Patches(48), *blocks, nn.Sequential(nn.LayerNorm(48), TokenMean(), nn.Linear(48, 10))]
    blocks = [BasicBlock(32, stride=2 if k == 4 else 1) for k in range(12)]  # 8x8, then 4x4
    stem = nn.Sequential(nn.Conv2d(3, 32, 3, 2, 1, bias=False), nn.BatchNorm2d(32), nn.ReLU())
    return [stem, *blocks, nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 10))]
