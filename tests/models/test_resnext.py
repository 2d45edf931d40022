import copy

import pytest
import torch
from plain import PlainModule, PlainResNeXt
from relaxed import reached, relaxed_resnext
from torch import nn
from torch.func import replace_all_batch_norm_modules_
from torch.nn import functional as F

import maskconnect as mc
from maskconnect.models import ResNeXtSpec, build
from maskconnect.models.branches import SharedBatchNorm

PAPER = [((20, 4, 8), 283_572), ((29, 4, 8), 401_844), ((29, 8, 8), 858_292), ((29, 64, 8), 34_594_212)]


@pytest.mark.parametrize(("spec", "count"), PAPER)
@pytest.mark.parametrize("stem", ["cifar", "mini"])
def test_parameters_are_as_many_as_in_the_paper(spec, count, stem):
    depth, width, cardinality = spec
    model = mc.resnext(depth, width, cardinality, 100, fan_in=4, stem=stem)
    modules = (depth - 2) // 3
    assert mc.count_parameters(model) == (count, (modules - 1) * cardinality**2)


def test_of_one_source_a_branch_and_all_branches_used_there_is_one_wiring_whatever_branches_are_called():
    shape = {"depth": 20, "width": 4, "cardinality": 4, "num_classes": 5, "fan_in": 1}
    model = mc.resnext(**shape, connectivity="random", use_all=True, seed=3).double()
    wiring = mc.wiring_of(model)
    chains = [[branch] for branch in range(4)]
    for layer in wiring[1:]:
        for chain in chains:
            chain.append(layer.index([chain[-1]]))
    assert chains != [[branch] * 6 for branch in range(4)]

    straight = mc.resnext(**shape, connectivity=[wiring[0], *[[[0], [1], [2], [3]]] * 5]).double()
    for part in ("stem", "stack.aggregation", "classifier"):  # branches share the shortcuts in the aggregation
        straight.get_submodule(part).load_state_dict(model.get_submodule(part).state_dict())
    for number, chain in enumerate(chains):
        for layer, branch in enumerate(chain):
            straight.stack.blocks[layer][number].load_state_dict(model.stack.blocks[layer][branch].state_dict())
    x = torch.randn(4, 3, 8, 8, dtype=torch.float64)
    ours, theirs = model(x), straight(x)
    torch.testing.assert_close(ours, theirs)
    ours.square().sum().backward(), theirs.square().sum().backward()
    torch.testing.assert_close(model.stem[0].weight.grad, straight.stem[0].weight.grad)


# Those of {50,4,32} and {101,4,64} are the counts of torchvision's documentation.
@pytest.mark.parametrize(
    ("spec", "published"), [((50, 4, 32), 25_028_904), ((101, 4, 32), 44_177_704), ((101, 4, 64), 83_455_272)]
)
def test_imagenet_networks_have_the_published_size_and_a_norm_for_each_branch_adds_to_it(spec, published):
    depth, _, cardinality = spec
    with torch.device("meta"):
        models = [
            mc.resnext(*spec, 1000, fan_in=cardinality // 2, stem="imagenet", norm=norm) for norm in ("sum", "branch")
        ]
    found, with_branches = (mc.count_parameters(model).weights for model in models)
    stages = {50: [3, 4, 6, 3], 101: [3, 4, 23, 3]}[depth]
    with torch.device("meta"):
        plain = PlainResNeXt("imagenet", stages, 4, cardinality, 1000, "sum", 64)
    assert found == published == sum(p.numel() for p in plain.parameters())
    outputs = {50: 3 * 256 + 4 * 512 + 6 * 1024 + 3 * 2048, 101: 3 * 256 + 4 * 512 + 23 * 1024 + 3 * 2048}[depth]
    assert with_branches - found == 2 * (cardinality - 1) * outputs  # a scale and a bias for C norms instead of one


@pytest.mark.parametrize("fan_in", range(1, 9))
@pytest.mark.parametrize("norm", ["branch", "sum"])
def test_every_fan_in_runs_forward_and_backward_with_the_same_parameters(fan_in, norm):
    model = mc.resnext(20, 4, 8, 100, fan_in=fan_in, norm=norm)
    F.cross_entropy(model(torch.randn(4, 3, 16, 16)), torch.arange(4)).backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())
    assert model.stack.masks.real.grad.abs().sum() > 0 or fan_in == 8
    assert mc.count_parameters(model).weights == 283_572 - (norm == "sum") * 2 * 7 * 2 * (64 + 128 + 256)


