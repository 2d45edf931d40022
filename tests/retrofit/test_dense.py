"""Dense blocks whose layers learn which features to read."""

import copy
import pickle
import re

import pytest
import torch
from dense import Block, DenseNet, Layer, block_by_hand, rows_of
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import maskconnect as mc
from maskconnect.pruning.prune import difference, pruned_parameters
from maskconnect.retrofit.dense import DenseStack

BLOCKS = ["features.denseblock1", "features.denseblock2"]
WIRING = [[], [0], [1], [0, 2], [1, 2, 3]]
KINDS = ["torchvision", "timm"]


def images(count=3):
    return torch.randn(count, 3, 8, 8)


def features(count=3):
    return torch.randn(count, 6, 8, 8, dtype=torch.float64)


def block(kind="torchvision"):
    """A block of 4 layers after some steps, so that the parameters of its norms matter."""
    made = Block(4, 6, 3, kind).double()
    optimizer = torch.optim.SGD(made.parameters(), lr=0.3)
    for _ in range(5):
        made(features()).square().mean().backward()
        optimizer.step()
    made.zero_grad()
    return made


def stack_of(made, *args, **kwargs):
    return mc.rewire(nn.Sequential(made), "0", *args, **kwargs)[0]


def layers_of(stack):
    return stack.flat()[1:]


def loss_of(output):
    return (output * torch.linspace(-1, 2, output.numel(), dtype=output.dtype).view_as(output).sin()).sum()


def grads_of(module):
    return {name: p.grad for name, p in module.named_parameters() if "masks" not in name}


def learn(model, how, steps, *, lr=0.05, mask_lr=0.1):
    optimizer = torch.optim.SGD(mc.param_groups(model, lr=lr, mask_lr=mask_lr))
    mc.attach(optimizer, model, how)
    x, labels = images(8), torch.arange(8)
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), labels)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.fixture
def frozen():
    """A DenseNet whose wiring was learned and frozen."""
    model = mc.rewire(DenseNet(), BLOCKS, fan_in=2)
    learn(model, mc.Blend(steps=5), 5)
    mc.freeze(model)
    return model


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("training", [True, False])
def test_with_full_connectivity_nothing_changes_bitwise(kind, training):
    model = DenseNet(kind, drop=0.2).train(training)
    rewired = mc.rewire(copy.deepcopy(model), BLOCKS, connectivity="full")
    x, outputs = images(), []
    for network in (model, rewired):
        torch.manual_seed(1)
        outputs.append(network(x))
        outputs[-1].square().sum().backward()
    assert torch.equal(*outputs)
    found, state = grads_of(rewired), rewired.state_dict()
    for name, p in model.named_parameters():
        assert torch.equal(found[name], p.grad)
    for name, value in model.state_dict().items():
        assert torch.equal(state[name], value)
    assert all(part.training == training for part in rewired.modules())


def test_masks_that_learn_and_read_everything_change_nothing_bitwise():
    model = block()
    stack = stack_of(copy.deepcopy(model), fan_in=4)
    x = features()
    found, expected = stack(x), model(x)
    assert torch.equal(found, expected)
    loss_of(found).backward()
    loss_of(expected).backward()
    for name, p in model.named_parameters():
        torch.testing.assert_close(grads_of(stack)[name], p.grad)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("training", [True, False])
def test_a_fixed_wiring_is_the_block_with_masks_by_hand(kind, training):
    model = block(kind).train(training)
    stack = stack_of(copy.deepcopy(model), connectivity=WIRING)
    x = features()
    found, expected = stack(x), block_by_hand(list(model.values()), rows_of(WIRING), x)
    torch.testing.assert_close(found, expected)
    loss_of(found).backward()
    loss_of(expected).backward()
    for name, p in model.named_parameters():
        torch.testing.assert_close(grads_of(stack)[name], p.grad)
    assert stack.wiring() == WIRING


def test_train_mode_moves_the_running_statistics_of_what_is_read_alone():
    model = block()
    stack = stack_of(copy.deepcopy(model), connectivity=WIRING)
    before = copy.deepcopy(stack.denselayer4.norm1)
    x = features()
    stack(x)
    block_by_hand(list(model.values()), rows_of(WIRING), x)
    found, expected = stack.denselayer4.norm1, model["denselayer4"].norm1
    for name in ("running_mean", "running_var"):
        torch.testing.assert_close(getattr(found, name)[6:], getattr(expected, name)[6:])
        assert torch.equal(getattr(found, name)[:6], getattr(before, name)[:6])  # layer 4 does not read the input
        assert not torch.equal(getattr(found, name)[6:], getattr(before, name)[6:])
    assert found.num_batches_tracked == before.num_batches_tracked + 1


