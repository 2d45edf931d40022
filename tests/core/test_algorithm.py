"""The stack, its masks and `mc.attach` do what Algorithm 1 says, written in plain lines."""

import copy

import pytest
import torch
from networks import mlp_blocks, mlp_layers
from scipy.stats import chisquare
from torch import nn
from torch.nn import functional as F

import maskconnect as mc
from maskconnect.core import algorithm

X = torch.linspace(-2, 2, 18, dtype=torch.float64).reshape(3, 6)
JOINS = {"mean": algorithm.mean, "sum": algorithm.total, "residual": algorithm.residual}


def loss_of(network):
    return F.mse_loss(network(X), X.sin())


def rows_of(matrix, stack):
    """A matrix of masks as one row per module, without its padding."""
    first = stack.layout.targets.start
    sizes = [len(row) for row in stack.masks.candidates]
    return [torch.zeros(0)] * first + [row[: sizes[first + t]].detach().double() for t, row in enumerate(matrix)]


def modules_for(aggregation, layered):
    if layered:
        first, second, third = mlp_layers(3, 3)
        return [first, second, third[:1]]  # a single last module, whose output is that of the stack
    blocks = mlp_blocks(6)
    if aggregation == "residual":
        return [*map(mc.Residual, blocks[:-1]), Last(blocks[-1])]
    return blocks


class Last(nn.Module):
    """A last block whose residual alone is the output, so that both networks end alike."""

    def __init__(self, body):
        super().__init__()
        self.body = body

    def forward(self, x):
        y = self.body(x)
        return y, torch.zeros_like(y)


@pytest.mark.parametrize("reference", [False, True])
@pytest.mark.parametrize(
    ("aggregation", "layered"), [("mean", False), ("sum", False), ("residual", False), ("mean", True), ("sum", True)]
)
@pytest.mark.parametrize("fan_in", [1, 2, 3])
def test_several_steps_of_a_stack_are_those_of_algorithm_1(aggregation, layered, fan_in, reference):
    torch.manual_seed(0)
    stack = mc.MaskedStack(modules_for(aggregation, layered), fan_in, aggregation=aggregation).double()
    modules = copy.deepcopy(stack.flat())
    optimizer = torch.optim.SGD(mc.param_groups(stack, lr=0.1, mask_lr=0.5))
    mc.attach(optimizer, stack)
    real = rows_of(stack.masks.real, stack)

    def output(network):
        """What the plain lines return, as the stack does: after the join of a single pair, which is a ReLU."""
        if aggregation != "residual":
            return network
        return lambda x: torch.relu(network(x)[0])

    for _ in range(4):
        with mc.reference() if reference else torch.enable_grad():
            loss_of(stack).backward()
        real = algorithm.normalized(real)
        for ours, theirs in zip(rows_of(stack.masks.real, stack), real, strict=True):
            torch.testing.assert_close(ours, theirs)
        masks = rows_of(stack.masks.binary, stack)
        assert all(int(row.sum()) == min(fan_in, len(row)) for row in masks)
        join = JOINS[aggregation]
        real = algorithm.step(
            modules, stack.masks.candidates, real, masks, lambda n: loss_of(output(n)), lr=0.1, mask_lr=0.5, join=join
        )
        optimizer.step()
        optimizer.zero_grad()
        for ours, theirs in zip(rows_of(stack.masks.real, stack), real, strict=True):
            torch.testing.assert_close(ours, theirs)
        for ours, theirs in zip(stack.flat(), modules, strict=True):
            for p, q in zip(ours.parameters(), theirs.parameters(), strict=True):
                torch.testing.assert_close(p, q)


def test_draws_of_a_stack_have_the_distribution_of_algorithm_1():
    stack = mc.MaskedStack([nn.Identity() for _ in range(5)], 2)
    row = torch.tensor([0.5, 0.25, 0.15, 0.1])
    stack.masks.real.data[-1] = row
    generator, count = torch.Generator().manual_seed(0), 4000

    def chosen(mask):
        return tuple(mask.nonzero().flatten().tolist())

    ours = [chosen(stack.masks.draw().mask_TS[-1]) for _ in range(count)]
    theirs = [chosen(algorithm.draw([row], 2, generator)[0]) for _ in range(count)]
    pairs = sorted({*ours, *theirs})
    assert len(pairs) == 6
    a, b = ([draws.count(pair) for pair in pairs] for draws in (ours, theirs))
    expected = [(m + n) / 2 for m, n in zip(a, b, strict=True)]
    assert chisquare([*a, *b], expected * 2, ddof=len(pairs)).pvalue > 1e-3


def test_sources_of_weight_zero_are_drawn_when_the_others_run_out():
    generator = torch.Generator().manual_seed(0)
    (mask,) = algorithm.draw([torch.tensor([0.0, 1.0, 0.0])], 2, generator)
    assert mask[1] == 1
    assert mask.sum() == 2


def test_iterations_draw_and_learn():
    torch.manual_seed(0)
    modules = [module.double() for module in mlp_blocks(4)]
    candidates = [(), (0,), (0, 1), (0, 1, 2)]
    real = [torch.ones(len(row), dtype=torch.float64) for row in candidates]
    first = loss_of(lambda x: algorithm.forward(modules, candidates, real, x, algorithm.mean)).item()
    generator = torch.Generator().manual_seed(0)
    learned = algorithm.iterate(modules, candidates, real, 2, [loss_of] * 100, generator, lr=0.1, mask_lr=0.5)
    masks = algorithm.draw(learned, 2, generator)
    assert loss_of(lambda x: algorithm.forward(modules, candidates, masks, x, algorithm.mean)).item() < first / 2
    assert len(set(learned[-1].tolist())) > 1