@pytest.mark.parametrize(
    ("aggregation", "norm"), [("residual", "branch"), ("residual", "sum"), ("mean", "branch"), ("sum", "branch")]
)
@pytest.mark.parametrize("fan_in", [1, 3])
def test_masks_and_weights_get_the_derivative_of_the_relaxed_rule(aggregation, norm, fan_in):
    model = mc.resnext(20, 4, 5, 10, fan_in=fan_in, aggregation=aggregation, norm=norm, seed=3).double()
    x, labels = torch.randn(3, 3, 8, 8).double(), torch.arange(3)
    scores = model(x)
    F.cross_entropy(scores, labels).backward()
    mask_LCC = model.stack.masks.binary.reshape(-1, 5, 5).double().requires_grad_()
    other = copy.deepcopy(model)
    other.zero_grad()
    wanted = relaxed_resnext(other, mask_LCC, fan_in, x)
    F.cross_entropy(wanted, labels).backward()
    torch.testing.assert_close(scores, wanted, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(model.stack.masks.real.grad, mask_LCC.grad.reshape(-1, 5), rtol=1e-8, atol=1e-12)
    theirs = dict(other.named_parameters())
    for name, p in model.named_parameters():
        if "masks" not in name:
            expected = theirs[name].grad
            expected = torch.zeros_like(p) if expected is None else expected
            torch.testing.assert_close(p.grad, expected, rtol=1e-8, atol=1e-12, msg=name)
    if fan_in == 1:
        assert any(len(alive) < 5 for alive in reached(mask_LCC))  # else this would not be about dead branches


def test_fan_in_of_one_is_a_plain_residual_chain_until_the_last_module():
    model = mc.resnext(20, 4, 3, 10, connectivity="prev").double().eval()
    x = torch.randn(2, 3, 16, 16).double()
    y = model.stem(x)
    ends = []
    for k in range(3):
        chain = y
        for layer, branches in enumerate(model.stack.blocks[:-1]):
            shortcut = chain
            if layer in (0, 2, 4):
                project = model.stack.aggregation.shortcuts[str(layer)]
                shortcut = project.norm.norm(project.conv(chain))
            chain = F.relu(branches[k].residual(chain) + shortcut)
        ends.append(chain)
    last = model.stack.blocks[-1]
    total = sum(branch.residual(end) for branch, end in zip(last, ends, strict=True)) + sum(ends) / 3
    torch.testing.assert_close(model(x), model.classifier(F.relu(total).mean((2, 3))))


@pytest.mark.parametrize("aggregation", ["mean", "sum"])
def test_whole_blocks_can_be_averaged_or_summed(aggregation):
    model = mc.resnext(11, 4, 3, 10, fan_in=2, connectivity="random", aggregation=aggregation).double().eval()
    x = torch.randn(2, 3, 16, 16).double()
    outputs = [model.stem(x)] * 3
    for layer, (branches, rows) in enumerate(zip(model.stack.blocks, mc.wiring_of(model), strict=True)):
        divisor = 1 if aggregation == "sum" else 2
        inputs = [sum(outputs[k] for k in row) / divisor for row in rows] if layer else outputs
        project = model.stack.aggregation.shortcuts[str(layer)]
        shortcuts = [project.norm.norm(project.conv(x)) for x in inputs]
        outputs = [F.relu(b.residual(x) + s) for b, x, s in zip(branches, inputs, shortcuts, strict=True)]
    total = sum(outputs) / (1 if aggregation == "sum" else 3)
    torch.testing.assert_close(model(x), model.classifier(total.mean((2, 3))))
    for branch in (b for layer in model.stack.blocks for b in layer):
        assert (branch.residual[-1].weight == 1).all()


def test_the_last_norm_of_a_branch_starts_at_one_over_the_fan_in_of_its_readers():
    model = mc.resnext(20, 4, 8, 10, fan_in=4)
    starts = [{w for b in layer for w in b.residual[-1].weight.tolist()} for layer in model.stack.blocks]
    assert starts == [{0.25}] * 5 + [{0.125}]
    model = mc.resnext(11, 4, 2, 10, connectivity=[[[], []], [[0], [0, 1]], [[0, 1], [0, 1]]])
    starts = [{w for b in layer for w in b.residual[-1].weight.tolist()} for layer in model.stack.blocks]
    assert [max(start) for start in starts] == pytest.approx([1 / 1.5, 0.5, 0.5])
    published = mc.resnext(20, 4, 8, 10, fan_in=4, norm="sum")
    assert all((n.norm.weight == 1).all() for n in published.stack.aggregation.norms)


def test_branches_start_as_parts_of_the_wide_convolutions_of_plain_resnext():
    model = mc.resnext(29, 64, 8, 10, fan_in=4)
    plain = PlainModule(256, 64, 256, 1, 8, "sum")
    for position, conv in ((0, plain.reduce), (3, plain.grouped), (6, plain.expand)):
        nn.init.kaiming_normal_(conv.weight, mode="fan_out", nonlinearity="relu")
        ours = torch.cat([branch.residual[position].weight.flatten() for branch in model.stack.blocks[1]])
        assert ours.std().item() == pytest.approx(conv.weight.std().item(), rel=0.05)


def test_branches_that_cannot_reach_the_output_change_nothing_in_train_mode():
    model = mc.resnext(20, 4, 8, 10, fan_in=1, connectivity="random", seed=1)
    other = copy.deepcopy(model)
    alive = model.stack.masks.current_wiring().alive
    assert not all(alive)
    with torch.no_grad():
        for branch, on in zip(other.stack.flat(), alive, strict=True):
            for p in branch.parameters():
                p.mul_(1 if on else torch.nan)
    x = torch.randn(2, 3, 16, 16)
    assert torch.equal(model(x), other(x))
    for (name, a), b in zip(model.named_buffers(), other.buffers(), strict=True):
        assert torch.equal(a, b), name


def test_a_frozen_network_is_the_one_with_its_wiring_given():
    model = mc.resnext(20, 4, 4, 10, fan_in=2, seed=5)
    optimizer = torch.optim.SGD(mc.param_groups(model, lr=0.1, mask_lr=10.0), momentum=0.9)
    mc.attach(optimizer, model)
    x, labels = torch.randn(8, 3, 16, 16), torch.arange(8)
    for _ in range(3):
        loss = F.cross_entropy(model(x), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    before = model.eval()(x)
    mc.freeze(model)
    assert torch.equal(model(x), before)
    given = mc.resnext(20, 4, 4, 10, connectivity=mc.wiring_of(model))
    weights = {k: v for k, v in model.state_dict().items() if "masks" not in k}
    given.load_state_dict(weights, strict=False)
    assert torch.equal(given.eval()(x), before)
    restored = mc.resnext(20, 4, 4, 10, fan_in=2)
    restored.load_state_dict(model.state_dict())
    assert restored.stack.masks.is_frozen
    assert torch.equal(restored.eval()(x), before)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of the compiler's own making
def test_a_frozen_network_compiles_and_exports():
    model = mc.resnext(20, 4, 4, 10, fan_in=1, connectivity="random").eval()
    x = torch.randn(2, 3, 8, 8)
    batch = {"x": {0: torch.export.Dim("batch", min=1, max=64)}}
    for network in (model, mc.resnet(20, 10, 3, connectivity="random").eval()):
        exported = torch.export.export(network, (x,), dynamic_shapes=batch).module()
        more = torch.randn(5, 3, 8, 8)
        torch.testing.assert_close(exported(more), network(more))
    torch.testing.assert_close(torch.compile(model, backend="eager", fullgraph=True)(x), model(x))


def test_images_may_have_other_channels_and_odd_sizes():
    model = mc.resnext(20, 4, 4, 7, fan_in=2, in_channels=1)
    assert model(torch.randn(2, 1, 13, 9)).shape == (2, 7)


def test_a_spec_builds_the_same_network():
    spec = ResNeXtSpec(depth=20, width=4, cardinality=8, num_classes=100, fan_in=4)
    torch.manual_seed(0)
    model = build(spec)
    torch.manual_seed(0)
    again = mc.resnext(20, 4, 8, 100, 4)
    x = torch.randn(2, 3, 16, 16)
    assert again.spec == spec
    assert torch.equal(model(x), again(x))


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"depth": 28}, r"depth is 28; with stem='cifar' it must be 9n\+2, such as 20 or 29\."),
        ({"depth": 50}, r"47 or 56\. For an ImageNet network pass stem='imagenet'\."),
        ({"depth": 29, "stem": "imagenet"}, "depth is 29; with stem='imagenet' it must be one of 50, 101, 152"),
        ({"depth": 1}, "such as 11"),
        ({"norm": "branhc"}, "Did you mean 'branch'"),
        ({"stem": "imagnet"}, "Did you mean 'imagenet'"),
        ({"stem": ["cifar"]}, r"stem is \['cifar'\]; it must be one of cifar, mini, imagenet"),
        ({"aggregation": "residuals"}, "Did you mean 'residual'"),
        ({"norm": "sum", "aggregation": "mean"}, "norm='sum' normalizes the sum of residuals"),
        ({"width": 0}, "width is 0; it must be 1 or more"),
        ({"cardinality": -8}, "cardinality is -8"),
        ({"num_classes": 10.5}, "num_classes is 10.5; it must be an integer"),
        ({"fan_in": 0}, "fan_in is 0; a target needs at least 1 source"),
        ({"fan_in": None}, "connectivity 'learned' needs fan_in"),
        ({"connectivity": "ful"}, "Did you mean 'full'"),
        ({"connectivity": [[]]}, "connectivity has 1 rows; the stack has 6 layers"),
        ({"mask_init": 0}, "mask_init is 0; it must be 'uniform', or a number above 0 and up to 1"),
    ],
)
def test_mistakes_are_one_sentence(options, said):
    arguments = {"depth": 20, "width": 4, "cardinality": 4, "num_classes": 10, "fan_in": 2} | options
    with pytest.raises(mc.MaskConnectError, match=said) as error:
        mc.resnext(**arguments)
    assert "\n" not in str(error.value)