@pytest.mark.parametrize("how", [mc.Draw(), mc.Blend(steps=10)])
def test_the_gradient_by_the_mask_is_that_of_the_masks_by_hand_at_every_candidate(how):
    model = block()
    stack = stack_of(copy.deepcopy(model), fan_in=2, mask_init=0.5, seed=3)
    stack.masks.how = how
    x = features().requires_grad_()
    inputs = {}
    stack.masks.draw, drawn = lambda: inputs.setdefault("masks", drawn()), stack.masks.draw
    loss_of(stack(x)).backward()
    masks = [row[: j + 1].double().requires_grad_() for j, row in enumerate(inputs["masks"].mask_TS)]
    y = x.detach().clone().requires_grad_()
    loss_of(block_by_hand(list(model.values()), masks, y)).backward()
    for j, mask in enumerate(masks):
        torch.testing.assert_close(stack.masks.real.grad[j, : j + 1], mask.grad)
        assert mask.grad.abs().min() > 0
    torch.testing.assert_close(x.grad, y.grad)
    for name, p in model.named_parameters():
        torch.testing.assert_close(grads_of(stack)[name], p.grad)


def test_a_source_that_is_not_read_gets_no_gradient():
    stack = stack_of(block(), fan_in=1)
    stack.masks.real.data.zero_()[:, 0] = 1  # every layer draws the input
    x = features()
    stack(x)[:, -3:].sum().backward()  # what layer 4 returns
    assert all(not p.grad.any() for p in stack.denselayer3.parameters())
    assert stack.denselayer4.conv1.weight.grad[:, :6].any()
    assert not stack.denselayer4.conv1.weight.grad[:, 6:].any()
    assert not stack.denselayer4.norm1.weight.grad[6:].any()
    assert stack.masks.real.grad[3].all()


def test_a_frozen_block_gives_every_parameter_a_gradient_of_zero_at_least(frozen):
    frozen.zero_grad()
    frozen(images()).sum().backward()
    assert all(p.grad is not None for p in frozen.parameters())
    for stack in (part for part in frozen.modules() if isinstance(part, mc.MaskedStack)):
        assert not stack.masks.real.grad.any()
        for j, layer in enumerate(layers_of(stack), start=1):
            columns = layer.conv1.weight.grad.split(stack.widths[:j], dim=1)
            assert [k for k, column in enumerate(columns) if column.any()] == stack.wiring()[j]


@pytest.mark.parametrize("checkpointing", ["reentrant", "not reentrant"])
@pytest.mark.parametrize("options", [{"fan_in": 2}, {"connectivity": WIRING}])
def test_layers_may_checkpoint_their_activations(checkpointing, options):
    plain = stack_of(block(), **options)
    stack = copy.deepcopy(plain)
    for layer in layers_of(stack):
        layer.checkpointing = checkpointing
    x = features()
    for network in (plain, stack):
        loss_of(network(x.clone().requires_grad_())).backward()
    for (name, a), b in zip(plain.named_parameters(), stack.parameters(), strict=True):
        torch.testing.assert_close(b.grad, a.grad, msg=name)


@pytest.mark.parametrize("reentrant", [True, False])
def test_activation_checkpointing_around_a_block_repeats_the_masks_of_its_pass(reentrant):
    plain = stack_of(block(), fan_in=1)
    saving = copy.deepcopy(plain)
    x = features().requires_grad_()
    loss_of(checkpoint(saving, x, use_reentrant=reentrant)).backward()
    loss_of(plain(x)).backward()
    for (name, a), b in zip(plain.named_parameters(), saving.parameters(), strict=True):
        torch.testing.assert_close(b.grad, a.grad, msg=name)


def test_candidates_may_be_limited():
    model = block()
    limited = DenseStack(dict(copy.deepcopy(model).items()), 2, wiring=[[], [0], [1], [1, 2], [1, 3]])
    assert limited.learning
    fixed = stack_of(model, connectivity=[[], [0], [1], [1, 2], [1, 3]])
    x = features()
    torch.testing.assert_close(limited.double()(x), fixed(x))


