"""A plain vision transformer for small images, in PyTorch alone.

Shape letters: B images, N tokens, H heads, D numbers per head. Sums overwrite outputs of linear layers, which no
backward pass needs.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class PlainLayer(nn.Module):
    """A pre-norm layer: attention, then an MLP, each added to what it reads."""

    def __init__(self, width: int, heads: int, ratio: int) -> None:
        super().__init__()
        self.heads = heads
        self.attention_norm, self.mlp_norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.project = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.widen, self.narrow = nn.Linear(width, ratio * width), nn.Linear(ratio * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Return the tokens after this layer."""
        qkv = self.qkv(self.attention_norm(x)).unflatten(2, (3, self.heads, -1))
        q_BHND, k_BHND, v_BHND = qkv.permute(2, 0, 3, 1, 4).unbind(0)
        y: Tensor = self.project(F.scaled_dot_product_attention(q_BHND, k_BHND, v_BHND).transpose(1, 2).flatten(2))
        y += x
        z: Tensor = self.narrow(F.gelu(self.widen(self.mlp_norm(y))))
        z += y
        return z


class PlainTransformer(nn.Module):
    """An encoder with patches and a class token, without dropout."""

    def __init__(
        self,
        layers: int,
        width: int,
        heads: int,
        num_classes: int,
        *,
        ratio: int = 4,
        side: int = 32,
        patch: int = 4,
    ) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, patch, patch)
        self.token = nn.Parameter(0.02 * torch.randn(1, 1, width))
        self.places = nn.Parameter(0.02 * torch.randn(1, (side // patch) ** 2 + 1, width))
        self.blocks = nn.ModuleList(PlainLayer(width, heads, ratio) for _ in range(layers))
        self.norm, self.fc = nn.LayerNorm(width), nn.Linear(width, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        """Return the scores of all classes."""
        x = self.patches(x).flatten(2).transpose(1, 2)
        x = torch.cat([self.token.expand(len(x), -1, -1), x], dim=1) + self.places
        for block in self.blocks:
            x = block(x)
        scores: Tensor = self.fc(self.norm(x[:, 0]))
        return scores
