"""Recordings of small models for tests, and what is in their folders."""

import json

import torch
from torch import nn

import maskconnect as mc
from maskconnect.core.lookup import masks_of
from maskconnect.report.recorded import read_any


class TwoStacks(nn.Module):
    """A chain of unlike blocks, and layers of equal ones."""

    def __init__(self):
        super().__init__()
        blocks = [nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4)]
        self.chain = mc.MaskedStack(blocks, fan_in=2)
        self.layers = mc.MaskedStack([[nn.Linear(4, 4) for _ in range(3)] for _ in range(3)], fan_in=1)

    def forward(self, x):
        return self.layers(self.chain(x))


def optimizer_of(model, **how):
    optimizer = torch.optim.SGD(mc.param_groups(model, lr=0.1, mask_lr=0.05))
    mc.attach(optimizer, model, mc.Blend(**how) if how else None)
    return optimizer


def train(model, optimizer, recorder, *, epochs, steps=3, accuracy=0.5):
    for _ in range(epochs):
        for _ in range(steps):
            loss = model(torch.randn(8, 4)).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            recorder.step(loss=loss)
        recorder.epoch(accuracy=accuracy)


def lines(place, kind="epoch"):
    found = map(json.loads, (place / "metrics.jsonl").read_text().splitlines())
    return [line for line in found if line["kind"] == kind]


def content(place):
    return {path: path.read_bytes() for path in place.rglob("*") if path.is_file()}


def shuffled(model):
    """The state of a model with other masks."""
    other = TwoStacks()
    other.load_state_dict(model.state_dict())
    for masks in masks_of(other):
        masks.real.data = torch.rand_like(masks.real) * (masks.real > 0)
    return other.state_dict()


def shown_wiring(place):
    return {stack.name: stack.wires.layout.to_plain(stack.wires.sources) for stack in read_any(place).stacks}