@pytest.mark.parametrize("how", [mc.Blend(steps=60, gradient="plain"), mc.Draw()])
def test_masks_find_the_wiring_that_made_the_targets(how):
    """The weights are right from the start and stay; only which source each layer should read is to be found."""
    model = block().eval()
    wanted = [[], [0], [0], [1], [2]]
    teacher = stack_of(copy.deepcopy(model), connectivity=wanted)
    student = stack_of(model, fan_in=1)
    student.training = True  # the masks learn; batch norms stay in eval mode
    optimizer = torch.optim.SGD(mc.param_groups(student, lr=0.0, mask_lr=0.02))
    mc.attach(optimizer, student, how)
    assert student.wiring() != wanted
    for _ in range(60):
        x = features(8)
        optimizer.zero_grad()
        (student(x) - teacher(x).detach()).square().sum(dim=1).mean().backward()
        optimizer.step()
    mc.freeze(student)
    assert student.wiring() == wanted


@pytest.mark.parametrize("how", [mc.Draw(), mc.Blend(steps=40)])
def test_a_rewired_network_learns(how):
    model = mc.rewire(DenseNet(), BLOCKS, fan_in=2)
    before = [stack.masks.real.clone() for stack in model.modules() if isinstance(stack, mc.MaskedStack)]
    losses = learn(model, how, 40)
    assert sum(losses[-5:]) < 0.8 * sum(losses[:5])
    after = [stack.masks.real for stack in model.modules() if isinstance(stack, mc.MaskedStack)]
    assert all(not torch.equal(a, b) for a, b in zip(before, after, strict=True))


def test_each_block_has_masks_of_its_own_which_start_uniform():
    model = mc.rewire(DenseNet(), BLOCKS, fan_in=2, seed=7)
    first, second = (model.get_submodule(path) for path in BLOCKS)
    assert (first.masks.seed, second.masks.seed) == (7, 8)
    assert torch.equal(second.masks.real[4], torch.full((5,), 0.2))
    assert mc.count_parameters(model).mask_entries == 1 + 2 + 3 + 4 + 1 + 2 + 3 + 4 + 5
    wirings = mc.wiring_of(model)
    assert list(wirings) == BLOCKS
    again = mc.rewire(DenseNet(), BLOCKS, connectivity=wirings)
    assert mc.wiring_of(again) == wirings
    near = mc.rewire(DenseNet(), BLOCKS[0], fan_in=1, mask_init=0.01)
    assert near.features.denseblock1.masks.real.max(dim=1).values.min() > 0.9


def test_a_model_that_is_a_dense_block_itself():
    model = block()
    stack = mc.rewire(copy.deepcopy(model), "", connectivity="full")
    x = features()
    assert torch.equal(stack(x), model(x))
    model["input"] = Layer(18, 3).double()
    with pytest.raises(mc.ConfigError, match="a layer is called 'input'"):
        mc.rewire(model, "", fan_in=2)


def test_a_block_with_two_names_is_rewired_under_both():
    model = DenseNet()
    model.again = model.features.denseblock1
    with pytest.raises(mc.ConfigError, match="named twice"):
        mc.rewire(model, [BLOCKS[0], "again"], fan_in=2)
    mc.rewire(model, BLOCKS, fan_in=2)
    assert isinstance(model.again, mc.MaskedStack)
    assert model.again is model.features.denseblock1


def test_a_checkpoint_of_the_plain_network_loads():
    plain = DenseNet()
    state = copy.deepcopy(plain.state_dict())
    model = mc.rewire(DenseNet(), BLOCKS, fan_in=2)
    model.load_state_dict(state)
    full = mc.rewire(DenseNet(), BLOCKS, connectivity="full")
    full.load_state_dict(state)
    x = images()
    assert torch.equal(full(x), plain(x))
    assert set(state) <= set(model.state_dict())
    restored = mc.rewire(DenseNet(), BLOCKS, fan_in=2)
    learn(model, mc.Draw(), 3)
    restored.load_state_dict(model.state_dict())
    assert torch.equal(restored.features.denseblock2.masks.real, model.features.denseblock2.masks.real)


