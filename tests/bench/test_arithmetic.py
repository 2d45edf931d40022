"""What a step computes, moves and holds."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from maskconnect.bench import steps
from maskconnect.bench.arithmetic import Arithmetic, count
from maskconnect.bench.cases import CASES, resnet_case, resnext_case
from maskconnect.bench.forms import COUNTED, Form
from maskconnect.bench.steps import count_steps, step_of

FLOAT = 4


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_a_product_is_counted(device):
    a, b = torch.ones(10, 20, device=device), torch.ones(20, 30, device=device)
    assert count(lambda: a @ b) == Arithmetic(
        flops=2 * 10 * 20 * 30, traffic=FLOAT * (200 + 600 + 300), peak=FLOAT * (200 + 600 + 300), operations=1
    )


def test_products_that_are_added_in_place_count_too():
    total, a, b = torch.zeros(3, 4, 6), torch.ones(3, 4, 5), torch.ones(3, 5, 6)
    found = count(lambda: total.baddbmm_(a, b))
    assert found.flops == 2 * 3 * 4 * 5 * 6
    assert found.traffic == FLOAT * (total.numel() + a.numel() + b.numel())


@pytest.mark.parametrize("groups", [1, 4])
def test_convolutions_count_twice_as_much_backward_whatever_their_groups(groups):
    conv = nn.Conv2d(8, 16, 3, padding=1, groups=groups, bias=False)
    x = torch.ones(2, 8, 5, 5, requires_grad=True)
    forward = 2 * (2 * 16 * 5 * 5) * (8 // groups) * 9
    assert count(lambda: conv(x).sum().backward()).flops == 3 * forward


def test_views_move_nothing_and_what_is_freed_is_held_no_more():
    x = torch.ones(1000)

    def step():
        for _ in range(5):
            x.view(10, 100)[2:4].t()
            x + 1

    found = count(step)
    assert found.traffic == 5 * 2 * FLOAT * 1000
    assert found.peak == 2 * FLOAT * 1000


def test_operations_are_counted_but_no_views_types_and_empty_memory():
    x = torch.ones(4, 6)

    def step():
        x.view(24)[2:].detach()
        x.new_empty(3)
        torch.promote_types(x.dtype, torch.float64)
        x.add_(1).mul_(2)
        torch._foreach_add_([x, x], 1)

    assert count(step).operations == 3


@pytest.mark.parametrize("sgd", ["foreach", "fused"])
def test_one_operation_of_an_optimizer_is_for_all_weights(sgd):
    def operations(weights):
        optimizer = Form(sgd=sgd).optimizer([nn.Parameter(torch.ones(2)) for _ in range(weights)])
        for p in optimizer.param_groups[0]["params"]:
            p.grad = torch.ones(2)
        return count(optimizer.step).operations

    assert operations(1) == operations(20) > 0


def test_attention_counts_two_products_forward_and_five_backward():
    q, k, v = (torch.randn(2, 3, 8, 4, requires_grad=True) for _ in range(3))
    product = 2 * 2 * 3 * 8 * 8 * 4
    found = count(lambda: F.scaled_dot_product_attention(q, k, v).sum().backward())
    assert found.flops == 7 * product


def test_memory_that_is_only_taken_is_not_moved():
    x = torch.ones(1000)

    def step():
        torch.add(x, 1, out=x.new_empty(1000))
        torch.zeros_like(x)

    assert count(step).traffic == 3 * FLOAT * 1000  # read, written, zeros


def test_what_autograd_keeps_is_held():
    x = torch.ones(1000, requires_grad=True)

    def step():
        x.exp().exp().exp().sum().backward()
        x.grad = None

    assert count(step).peak >= 4 * FLOAT * 1000  # x and three results


@pytest.mark.parametrize("name", ["resnet38", "resnet110", "resnext29-8-8", "transformer12"])
def test_a_learning_step_holds_and_starts_no_more_than_the_bar_allows(name):
    case, device = CASES[name], "cpu" if name == "transformer12" else "meta"  # on meta, attention is not fused
    found = count_steps(case, case.batches[-1], ("plain", "learning"), device)
    assert found["learning"].peak < case.bar.memory * found["plain"].peak
    assert found["learning"].operations < case.bar.operations * found["plain"].operations


@pytest.mark.parametrize("case", [resnet_case(20, 3), resnext_case(4, 2, 1)], ids=["resnet", "resnext"])
def test_counts_on_the_meta_device_are_those_of_a_real_step(case, monkeypatch):
    monkeypatch.setattr(steps, "SIDE", 8)
    for variant, found in count_steps(case, 4, case.variants).items():
        real = count(step_of(case, variant, 4, COUNTED))
        assert found.flops == pytest.approx(real.flops, rel=0.05 if variant == "frozen" else 0.001), variant
        assert found.peak == pytest.approx(real.peak, rel=0.1), variant
        assert real.operations == pytest.approx(found.operations, rel=0.15), variant  # checks of values are left out


@pytest.mark.parametrize("name", [name for name in CASES if name.startswith("resnet")])
def test_a_learning_resnet_holds_at_most_half_as_much_again_as_a_plain_one(name):
    found = count_steps(CASES[name], 32, ("plain", "learning", "blending"))
    assert found["learning"].peak < 1.5 * found["plain"].peak
    assert found["blending"].peak < 1.6 * found["plain"].peak
    assert found["learning"].flops <= found["plain"].flops  # nothing flows back through blocks that nobody reads


def test_a_lean_resnext_holds_less_and_computes_more():
    found = count_steps(resnext_case(8, 8, 4), 64, ("plain", "learning", "reference", "lean"))
    assert found["plain"].peak < found["lean"].peak < 0.9 * found["learning"].peak
    assert found["learning"].peak < 0.6 * found["reference"].peak
    assert found["learning"].flops < found["lean"].flops


def test_a_step_on_the_meta_device_leaves_masks_alone():
    network = steps.make(CASES["resnet38"], "learning").to("meta")
    assert isinstance(network, nn.Module)
    steps.training_step(network, 2, COUNTED)()
    assert all(p.is_meta for p in network.parameters())