def test_a_spec_keeps_the_wiring_that_it_was_given():
    wiring = [[[], []], [[0], [0, 1]], [[0, 1], [1]]]
    spec = ResNeXtSpec(depth=11, width=4, cardinality=2, num_classes=10, connectivity=wiring)
    wiring[1][0].append(1)
    assert mc.wiring_of(build(spec))[1] == [[0], [0, 1]]
    assert isinstance(hash(spec), int)


@pytest.mark.parametrize("change", [nn.SyncBatchNorm.convert_sync_batchnorm, replace_all_batch_norm_modules_])
def test_another_kind_of_norm_where_branches_share_one_is_an_error(change):
    model = change(mc.resnext(20, 4, 2, 10, fan_in=1))
    with pytest.raises(mc.ConfigError, match=r"must be an nn\.BatchNorm2d with running statistics and a scale"):
        model.eval()(torch.randn(2, 3, 8, 8))


class TestSharedBatchNorm:
    def branches(self, count=3):
        return {k: 2 * torch.randn(4, 5, 3, 3).double() + k for k in range(count)}

    def test_pools_the_statistics_of_those_alive_and_uses_them_for_all(self):
        shared, xs = SharedBatchNorm(5).double(), self.branches()
        ys = shared(xs, {0, 2})
        alive = torch.stack([xs[0], xs[2]])
        mean, variance = alive.mean((0, 1, 3, 4)), alive.var((0, 1, 3, 4), unbiased=False)
        for k, x in xs.items():
            wanted = (x - mean[:, None, None]) / (variance[:, None, None] + 1e-5).sqrt()
            torch.testing.assert_close(ys[k], wanted)
        n = 4 * 3 * 3
        torch.testing.assert_close(shared.norm.running_mean, 0.1 * mean)
        torch.testing.assert_close(shared.norm.running_var, 0.9 + 0.1 * variance * n / (n - 1))
        assert shared.norm.num_batches_tracked == 1
        assert ys[0].requires_grad
        assert not ys[1].requires_grad

    @pytest.mark.parametrize("momentum", [0.1, 0.5, None])
    def test_of_equal_branches_is_the_batch_norm_of_one(self, momentum):
        shared, plain = SharedBatchNorm(5).double(), nn.BatchNorm2d(5, momentum=momentum).double()
        shared.norm.momentum = momentum
        for _ in range(3):
            x = torch.randn(4, 5, 3, 3).double()
            ys = shared(dict.fromkeys(range(4), x), {0, 1, 2, 3})
            wanted = plain(x)
            for y in ys.values():
                torch.testing.assert_close(y, wanted)
        torch.testing.assert_close(shared.norm.state_dict(), plain.state_dict())

    def test_in_eval_mode_uses_the_running_statistics_also_where_only_the_norm_is_in_it(self):
        shared, xs = SharedBatchNorm(5).double(), self.branches()
        shared.norm.eval()
        before = copy.deepcopy(shared.norm.state_dict())
        torch.testing.assert_close(shared(xs, {0})[1], xs[1] / (1 + 1e-5) ** 0.5)
        torch.testing.assert_close(shared.norm.state_dict(), before)