@pytest.mark.parametrize("options", [{}, {"merge": False}, {"fold": True}])
def test_pruning_takes_out_the_channels_that_nothing_reads(frozen, options):
    pruned = mc.prune(frozen, images(), **options)
    assert difference(frozen, pruned, images()) <= 1e-6
    assert not any(type(part).__module__.startswith("maskconnect") for part in pruned.modules())
    for path in BLOCKS:
        stack, plain = frozen.get_submodule(path), pruned.get_submodule(path)
        for j, (name, layer) in enumerate(plain.named_children(), start=1):
            read = sum(stack.widths[k] for k in stack.wiring()[j])
            assert (layer.norm1.num_features, layer.conv1.in_channels) == (read, read)
            assert layer.conv1.weight.shape[1] == len(layer.norm1.running_mean) == read
            assert type(layer) is type(stack.get_submodule(name))
    count = sum(p.numel() for p in pruned.parameters())
    assert count < mc.count_parameters(frozen).weights
    assert pruned_parameters(frozen).transitive == count
    assert frozen.features.denseblock1.denselayer4.conv1.in_channels == 15  # the model does not change


def test_a_pruned_network_is_independent_and_trains_as_the_frozen_one(frozen):
    pruned = mc.prune(frozen, images(), merge=False)
    before = copy.deepcopy(frozen.state_dict())
    x = images(6)
    frozen.train()
    pruned.train()
    losses = []
    for network in (pruned, frozen):
        optimizer = torch.optim.SGD([p for p in network.parameters() if p.requires_grad], lr=0.1)
        for _ in range(3):
            optimizer.zero_grad()
            loss = F.cross_entropy(network(x), torch.arange(6))
            loss.backward()
            optimizer.step()
        losses.append(loss.item())
        if network is pruned:
            assert all(torch.equal(value, before[name]) for name, value in frozen.state_dict().items())
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)
    assert difference(frozen, pruned, x) < 1e-5


def test_weights_that_do_not_train_stay_so_when_pruned(frozen):
    for p in frozen.features.denseblock1.parameters():
        p.requires_grad_(False)
    pruned = mc.prune(frozen, images())
    assert not any(p.requires_grad for p in pruned.features.denseblock1.parameters())
    assert all(
        isinstance(p, nn.Parameter)
        for p in pruned.features.denseblock1.denselayer4.conv1._parameters.values()
        if p is not None
    )
    assert all(p.requires_grad for p in pruned.features.denseblock2.parameters())


def test_pruning_with_another_stack_in_the_model(frozen):
    frozen.classifier = mc.MaskedStack([nn.Linear(28, 28) for _ in range(4)], connectivity=[[], [0], [0], [1]])
    pruned = mc.prune(frozen, images())
    assert list(dict(pruned.classifier.blocks.named_children())) == ["0", "1", "3"]
    assert difference(frozen, pruned, images()) <= 1e-6


@pytest.mark.parametrize("state", ["learned", "frozen", "pruned"])
def test_saved_networks_load_into_a_model_that_is_rewired_alike(state, tmp_path, frozen):
    model = frozen if state != "learned" else mc.rewire(DenseNet(), BLOCKS, fan_in=2)
    x = images()
    saved = mc.prune(model, x) if state == "pruned" else model
    mc.save(saved, tmp_path / "net")
    loaded = mc.load(tmp_path / "net", into=mc.rewire(DenseNet(), BLOCKS, fan_in=2))
    assert difference(saved, loaded, x) == 0
    assert sum(p.numel() for p in loaded.parameters()) == sum(p.numel() for p in saved.parameters())
    with pytest.raises(mc.MaskConnectError, match=r"another network|fan-in"):
        mc.load(tmp_path / "net", into=mc.rewire(DenseNet(), BLOCKS, fan_in=1))
    with pytest.raises(mc.MaskConnectError, match="no stack"):
        mc.load(tmp_path / "net", into=mc.rewire(DenseNet(), BLOCKS[0], fan_in=2))


def test_the_wiring_is_drawn(frozen):
    svg = mc.draw(frozen).svg
    assert "features.denseblock2: learned, K=2" in svg
    first, second = frozen.get_submodule(BLOCKS[1]).wiring()[5]
    assert re.search(rf"Layer \(module 5\) reads [^<]*\b{first}\b[^<]*, [^<]*\b{second}\b", svg)


def test_copies_and_pickles_compute_the_same(frozen):
    x = images()
    for other in (copy.deepcopy(frozen), pickle.loads(pickle.dumps(frozen))):
        assert difference(frozen, other, x) == 0
    compiled = torch.compile(frozen, backend="eager")
    assert difference(frozen, compiled, x) < 1e-6


