"""Masks in a model that already exists."""

import copy
from collections import OrderedDict

import pytest
import torch
from networks import EncoderBlock, mlp_blocks
from plain import PlainBlock, PlainResNet
from torch import nn
from torch.nn import functional as F

import maskconnect as mc


class Stages(nn.Module):
    """A ResNet as many libraries write it: an nn.Sequential a stage."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, padding=1)
        self.layer1 = nn.Sequential(*(PlainBlock(8, 8, 1, deep=False, project=False) for _ in range(5)))
        self.layer2 = nn.Sequential(
            PlainBlock(8, 16, 2, deep=False, project=True),
            *(PlainBlock(16, 16, 1, deep=False, project=False) for _ in range(3)),
        )
        self.fc = nn.Linear(16, 10)

    def forward(self, x):
        return self.fc(self.layer2(self.layer1(self.stem(x))).mean((2, 3)))


class Vit(nn.Module):
    """A ViT-style encoder: patches, a class token, positions, a list of blocks."""

    def __init__(self, depth=6, width=16):
        super().__init__()
        self.patches = nn.Conv2d(3, width, 4, 4)
        self.token, self.positions = nn.Parameter(torch.randn(1, 1, width)), nn.Parameter(torch.randn(1, 17, width))
        self.encoder = nn.ModuleDict({"layers": nn.ModuleList(EncoderBlock(width) for _ in range(depth))})
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 10)

    def forward(self, x, padding=None):
        x = self.patches(x).flatten(2).mT
        x = torch.cat([self.token.expand(len(x), -1, -1), x], dim=1) + self.positions
        for block in self.encoder["layers"]:
            x = block(x, key_padding_mask=padding)
        return self.head(self.norm(x)[:, 0])


def resnet():
    return PlainResNet("cifar", [2, 2, 2], 10)


MODELS = {
    "resnet": (resnet, ["blocks"]),
    "resnet in stages": (Stages, ["layer1", "layer2"]),
    "vit": (Vit, ["encoder.layers"]),
    "sequential": (lambda: nn.Sequential(*(nn.Conv2d(3, 3, 3, padding=1) for _ in range(4))), [""]),
}


@pytest.fixture(params=MODELS)
def trained(request):
    """A model after a few steps, and the paths of its lists of blocks."""
    make, paths = MODELS[request.param]
    model = make()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.randn(8, 3, 16, 16)).square().mean().backward()
        optimizer.step()
    optimizer.zero_grad()
    return model, paths


@pytest.mark.parametrize("training", [True, False])
def test_with_fixed_prev_nothing_changes_bitwise(trained, training):
    model, paths = trained
    model.train(training)
    rewired = copy.deepcopy(model)
    for path in paths:
        rewired = mc.rewire(rewired, path, connectivity="prev")
    x = torch.randn(4, 3, 16, 16)
    found, wanted = rewired(x), model(x)
    assert torch.equal(found, wanted)
    found.square().mean().backward()
    wanted.square().mean().backward()
    weights = [p for name, p in rewired.named_parameters() if "masks" not in name]
    for a, b in zip(weights, model.parameters(), strict=True):
        assert torch.equal(a.grad, b.grad)
    assert rewired.training == training
    for part in rewired.modules():
        assert part.training == training


def test_learned_masks_start_near_the_old_wiring(trained):
    model, paths = trained
    before = {id(p) for p in model.parameters()}
    for path in paths:
        model = mc.rewire(model, path, fan_in=1)
    assert before <= {id(p) for p in model.parameters()}
    for stack in (part for part in model.modules() if isinstance(part, mc.MaskedStack)):
        assert stack.wiring() == [[], *([j] for j in range(len(stack) - 1))]
        assert (stack.masks.real.max(dim=1).values > 0.98).all()
        assert stack.learning


def test_a_rewired_model_learns_freezes_and_is_restored():
    model = mc.rewire(Vit(), "encoder.layers", fan_in=2)
    optimizer = torch.optim.AdamW(mc.param_groups(model, lr=1e-3, mask_lr=0.1))
    mc.attach(optimizer, model)
    x, labels = torch.randn(16, 3, 16, 16), torch.arange(16) % 10
    losses = []
    for _ in range(60):
        loss = F.cross_entropy(model(x), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.8 * losses[0]
    mc.freeze(model)
    again = mc.rewire(Vit(), "encoder.layers", fan_in=2)
    again.load_state_dict(model.state_dict())
    assert mc.wiring_of(again) == mc.wiring_of(model)
    assert torch.equal(again.eval()(x), model.eval()(x))


def test_uniform_masks_would_disturb_a_trained_network_more():
    model, x = Vit().eval(), torch.randn(8, 3, 16, 16)
    wanted = model(x)

    def difference(**start):
        rewired = mc.rewire(copy.deepcopy(model), "encoder.layers", fan_in=1, **start).train()
        return sum((rewired(x) - wanted).square().mean().item() for _ in range(30))

    assert difference() < 0.2 * difference(mask_init="uniform")


def test_further_arguments_reach_every_block():
    model, x = Vit().eval(), torch.randn(2, 3, 16, 16)
    padding = torch.zeros(2, 17, dtype=torch.bool)
    padding[:, 9:] = True
    wanted = model(x, padding)
    assert not torch.allclose(wanted, model(x))
    assert torch.equal(mc.rewire(model, "encoder.layers", connectivity="prev")(x, padding), wanted)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("nested", [False, True])
def test_the_transformer_of_torch_itself(nested):
    layer = nn.TransformerEncoderLayer(16, 4, 32, dropout=0.0, batch_first=True)
    model = nn.TransformerEncoder(layer, 5, enable_nested_tensor=nested)
    x, padding = torch.randn(2, 7, 16), torch.zeros(2, 7, dtype=torch.bool)
    padding[:, 5:] = True
    fixed = mc.rewire(copy.deepcopy(model), "layers", connectivity="prev")
    assert torch.equal(fixed(x, None, padding), model(x, None, padding))
    mc.rewire(model, "layers", fan_in=2)(x, None, padding)[..., 0].sum().backward()
    assert model.layers.masks.real.grad.abs().sum() > 0
    wanted = model.eval()(x, None, padding)
    with torch.no_grad():  # torch's fast path, with nested tensors where they are enabled
        torch.testing.assert_close(model(x, None, padding)[:, :5], wanted[:, :5])


def test_a_list_with_two_names_is_replaced_under_both():
    model = resnet()
    model.again = model.blocks
    mc.rewire(model, "again", fan_in=2)
    assert model.again is model.blocks
    assert isinstance(model.blocks, mc.MaskedStack)


def test_masks_follow_the_blocks_to_their_device_and_precision():
    with torch.device("meta"):
        model = Vit()
    rewired = mc.rewire(model, "encoder.layers", fan_in=2)
    assert all(p.is_meta for p in rewired.parameters())
    assert mc.rewire(Vit().double(), "encoder.layers", fan_in=2).encoder.layers.masks.real.dtype == torch.float64


def test_a_block_that_is_used_twice_stays_shared():
    block = nn.Linear(4, 4)
    model = nn.Sequential(block, nn.Tanh(), block, nn.Tanh())
    x = torch.randn(2, 4)
    wanted = model(x)
    rewired = mc.rewire(model, "", connectivity="prev")
    assert torch.equal(rewired(x), wanted)
    assert mc.count_parameters(rewired).weights == 20


class Own(nn.Sequential):
    def forward(self, x):
        return x + super().forward(x)


@pytest.mark.parametrize(
    ("model", "path", "said"),
    [
        (Vit(), "encoder.layer", r"there is no 'encoder.layer' in this Vit\. Did you mean 'encoder.layers'\?"),
        (
            Stages(),
            "blocks",
            r"there is no 'blocks' in this Stages\. Lists of blocks in this model: 'layer1', 'layer2'",
        ),
        (nn.Linear(2, 2), "x", r"Lists of blocks in this model: none\."),
        (Vit(), "head", "'head' is a Linear, which has no blocks; it must be an nn.Sequential, an nn.ModuleList"),
        (Vit(depth=1), "encoder.layers", "'encoder.layers' has 1 blocks; it needs at least 2"),
        (nn.ModuleList([nn.Linear(2, 2)] * 2), "", "path is '', but the model is a ModuleList, not an nn.Sequential"),
        (Vit(), "", "'' is a Vit, which has children of different classes, so it is not a chain of blocks"),
        (Vit(), "encoder", "'encoder' is a ModuleDict, which does not say in which order its blocks run"),
        (Vit(), [], "path is \\[\\]; it must be the name of a list of blocks, or several"),
        (Stages(), ["layer1", "layer1"], "'layer1' is named twice, or contains another of the named lists"),
        ("vit", "", "model is a str; it must be an nn.Module"),
        (Vit(), 3, "path is 3; it must be the name of a list of blocks"),
        (mc.resnet(8, 10, 2), "stack", "'stack' is already a MaskedStack, or part of one"),
        (mc.resnet(8, 10, 2), "stack.blocks", "'stack.blocks' is already a MaskedStack, or part of one"),
        (mc.resnext(20, 4, 2, 10, 2, norm="sum"), "stack.aggregation.norms", "or part of one"),
        (nn.Sequential(nn.ModuleList([nn.Tanh()] * 2), nn.Tanh()), "", "block 0 of '' is a ModuleList, which computes"),
        (mc.resnet(8, 10, 2), "nothing", r"Lists of blocks in this model: 'stem'\."),
    ],
)
def test_mistakes_are_one_sentence(model, path, said):
    with pytest.raises(mc.ConfigError, match=said) as error:
        mc.rewire(model, path, fan_in=1)
    assert "\n" not in str(error.value)


def test_a_mistake_leaves_the_model_as_it_was():
    model = Vit()
    with pytest.raises(mc.ConfigError, match="fan_in is 0"):
        mc.rewire(model, "encoder.layers", fan_in=0)
    assert isinstance(model.encoder["layers"][0], EncoderBlock)


@pytest.mark.parametrize("kind", ["forward_hook", "forward_pre_hook", "full_backward_hook", "full_backward_pre_hook"])
def test_hooks_on_the_list_itself_still_run(kind):
    model, seen = Stages(), []
    getattr(model.layer1, f"register_{kind}")(lambda *_: seen.append(kind))
    mc.rewire(model, "layer1", fan_in=1)(torch.randn(2, 3, 8, 8)).sum().backward()
    assert seen == [kind]


def test_a_forward_of_the_instance_is_an_error():
    model = Stages()
    model.layer1.forward = lambda x: x
    with pytest.raises(
        mc.ConfigError, match=r"the forward of 'layer1' was replaced, .* delete the attribute `forward`"
    ):
        mc.rewire(model, "layer1", fan_in=1)
    del model.layer1.forward
    mc.rewire(model, "layer1", fan_in=1)


def test_the_parts_of_a_block_inside_a_stack_can_be_rewired():
    inner = nn.Sequential(*(nn.Linear(4, 4) for _ in range(3)))
    wrapped = nn.Sequential(nn.Sequential(inner, nn.Tanh()), nn.Tanh())
    stack = mc.rewire(wrapped, "", fan_in=1)
    mc.rewire(stack, "0.0", fan_in=2)
    stack(torch.randn(2, 4)).sum().backward()
    assert len([part for part in stack.modules() if isinstance(part, mc.MaskedStack)]) == 2


def test_a_model_inside_ddp_is_an_error(tmp_path):
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        wrapped = nn.parallel.DistributedDataParallel(Vit())
        with pytest.raises(mc.ConfigError, match=r"call mc\.rewire\(model\.module"):
            mc.rewire(wrapped, "module.encoder.layers", fan_in=2)
    finally:
        torch.distributed.destroy_process_group()


def test_a_join_that_needs_what_blocks_add_is_refused():
    with pytest.raises(mc.ConfigError, match="aggregation is 'stream', which needs blocks that return what they add"):
        mc.rewire(nn.Sequential(*mlp_blocks(4)), "", fan_in=2, aggregation="stream")


@pytest.mark.parametrize("aggregation", ["mean", "scaled"])
def test_blocks_keep_their_names_and_plain_checkpoints_load_both_ways(aggregation):
    plain, other = Vit(), Vit()
    names = list(plain.state_dict())
    model = mc.rewire(copy.deepcopy(other), "encoder.layers", fan_in=2, aggregation=aggregation)
    start = model.encoder["layers"].masks.real.detach().clone()
    ours = [name for name in model.state_dict() if "layers.masks." in name or name.endswith("layers.scales")]
    assert [name for name in model.state_dict() if name not in ours] == names
    model.load_state_dict(plain.state_dict(), strict=True)
    assert torch.equal(model.encoder["layers"].masks.real, start)
    other.load_state_dict({name: value for name, value in model.state_dict().items() if name not in ours}, strict=True)
    for name, value in plain.state_dict().items():
        assert torch.equal(other.state_dict()[name], value)


def test_a_stack_that_was_not_rewired_refuses_a_missing_mask():
    stack = mc.MaskedStack([nn.Linear(3, 3) for _ in range(3)], 1)
    weights = {name: value for name, value in stack.state_dict().items() if "masks" not in name}
    with pytest.raises(RuntimeError, match=r"masks\.real"):
        stack.load_state_dict(weights)


def test_a_block_may_not_have_a_name_of_the_stack():
    blocks = nn.Sequential(OrderedDict(masks=nn.Linear(3, 3), two=nn.Linear(3, 3)))
    with pytest.raises(mc.ConfigError, match="a block is called 'masks', a name that the stack reserves"):
        mc.rewire(nn.Sequential(OrderedDict(body=blocks)), "body", fan_in=1)
