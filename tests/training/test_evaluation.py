"""Accuracy, and what may and may not change while it is found."""

import copy

import pytest
import torch
from torch import nn

import maskconnect as mc
from maskconnect.data import Augmentation, Batches
from maskconnect.data.sets import Arrays
from maskconnect.training.norms import reestimate_, statistics_kept
from maskconnect.training.options import Machine
from maskconnect.training.precision import Precision
from maskconnect.training.predictions import Predictions, drawing, predict

MACHINE = Machine(device=torch.device("cpu"), precision=Precision(name="fp32", device_type="cpu"), channels_last=False)


def batches(*, training=False, count=50, size=16):
    generator = torch.Generator().manual_seed(3)
    images = torch.randint(256, (count, 1, 8, 8), dtype=torch.uint8, generator=generator)
    arrays = Arrays(images, torch.randint(7, (count,), generator=generator), tuple("abcdefg"))
    return Batches(
        images=arrays, plan=Augmentation(size=8), size=size, mean=torch.zeros(1, 1, 1), training=training, seed=0
    )


@pytest.fixture
def network():
    torch.manual_seed(0)
    return mc.resnet(14, 7, fan_in=2, in_channels=1).train()


def nothing():
    pass


def state_of(model):
    return copy.deepcopy(model.state_dict())


def assert_same(before, model):
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name]), name


def test_top1_and_top5_count_the_images_whose_class_is_among_the_first():
    label = torch.tensor([3, 0, 6, 2])
    classes = torch.tensor([[3, 1, 2, 4, 5], [1, 2, 3, 4, 0], [0, 1, 2, 3, 4], [4, 2, 0, 1, 3]])
    found = Predictions(label, classes, torch.zeros(4, 5), torch.tensor([1.0, 2.0, 3.0, 6.0])).scores()
    assert (found.top1, found.top5, found.loss) == (25.0, 75.0, 3.0)


def test_predictions_are_those_of_the_network_in_eval_mode(network):
    found = predict(network, batches(), MACHINE, nothing)
    x = torch.cat([x for x, _ in batches().epoch(0)])
    y = torch.cat([y for _, y in batches().epoch(0)])
    assert network.training
    scores = network.eval()(x)
    torch.testing.assert_close(found.loss_N, nn.functional.cross_entropy(scores, y, reduction="none"))
    assert torch.equal(found.class_NR, scores.topk(5).indices)
    assert torch.equal(found.label_N, y)


def test_predicting_changes_nothing(network):
    before, modes = state_of(network), [part.training for part in network.modules()]
    network.stem.eval()
    modes = [part.training for part in network.modules()]
    random = torch.get_rng_state()
    predict(network, batches(), MACHINE, nothing)
    assert_same(before, network)
    assert [part.training for part in network.modules()] == modes
    assert torch.equal(torch.get_rng_state(), random)


def test_drawn_masks_are_drawn_for_every_batch_and_leave_no_trace(network):
    with torch.no_grad():
        network.stack.masks.real.copy_(network.stack.masks.real * 0.7)
    before = state_of(network)
    top = predict(network, batches(), MACHINE, nothing)
    with drawing(network):
        drawn = [predict(network, batches(), MACHINE, nothing).loss_N for _ in range(2)]
    assert not torch.equal(drawn[0], top.loss_N)
    assert not torch.equal(drawn[0], drawn[1])
    assert torch.equal(predict(network, batches(), MACHINE, nothing).loss_N, top.loss_N)
    assert {name for name, value in network.state_dict().items() if not torch.equal(value, before[name])} <= {
        "stack.masks.binary"  # the last draw, which nobody reads
    }


def test_an_evaluation_can_be_broken_off(network):
    calls = 0

    def check():
        nonlocal calls
        calls += 1
        if calls == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        predict(network, batches(), MACHINE, check)
    assert network.training
    assert calls == 2


def test_statistics_reestimated_are_the_means_over_the_batches(network):
    mc.freeze(network)
    norm = network.stem[1]
    reestimate_(network, batches(training=True), 3, MACHINE, nothing)
    with torch.no_grad():
        inputs = [network.stem[0](x) for x, _ in list(batches(training=True).epoch(0))[:3]]
    torch.testing.assert_close(norm.running_mean, torch.stack([y.mean((0, 2, 3)) for y in inputs]).mean(0))
    variance = torch.stack([y.transpose(0, 1).flatten(1).var(1) for y in inputs]).mean(0)
    torch.testing.assert_close(norm.running_var, variance)
    assert norm.momentum == 0.1
    assert network.training
    assert norm.training


def test_statistics_reestimated_are_those_of_the_top_k(network):
    """While masks are learned nothing is drawn for it."""
    generator = network.stack.masks.generator.get_state()
    frozen = copy.deepcopy(network)
    mc.freeze(frozen)
    for model in (network, frozen):
        reestimate_(model, batches(training=True), 2, MACHINE, nothing)
    assert torch.equal(network.stack.masks.generator.get_state(), generator)
    for (name, one), other in zip(network.named_buffers(), frozen.buffers(), strict=True):
        if "running" in name and network.stack.masks.top().alive[int(name.split(".")[2]) if "blocks" in name else -1]:
            assert torch.equal(one, other), name


def test_statistics_can_be_kept(network):
    before = state_of(network)
    with statistics_kept(network):
        reestimate_(network, batches(training=True), 2, MACHINE, nothing)
        assert not torch.equal(network.stem[1].running_mean, before["stem.1.running_mean"])
    assert_same(before, network)