@pytest.mark.filterwarnings("ignore")  # of the compiler's own making
def test_dense_blocks_that_learn_compile_whole():
    model, x = mc.rewire(DenseNet(), BLOCKS, fan_in=2), images()
    twin = copy.deepcopy(model)
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    for _ in range(2):
        compiled(x).square().sum().backward()
        twin(x).square().sum().backward()
    for found, expected in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(found.grad, expected.grad, rtol=1e-4, atol=1e-5)


def test_in_bfloat16_masks_learn_in_float32():
    model = mc.rewire(DenseNet().bfloat16(), BLOCKS, fan_in=2)
    model(images().bfloat16()).float().sum().backward()
    stack = model.features.denseblock2
    assert stack.masks.real.grad.dtype == torch.float32
    assert stack.masks.real.grad[4].any()
    mc.freeze(model)
    assert mc.prune(model, images().bfloat16()).features.denseblock2.denselayer5.conv1.weight.dtype == torch.bfloat16


class OnlyNew(Block):
    def forward(self, x):
        return super().forward(x)[:, 6:]


class Shortcut(Layer):
    def forward(self, given):
        return super().forward(given) + given[-1][:, :3]


def with_layer(**parts):
    made = Block(3, 6, 3)
    for name, part in parts.items():
        setattr(made["denselayer2"], name, part)
    return made


def with_shortcut():
    made = Block(3, 6, 3)
    made["denselayer3"] = Shortcut(12, 3)
    return made


@pytest.mark.parametrize(
    ("made", "said"),
    [
        (lambda: OnlyNew(3, 6, 3), "does not return the concatenation"),
        (with_shortcut, "layer 3 of '0' reads its features in other ways than through norm1 and conv1"),
        (lambda: with_layer(norm1=nn.GroupNorm(3, 9)), "norm1 of layer 2 of '0' is a GroupNorm"),
        (lambda: with_layer(conv1=nn.Conv2d(9, 6, 1, groups=3)), "in 3 groups"),
        (lambda: with_layer(conv2=nn.Conv2d(6, 4, 3, padding=1)), "layer 3 of '0' reads 12 channels"),
        (lambda: with_layer(forward=lambda x: x.sum()), "cannot read a list of features"),
        (lambda: Block(1, 6, 3), "has 1 "),
    ],
)
def test_what_is_not_quite_a_dense_block_is_refused_with_the_reason(made, said):
    model = nn.Sequential(made())
    before = model[0]
    with pytest.raises(mc.ConfigError, match=said):
        mc.rewire(model, "0", fan_in=1)
    assert model[0] is before
    assert all(part.training for part in model.modules())


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"path": BLOCKS[0], "aggregation": "mean"}, "leave out aggregation 'mean'"),
        ({"path": BLOCKS[0], "align": lambda y, shape: y}, "leave out align"),
        ({"path": ["features.transition1", BLOCKS[0]]}, "'features.transition1' is not a dense block"),
        ({"path": []}, "path is "),
        ({"path": BLOCKS, "connectivity": {BLOCKS[0]: WIRING}}, "it also needs one for 'features.denseblock2'"),
        ({"path": BLOCKS, "seed": "a"}, "seed is 'a'"),
        ({"path": 3}, "path is 3; it must be the name"),
        ({"path": [BLOCKS[0], "features.denseblock3"]}, "Did you mean"),
        ({"path": "x"}, "'features', 'features.denseblock1', 'features.denseblock2'"),
    ],
)
def test_what_cannot_be_rewired_says_why_and_nothing_changes(options, said):
    model = DenseNet()
    with pytest.raises(mc.ConfigError, match=said):
        mc.rewire(model, fan_in=2, **options)
    assert not any(isinstance(part, mc.MaskedStack) for part in model.modules())


def test_hooks_of_a_block_and_a_credit_that_does_not_apply_are_refused():
    model = DenseNet()
    handle = model.features.denseblock1.register_forward_hook(lambda *_: None)
    with pytest.raises(mc.ConfigError, match="has hooks"):
        mc.rewire(model, BLOCKS, fan_in=2)
    handle.remove()
    mc.rewire(model, BLOCKS, fan_in=2)
    optimizer = torch.optim.SGD(mc.param_groups(model, lr=0.1, mask_lr=0.1))
    with pytest.raises(mc.ConfigError, match="credit"):
        mc.attach(optimizer, model, mc.Draw(credit="new"))
    with pytest.raises(mc.ConfigError, match="aggregation is 'concat'"):
        mc.MaskedStack([nn.Linear(2, 2)], 1, aggregation="concat")
