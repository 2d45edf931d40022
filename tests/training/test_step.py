"""One step of training."""

import pytest
import torch
from torch import nn

import maskconnect as mc
from maskconnect.training.options import Machine
from maskconnect.training.precision import Precision
from maskconnect.training.step import gradients

MACHINE = Machine(device=torch.device("cpu"), precision=Precision(name="fp32", device_type="cpu"), channels_last=False)


def network():
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Linear(6, 6), nn.ReLU()) for _ in range(4)]
    stack = mc.MaskedStack(blocks, connectivity="full")
    return nn.Sequential(stack, nn.Linear(6, 3)).double()


def batch(size=10):
    generator = torch.Generator().manual_seed(1)
    return (
        torch.randn(size, 6, generator=generator, dtype=torch.float64),
        torch.randint(3, (size,), generator=generator),
    )


@pytest.mark.parametrize("parts", [2, 3, 10])
def test_a_batch_in_parts_has_the_gradient_of_the_whole(parts):
    x, y = batch()
    found = []
    for count in (1, parts):
        model = network()
        step = gradients(model, torch.optim.SGD(model.parameters()), x, y, parts=count, machine=MACHINE)
        found.append((step, [p.grad for p in model.parameters() if p.grad is not None]))
    (whole, expected), (pieces, got) = found
    torch.testing.assert_close(got, expected)
    assert pieces.loss == pytest.approx(whole.loss)
    assert pieces.correct == whole.correct
    assert pieces.images == whole.images == 10


def test_a_step_reports_the_loss_the_hits_and_the_norm_of_the_gradient():
    x, y = batch()
    model = network()
    step = gradients(model, torch.optim.SGD(model.parameters()), x, y, parts=1, machine=MACHINE)
    scores = model(x)
    assert step.loss == pytest.approx(nn.functional.cross_entropy(scores, y).item())
    assert step.correct == int((scores.argmax(dim=1) == y).sum())
    norm = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None]).norm()
    assert step.gradient == pytest.approx(float(norm))


def test_gradients_of_the_step_before_do_not_count():
    x, y = batch()
    model = network()
    optimizer = torch.optim.SGD(model.parameters())
    first = gradients(model, optimizer, x, y, parts=1, machine=MACHINE)
    second = gradients(model, optimizer, x, y, parts=1, machine=MACHINE)
    assert first == second


def test_a_scaler_scales_the_gradient_and_not_the_loss():
    x, y = batch()
    plain, scaled = network(), network()
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    first = gradients(plain, torch.optim.SGD(plain.parameters()), x, y, parts=2, machine=MACHINE)
    second = gradients(scaled, torch.optim.SGD(scaled.parameters()), x, y, parts=2, machine=MACHINE, scaler=scaler)
    assert second.loss == first.loss
    assert second.gradient == pytest.approx(8 * first.gradient)
