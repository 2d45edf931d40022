"""The fast path of blended layers: one matrix product for all targets."""

import pytest
import torch
from torch import nn

import maskconnect as mc
from maskconnect.core import inputs, mixture

LAYERS, BRANCHES = 3, 4


def network(**options):
    torch.manual_seed(0)
    layers = [[nn.Conv2d(3, 3, 3, padding=1) for _ in range(BRANCHES)] for _ in range(LAYERS)]
    return mc.MaskedStack([*layers, [nn.Conv2d(3, 3, 1)]], 2, **options).double()


def steps(model, how, count, x):
    """Losses, gradients and masks of some steps."""
    optimizer = torch.optim.SGD(mc.param_groups(model, lr=0.1, mask_lr=0.05))
    mc.attach(optimizer, model, how)
    found = []
    for _ in range(count):
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        found += [loss.detach(), *(p.grad.clone() for p in model.parameters())]
        optimizer.step()
        found.append(model.masks.real.detach().clone())
    return found


@pytest.fixture
def products(monkeypatch):
    """How often the fast path was taken."""
    calls = []

    def counted(*args):
        calls.append(args)
        return mixture.mixture(*args)

    monkeypatch.setattr(inputs, "mixture", counted)
    return calls


@pytest.mark.parametrize("credit", ["whole", "new"])
@pytest.mark.parametrize("aggregation", ["mean", "sum"])
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_steps_are_those_of_the_readable_path(credit, aggregation, layout, products):
    x = torch.randn(2, 3, 5, 5, dtype=torch.float64).contiguous(memory_format=layout)
    how = mc.Blend(steps=4, credit=credit)
    fast = steps(network(aggregation=aggregation).to(memory_format=layout), how, 4, x)
    assert len(products) == 3 * (LAYERS - 1)  # the last step reads the top-K; the last module is alone in its layer
    with mc.reference():
        readable = steps(network(aggregation=aggregation).to(memory_format=layout), how, 4, x)
    assert len(products) == 3 * (LAYERS - 1)
    for a, b in zip(fast, readable, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-12)


def test_channels_last_stays_so(products):
    seen = []
    model = network().to(memory_format=torch.channels_last)
    model.flat()[BRANCHES].register_forward_hook(lambda module, args, output: seen.append(args[0]))
    mc.attach(torch.optim.SGD(mc.param_groups(model, lr=0.1, mask_lr=0.1)), model, mc.Blend(steps=9))
    model(torch.randn(2, 3, 5, 5, dtype=torch.float64).contiguous(memory_format=torch.channels_last))
    assert products
    assert seen[0].is_contiguous(memory_format=torch.channels_last)


@pytest.mark.parametrize(
    "options",
    [
        {"aggregation": "scaled"},
        {"aggregation": lambda sources, mask: sum(m * y for m, y in zip(mask, sources, strict=True))},
        {"wiring": [[[]] * 4, [[0, 1, 2]] * 4, [[0, 1, 2, 3]] * 4, [[0, 1, 2]]]},
    ],
)
def test_what_is_not_covered_goes_the_usual_way(options, products):
    model = network(**options)
    mc.attach(torch.optim.SGD(mc.param_groups(model, lr=0.1, mask_lr=0.1)), model, mc.Blend(steps=9))
    x = torch.randn(2, 3, 5, 5, dtype=torch.float64)
    model(x).sum().backward()
    assert len(products) == ("wiring" in options)  # of one layer all candidates are read


def test_drawn_masks_and_mixed_types_go_the_usual_way(products):
    x = torch.randn(2, 3, 5, 5, dtype=torch.float64)
    network()(x)
    model = network()
    mc.attach(torch.optim.SGD(mc.param_groups(model, lr=0.1, mask_lr=0.1)), model, mc.Blend(steps=9))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        model.float()(x.float())
    assert not products


def test_it_allows_checkpointing_and_refuses_gradients_of_gradients(products):
    from torch.utils.checkpoint import checkpoint

    x, how = torch.randn(2, 3, 5, 5, dtype=torch.float64, requires_grad=True), mc.Blend(steps=9)
    gradients = []
    for call in (lambda model: model(x), lambda model: checkpoint(model, x, use_reentrant=False)):
        model = network()
        mc.attach(torch.optim.SGD(mc.param_groups(model, lr=0.1, mask_lr=0.1)), model, how)
        gradients.append(torch.autograd.grad(call(model).square().sum(), [x, model.masks.real], create_graph=False))
    for a, b in zip(*gradients, strict=True):
        torch.testing.assert_close(a, b)
    (first,) = torch.autograd.grad(model(x).square().sum(), x, create_graph=True)
    with pytest.raises(mc.ConnectivityError, match=r"mc\.reference"):
        first.sum().backward()


def test_a_branch_with_a_share_of_zero_is_not_read(products):
    """A product would multiply it by 0, which spoils everything if it is not finite."""
    model = network()
    how = mc.Blend(steps=1000, uniform_floor=0.0)
    mc.attach(torch.optim.SGD(mc.param_groups(model, lr=0.1, mask_lr=0.1)), model, how)
    with torch.no_grad():
        model.masks.real[:, 1] = 0
        for layer in list(model.blocks)[:-1]:
            layer[1].bias.fill_(torch.inf)
    model(torch.randn(2, 3, 5, 5, dtype=torch.float64)).sum().backward()
    assert not products
    read = [branch for layer in list(model.blocks)[:-1] for k, branch in enumerate(layer) if k != 1]
    assert all(p.grad.isfinite().all() for branch in read for p in branch.parameters())


def test_blended_layers_have_shapes_on_the_meta_device(products):
    model = network().to("meta")
    mc.attach(torch.optim.SGD(mc.param_groups(model, lr=0.1, mask_lr=0.1)), model, mc.Blend(steps=9))
    assert model(torch.randn(2, 3, 5, 5, dtype=torch.float64, device="meta")).shape == (2, 3, 5, 5)
    assert products
