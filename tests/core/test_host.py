"""A learning step never waits for the device, except for one copy of the real masks: nothing else is read on the host.

There is no GPU here. Parameters, buffers and inputs count as the device's, and so does whatever an operation makes of
them; a dispatch mode notes every operation that would have to wait for the device.
"""

import pytest
import torch
from networks import conv_blocks, mlp_layers
from test_residual import residual_blocks
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import maskconnect as mc
from maskconnect.core import host

WAITS = ("_local_scalar_dense", "nonzero", "equal", "masked_select", "unique_dim", "_unique2")
WAYS = [mc.Draw(), mc.Draw(images=2), mc.Blend(steps=9), mc.Blend(steps=9, gradient="rms", decay=True, images=2)]


class Waits(TorchDispatchMode):
    """Notes what would be read on the host of what is on the device."""

    def __init__(self, model, *inputs):
        super().__init__()
        self.device = [*model.parameters(), *model.buffers(), *inputs]  # kept, so that no id is used again
        self.ids, self.found = {id(y) for y in self.device}, []

    def holds(self, y):
        return isinstance(y, torch.Tensor) and id(y) in self.ids

    def hold(self, y):
        if isinstance(y, torch.Tensor):
            self.device.append(y)
            self.ids.add(id(y))

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs, name = kwargs or {}, func._overloadpacket.__name__
        out = func(*args, **kwargs)
        if not any(map(self.holds, tree_leaves((args, kwargs)))):
            return out
        to_host = name == "_to_copy" and kwargs.get("device") == torch.device("cpu")
        to_device = name == "copy_" and self.holds(args[0]) and not self.holds(args[1])
        waits = to_device and not (args[2] if len(args) > 2 else kwargs.get("non_blocking", False))
        if to_host or waits or name in WAITS or (name == "copy_" and not self.holds(args[0])):
            self.found.append(name)
        if not to_host:
            for y in tree_leaves(out):
                self.hold(y)
        return out


@pytest.fixture
def read(monkeypatch):
    """What Tensor.tolist and Tensor.numpy read, which no dispatch mode sees. Copies do not wait, as on CUDA."""
    found = []
    monkeypatch.setattr(host, "STAGED", {"cpu"})
    for name in ("tolist", "numpy"):
        original = getattr(torch.Tensor, name)
        monkeypatch.setattr(torch.Tensor, name, lambda y, *args, _original=original: found.append(y) or _original(y))
    return found


def stacks():
    yield "mean", mc.MaskedStack(conv_blocks(), 2)
    yield "residual", mc.MaskedStack(residual_blocks(), 3, aggregation="residual")
    yield "stream", mc.MaskedStack(conv_blocks(), 2, aggregation="stream")
    yield "scaled", mc.MaskedStack(conv_blocks(), 2, aggregation="scaled")
    yield "layers", mc.MaskedStack(mlp_layers(3, 4), 2)


@pytest.mark.parametrize("how", WAYS, ids=str)
@pytest.mark.parametrize("kind", ["mean", "residual", "stream", "scaled", "layers"])
def test_a_step_reads_the_masks_once_and_nothing_else(kind, how, read):
    stack = dict(stacks())[kind]
    x = torch.randn(8, 6) if kind == "layers" else torch.randn(8, 4, 8, 8)
    optimizer = torch.optim.SGD(mc.param_groups(stack, lr=0.01, mask_lr=0.01))
    mc.attach(optimizer, stack, how)
    for _ in range(3):  # the first may look at what lasts, such as a device or a shape; later ones may not
        read.clear()
        with Waits(stack, x) as waits:
            optimizer.zero_grad()
            stack(x).square().mean().backward()
            for p in stack.parameters():
                waits.hold(p.grad)
            optimizer.step()
    assert waits.found == ["_to_copy"]
    assert not any(map(waits.holds, read))


def test_it_is_seen_when_something_is_read(read):
    model, x = nn.Linear(3, 3), torch.randn(2, 3)
    with Waits(model, x) as waits:
        y = model(x).detach()
        float(y.sum())
        y.to("cpu", copy=True)
        y.tolist()
    assert waits.found == ["_local_scalar_dense", "_to_copy"]
    assert any(map(waits.holds, read))
