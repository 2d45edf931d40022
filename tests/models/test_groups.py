"""Batch norm over groups of images is what devices compute that each have a part of the batch."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import maskconnect as mc
from maskconnect.models import groups as groups_file
from maskconnect.models.branches import SharedBatchNorm
from maskconnect.models.groups import GroupedBatchNorm2d, group_norms_

SIZES = [(8, 4, 2), (12, 4, 3), (7, 4, 2), (8, 3, 3), (5, 2, 3)]  # images, largest group, number of groups
FORMATS = pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last], ids=str)


def assert_equal(found, wanted, tolerance=1e-12):
    torch.testing.assert_close(found, wanted, rtol=tolerance, atol=tolerance)


def images(count, channels=5, size=3):
    """Such as differ from each other."""
    return 2 * torch.randn(count, channels, size, size).double() + torch.arange(count)[:, None, None, None]


def perturbed(norm):
    with torch.no_grad():
        for tensor in (norm.weight, norm.bias, norm.running_mean, norm.running_var):
            tensor.add_(torch.rand_like(tensor))
    return norm.double()


def mean_of(replicas):
    """Their state, with the mean of their running statistics."""
    states = [replica.state_dict() for replica in replicas]
    return {k: sum(s[k] for s in states) / len(states) if "running" in k else v for k, v in states[0].items()}


@pytest.mark.parametrize("momentum", [0.1, 1.0, None])
@pytest.mark.parametrize(("count", "group", "groups"), SIZES)
@FORMATS
def test_each_group_goes_through_a_batch_norm_of_its_own(count, group, groups, momentum, layout):
    norm = perturbed(GroupedBatchNorm2d(5, group, momentum=momentum, eps=1e-3))
    replicas = [nn.BatchNorm2d(5, momentum=momentum, eps=1e-3).double() for _ in range(groups)]
    for replica in replicas:
        replica.load_state_dict(norm.state_dict())
    for _ in range(3):
        x = images(count).contiguous(memory_format=layout).requires_grad_()
        theirs = x.detach().clone().requires_grad_()
        weights = torch.randn(x.shape).double()
        y = norm(x)
        assert y.is_contiguous(memory_format=layout)
        (weights * y).sum().backward()
        for g, replica in enumerate(replicas):
            wanted = replica(theirs[g::groups])
            assert_equal(y[g::groups], wanted)
            (weights[g::groups] * wanted).sum().backward()
        assert_equal(x.grad, theirs.grad)
    assert_equal(norm.weight.grad, sum(replica.weight.grad for replica in replicas))
    assert_equal(norm.bias.grad, sum(replica.bias.grad for replica in replicas))
    assert_equal(dict(norm.state_dict()), mean_of(replicas))
    assert norm.num_batches_tracked == 3


def test_groups_as_channels_and_one_by_one_are_the_same(monkeypatch):
    norm = perturbed(GroupedBatchNorm2d(16, 4))
    other = copy.deepcopy(norm)
    x = images(12, channels=16, size=4)
    found, wanted = x.clone().requires_grad_(), x.contiguous(memory_format=torch.channels_last).requires_grad_()
    with monkeypatch.context() as without:
        without.delattr(groups_file, "_Gathered")
        as_channels = norm(found)
    with monkeypatch.context() as without:
        without.delattr(groups_file, "_as_channels")
        one_by_one = other(wanted)
    assert_equal(as_channels, one_by_one)
    weights = torch.randn(x.shape).double()
    (weights * as_channels).sum().backward()
    (weights * one_by_one).sum().backward()
    assert_equal(found.grad, wanted.grad)
    for ours, theirs in zip(norm.parameters(), other.parameters(), strict=True):
        assert_equal(ours.grad, theirs.grad)
    assert_equal(norm.state_dict(), other.state_dict())


@pytest.mark.parametrize("count", [8, 7])
@FORMATS
def test_gradients_have_the_memory_format_of_the_images(count, layout):
    x = images(count).contiguous(memory_format=layout).requires_grad_()
    y = GroupedBatchNorm2d(5, 4).double()(x)
    (grad,) = torch.autograd.grad(y, x, torch.randn(y.shape).double().contiguous(memory_format=layout))
    assert grad.is_contiguous(memory_format=layout)  # if not, operations before the norm take several times as long


@pytest.mark.parametrize("count", [6, 5])
@FORMATS
def test_groups_have_gradients_of_gradients(count, layout):
    norm = GroupedBatchNorm2d(2, 3, track_running_stats=False).double()
    x = images(count, channels=2, size=2).contiguous(memory_format=layout).requires_grad_()
    assert torch.autograd.gradgradcheck(norm, (x,))


@pytest.mark.parametrize(
    "options", [{}, {"momentum": None}, {"affine": False}, {"track_running_stats": False}], ids=str
)
@pytest.mark.parametrize("training", [True, False])
@FORMATS
def test_one_group_or_eval_mode_is_exactly_the_norm_of_torch(options, training, layout):
    norm = GroupedBatchNorm2d(5, 8 if training else 2, **options).train(training)
    plain = nn.BatchNorm2d(5, **options).train(training)
    for _ in range(2):
        x = images(8).float().contiguous(memory_format=layout).requires_grad_()
        theirs = x.detach().clone().requires_grad_()
        y, wanted = norm(x), plain(theirs)
        assert torch.equal(y, wanted)
        y.square().sum().backward()
        wanted.square().sum().backward()
        assert torch.equal(x.grad, theirs.grad)
    for (name, found), (other, wanted) in zip(norm.state_dict().items(), plain.state_dict().items(), strict=True):
        assert name == other
        assert torch.equal(found, wanted), name
    for p, q in zip(norm.parameters(), plain.parameters(), strict=True):
        assert torch.equal(p.grad, q.grad)


@pytest.mark.parametrize("count", [8, 7])
def test_a_norm_without_scale_or_without_statistics_has_groups_too(count):
    x = images(count)
    norm = GroupedBatchNorm2d(5, 4, affine=False, track_running_stats=False).double()
    for g in (0, 1):
        assert_equal(norm(x)[g::2], F.batch_norm(x[g::2], None, None, training=True))
    assert norm.state_dict() == {}


@pytest.mark.parametrize("count", [8, 7])
@FORMATS
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_images_stay_so_beside_float_weights(count, layout, dtype):
    norm, exact = GroupedBatchNorm2d(5, 4), GroupedBatchNorm2d(5, 4)
    x = images(count).to(dtype).contiguous(memory_format=layout)
    y = norm(x)
    assert y.dtype is dtype
    torch.testing.assert_close(y.float(), exact(x.float()), rtol=1e-2, atol=1e-2)
    torch.testing.assert_close(norm.state_dict(), exact.state_dict())
    shared, xs = SharedBatchNorm(5), {0: x, 1: x + 1, 2: x - 1}
    group_norms_(shared, 4)
    wanted = copy.deepcopy(shared)({k: x.float() for k, x in xs.items()}, {0, 2})
    for k, y in shared(xs, {0, 2}).items():
        assert y.dtype is dtype
        assert y.is_contiguous(memory_format=layout)
        torch.testing.assert_close(y.float(), wanted[k], rtol=1e-2, atol=1e-2)


def test_a_group_with_one_value_a_channel_is_the_error_of_torch():
    said = "Expected more than 1 value per channel when training"
    norm = GroupedBatchNorm2d(5, 2)
    with pytest.raises(ValueError, match=said):
        norm(torch.randn(3, 5, 1, 1))  # groups of two images and of one
    norm(torch.randn(3, 5, 1, 2))
    norm(torch.randn(4, 5, 1, 1))
    with pytest.raises(ValueError, match=said):
        norm(torch.randn(1, 5, 1, 1))
    with pytest.raises(ValueError, match="expected 4D input"):
        norm(torch.randn(4, 5))
    shared = SharedBatchNorm(5)
    group_norms_(shared, 2)
    with pytest.raises(ValueError, match=said):
        shared({0: torch.randn(3, 5, 1, 1), 1: torch.randn(3, 5, 1, 1)}, {0, 1})


def assert_equals_replicas(model, x, group, groups):
    """Outputs, gradients and running statistics are those of a copy of the plain network for each group."""
    replicas = [copy.deepcopy(model) for _ in range(groups)]
    group_norms_(model, group)
    labels = torch.arange(len(x)) % 10
    scores = model(x)
    F.cross_entropy(scores, labels).backward()
    for g, replica in enumerate(replicas):
        wanted = replica(x[g::groups])
        assert_equal(scores[g::groups], wanted, 1e-9)
        (F.cross_entropy(wanted, labels[g::groups]) * len(wanted) / len(x)).backward()
        assert torch.equal(model.stack.masks.binary, replica.stack.masks.binary)
    each = zip(*(replica.parameters() for replica in replicas), strict=True)
    for p, theirs in zip(model.parameters(), each, strict=True):
        if p.requires_grad:
            wanted = sum(q.grad for q in theirs)
            scale = wanted.abs().max().clamp(min=1e-12)
            assert_equal(p.grad / scale, wanted / scale, 1e-8)
    wanted = mean_of(replicas)
    for name, found in model.state_dict().items():
        if "running" in name or "tracked" in name:
            assert_equal(found, wanted[name], 1e-9)


def away_from_the_start(model):
    for norm in (part for part in model.modules() if isinstance(part, nn.BatchNorm2d)):
        with torch.no_grad():
            norm.weight.add_(0.1 * torch.randn_like(norm.weight))
            norm.bias.add_(0.1 * torch.randn_like(norm.bias))
    return model.double()


BATCHES = pytest.mark.parametrize(("count", "group", "groups"), [(8, 4, 2), (7, 4, 2), (9, 3, 3)])


@BATCHES
def test_a_resnet_with_groups_is_a_copy_of_it_for_each_group(count, group, groups):
    model = away_from_the_start(mc.resnet(20, 10, fan_in=3, connectivity="random"))
    assert_equals_replicas(model, images(count, channels=3, size=8), group, groups)


@BATCHES
@pytest.mark.parametrize("norm", ["branch", "sum"])
@FORMATS
def test_a_resnext_with_groups_is_a_copy_of_it_for_each_group(count, group, groups, norm, layout):
    model = away_from_the_start(mc.resnext(20, 4, 4, 10, fan_in=2, connectivity="random", norm=norm))
    x = images(count, channels=3, size=8).contiguous(memory_format=layout)
    assert_equals_replicas(model.to(memory_format=layout), x, group, groups)


@BATCHES
@pytest.mark.parametrize("norm", ["branch", "sum"])
@FORMATS
def test_masks_learn_from_branches_that_cannot_reach_the_output_as_copies_do(count, group, groups, norm, layout):
    model = away_from_the_start(mc.resnext(20, 4, 4, 10, fan_in=1, norm=norm, seed=3))
    x = images(count, channels=3, size=8).contiguous(memory_format=layout)
    assert_equals_replicas(model.to(memory_format=layout), x, group, groups)
    active = model.stack.masks.binary.reshape(5, 4, 4).any(1)
    assert not active.all()  # else this would not be about dead branches
    assert (model.stack.masks.real.grad.reshape(5, 4, 4).abs().sum(1)[~active] > 0).all()


@pytest.mark.parametrize(("count", "group", "groups"), SIZES)
@pytest.mark.parametrize("momentum", [0.1, None])
@FORMATS
def test_a_shared_norm_pools_each_group_over_those_alive_and_uses_it_for_all(count, group, groups, momentum, layout):
    plain = SharedBatchNorm(5)
    plain.norm = perturbed(nn.BatchNorm2d(5, momentum=momentum))
    shared, replicas = copy.deepcopy(plain), [copy.deepcopy(plain) for _ in range(groups)]
    group_norms_(shared, group)
    for _ in range(2):
        xs = {k: (images(count) * (k + 1)).contiguous(memory_format=layout).requires_grad_() for k in range(4)}
        theirs = {k: x.detach().clone().requires_grad_() for k, x in xs.items()}
        ys = shared(xs, {0, 2, 3})
        assert not ys[1].requires_grad
        assert all(y.is_contiguous(memory_format=layout) for y in ys.values())
        sum((y**3).sum() for y in ys.values()).backward()
        for g, replica in enumerate(replicas):
            wanted = replica({k: x[g::groups] for k, x in theirs.items()}, {0, 2, 3})
            for k, y in wanted.items():
                assert_equal(ys[k][g::groups], y, 1e-11)
            sum((y**3).sum() for y in wanted.values()).backward()
        for k in (0, 2, 3):
            assert_equal(xs[k].grad, theirs[k].grad, 1e-10)
    assert_equal(shared.norm.weight.grad, sum(replica.norm.weight.grad for replica in replicas), 1e-10)
    assert_equal(dict(shared.state_dict()), mean_of(replicas))


def test_a_shared_norm_with_one_group_is_exactly_that_without_groups():
    plain = SharedBatchNorm(5)
    shared = copy.deepcopy(plain)
    group_norms_(shared, 8)
    xs = {k: images(8).float() for k in range(3)}
    for training in (True, False):
        for model in (plain, shared):
            model.train(training)
        found, wanted = shared(xs, {0, 2}), plain(xs, {0, 2})
        for k in xs:
            assert torch.equal(found[k], wanted[k])
        for name, tensor in plain.state_dict().items():
            assert torch.equal(shared.state_dict()[name], tensor), name


def test_states_fit_with_and_without_groups():
    grouped, plain = (mc.resnext(20, 4, 2, 10, fan_in=1, norm="sum", seed=1) for _ in range(2))
    group_norms_(grouped, 2)
    x = torch.randn(4, 3, 8, 8)
    grouped(x)
    plain.load_state_dict(grouped.state_dict())
    assert torch.equal(plain.eval()(x), grouped.eval()(x))
    plain.train()(x)
    grouped.load_state_dict(plain.state_dict())
    assert torch.equal(plain.eval()(x), grouped.eval()(x))


def test_norms_get_groups_in_place_as_often_as_one_likes():
    model = mc.resnext(20, 4, 2, 10, fan_in=1, norm="sum")
    norms = [part for part in model.modules() if isinstance(part, nn.BatchNorm2d)]
    norms[0].eval()
    norms[1].momentum, norms[1].eps = 0.7, 0.3
    tensors = [*map(id, model.parameters()), *map(id, model.buffers())]
    group_norms_(model, None)
    assert {type(norm) for norm in norms} == {nn.BatchNorm2d}
    for group in (16, 4):
        group_norms_(model, group)
        assert norms == [part for part in model.modules() if isinstance(part, nn.BatchNorm2d)]
        assert {(type(norm), norm.group) for norm in norms} == {(GroupedBatchNorm2d, group)}
        assert tensors == [*map(id, model.parameters()), *map(id, model.buffers())]
        assert [norm.training for norm in norms] == [False] + [True] * (len(norms) - 1)
        assert (norms[1].momentum, norms[1].eps) == (0.7, 0.3)
    group_norms_(model, None)
    assert norms[0].group == 4
    assert "group=4" in repr(norms[0])
    alone = nn.BatchNorm2d(3)
    group_norms_(alone, 2)
    assert isinstance(alone, GroupedBatchNorm2d)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of the compiler's own making
@pytest.mark.parametrize("count", [6, 7])
def test_groups_compile(count):
    norm = GroupedBatchNorm2d(5, 3)
    compiled = torch.compile(copy.deepcopy(norm), backend="eager", fullgraph=True, dynamic=False)
    x = images(count).float()
    torch.testing.assert_close(compiled(x), norm(x))
    torch.testing.assert_close(dict(compiled._orig_mod.state_dict()), dict(norm.state_dict()))


@pytest.mark.parametrize(
    ("group", "said"),
    [
        (1, "group is 1; a batch norm needs groups of 2 images or more"),
        (-64, "group is -64"),
        (2.5, "group is 2.5; it must be an integer"),
        (True, "group is True; it must be an integer"),
    ],
)
def test_a_group_that_cannot_be_is_one_sentence_and_changes_nothing(group, said):
    model = nn.Sequential(nn.BatchNorm2d(3))
    with pytest.raises(mc.ConfigError, match=said):
        group_norms_(model, group)
    with pytest.raises(mc.ConfigError, match=said):
        GroupedBatchNorm2d(3, group)
    assert type(model[0]) is nn.BatchNorm2d


def test_a_norm_of_a_derived_class_is_an_error_and_changes_nothing():
    class Own(nn.BatchNorm2d):
        pass

    model = nn.Sequential(nn.BatchNorm2d(3), Own(3))
    with pytest.raises(mc.ConfigError, match=r"1 is a Own; only nn\.BatchNorm2d itself can normalize groups"):
        group_norms_(model, 2)
    assert type(model[0]) is nn.BatchNorm2d


def test_a_backward_pass_may_follow_forward_passes_of_other_sizes():
    """The last, smaller batch of an epoch has one group, and gradients of two batches may be added."""
    norm = GroupedBatchNorm2d(5, 4).double()
    small, large = images(3).requires_grad_(), images(8)
    loss = norm(small).square().sum()
    norm(large)
    loss.backward()
    assert small.grad.isfinite().all()
