"""A small task that all libraries of this folder train on."""

import torch
from torch import nn

import maskconnect as mc


def blocks(count=6, width=6, dropout=0.0):
    return [nn.Sequential(nn.Linear(width, width), nn.Tanh(), nn.Dropout(dropout)) for _ in range(count)]


class Regression(nn.Module):
    """Returns the loss itself, as the models of transformers do."""

    def __init__(self, seed=0, dropout=0.0):
        super().__init__()
        torch.manual_seed(seed)
        self.stack = mc.MaskedStack(blocks(dropout=dropout), fan_in=2)

    def forward(self, x, labels):
        return {"loss": (self.stack(x) - labels).square().mean()}


def samples(count=48, width=6):
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(count, width, generator=generator, dtype=torch.get_default_dtype())
    return [{"x": row, "labels": row.flip(0).sin()} for row in x]


def differences(state, other):
    """The names of tensors that are not bitwise identical."""
    assert state.keys() == other.keys()
    return [name for name in state if not torch.equal(state[name], other[name])]


def copied(model):
    return {name: value.clone() for name, value in model.state_dict().items()}
