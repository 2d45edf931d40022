"""Networks of unlike branches: their shapes, their wirings, their own kinds, saving, pruning."""

import pytest
import torch
from torch import nn

import maskconnect as mc
from maskconnect.errors import ConfigError
from maskconnect.models import MixedSpec, build, read_spec
from maskconnect.models.kinds import KINDS, branch

X = torch.randn(2, 3, 16, 16, generator=torch.Generator().manual_seed(0))


class Shift(nn.Module):
    """An own kind: the image one position to the right, and channels repeated."""

    def __init__(self, inputs, outputs, stride):
        super().__init__()
        self.stride, self.times = stride, outputs // inputs

    def forward(self, x):
        return x.roll(1, dims=3)[:, :, :: self.stride, :: self.stride].repeat(1, self.times, 1, 1)


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize(("outputs", "stride"), [(8, 1), (16, 2)])
def test_every_kind_makes_the_channels_and_positions_that_were_asked_for(name, outputs, stride):
    module = branch(name, KINDS[name], 8, outputs, stride)
    assert module.kind == name
    for side in (7, 8):
        assert module(torch.randn(2, 8, side, side)).shape == (2, outputs, -(-side // stride), -(-side // stride))


def test_kinds_do_what_they_are_called():
    x = torch.randn(1, 2, 6, 6)
    made = {name: kind(2, 2, 1) for name, kind in KINDS.items()}
    torch.testing.assert_close(made["identity"](x), x)
    torch.testing.assert_close(made["globalmean"](x)[0, :, 3, 4], x.mean(dim=(2, 3))[0])
    torch.testing.assert_close(made["maxpool3x3"](x)[0, 0, 2, 2], x[0, 0, 1:4, 1:4].max())
    torch.testing.assert_close(made["avgpool3x3"](x)[0, 0, 2, 2], x[0, 0, 1:4, 1:4].mean())
    for name, positions, channels in (
        ("conv3x3", 9, 2),
        ("dilated3x3", 9, 2),
        ("conv1x1", 1, 2),
        ("depthwise3x3", 9, 1),
        ("separable5x5", 25, 2),
    ):
        seen = x.clone().requires_grad_()
        made[name](seen)[0, 0, 3, 3].backward()
        assert (seen.grad[0] != 0).any(dim=0).sum() == positions, name
        assert (seen.grad[0] != 0).flatten(1).any(dim=1).sum() == channels, name


@pytest.mark.parametrize("connectivity", ["learned", "random", "full", "prev"])
@pytest.mark.parametrize("aggregation", ["mean", "scaled", "sum"])
def test_every_wiring_trains_and_a_pruned_network_computes_the_same(connectivity, aggregation):
    torch.manual_seed(0)
    model = mc.mixed((1, 2), 4, 10, fan_in=2, connectivity=connectivity, aggregation=aggregation)
    model(X).square().mean().backward()
    assert all(p.grad is None or p.grad.isfinite().all() for p in model.parameters())
    mc.freeze(model)
    model.eval()
    slim = mc.prune(model, X)
    torch.testing.assert_close(slim(X), model(X), rtol=1e-4, atol=1e-5)


def test_fixed_prev_is_a_chain_of_the_first_kind():
    model = mc.mixed(2, 4, 10, kinds=["conv3x3", "maxpool3x3"], connectivity="prev").eval()
    chain = nn.Sequential(model.stem, *(model.stack.blocks[layer][0] for layer in range(3)))
    torch.testing.assert_close(model(X), model.classifier(chain(X).mean(dim=(2, 3))))
    assert [name for name, _ in mc.prune(model, X, merge=False).named_modules() if "maxpool" in name] == []


def test_a_target_reads_the_mean_of_its_branches():
    model = mc.mixed(2, 4, 10, kinds=["conv3x3", "identity", "maxpool3x3"], connectivity="full").eval()
    x = model.stem(X)
    for layer in model.stack.blocks:
        x = torch.stack([module(x) for module in layer]).mean(dim=0)
    torch.testing.assert_close(model(X), model.classifier(x.mean(dim=(2, 3))))


def test_stages_halve_the_image_and_double_the_width():
    model = mc.mixed((1, 1, 2), 8, 10, fan_in=2)
    shapes = []
    for layer in model.stack.blocks:
        layer[0].register_forward_hook(lambda module, args, output: shapes.append(tuple(output.shape[1:])))
    model(X)
    assert shapes == [(8, 16, 16), (16, 8, 8), (32, 4, 4), (32, 4, 4), (32, 4, 4)]
    assert model.spec.stages == (1, 1, 3)
    assert model.spec.module_kinds == (*tuple(KINDS) * 4, "conv3x3")


@pytest.mark.parametrize(("stem", "side"), [("cifar", 16), ("mini", 8), ("imagenet", 4)])
def test_stems_are_those_of_the_other_families(stem, side):
    model = mc.mixed(1, 8, 10, fan_in=2, stem=stem)
    assert model.stem(X).shape == (2, 8, side, side)


def test_the_code_of_a_pruned_network_names_the_kinds_that_are_left():
    model = mc.mixed(1, 4, 10, kinds=["conv3x3", "globalmean", "maxpool3x3"], connectivity=[[[], [], []], [[0, 2]]])
    code = mc.prune(model.eval(), X).code
    assert "conv3x3" in code
    assert "maxpool3x3" in code
    assert "globalmean" not in code


def test_a_spec_is_read_back_from_plain_data_and_builds_the_same_network():
    torch.manual_seed(0)
    model = mc.mixed((1, 1), 4, 10, fan_in=2, connectivity="random", seed=3)
    found = read_spec(model.describe())
    assert found == model.spec
    again = build(found)
    again.load_state_dict(model.state_dict())
    torch.testing.assert_close(again.eval()(X), model.eval()(X))
    assert found.title == "Mixed {1+1,4,9}"


@pytest.mark.parametrize("pruned", [False, True])
def test_a_saved_network_is_loaded(pruned, tmp_path):
    model = mc.mixed((1, 1), 4, 10, fan_in=2, connectivity="random").eval()
    network = mc.prune(model, X) if pruned else model
    mc.save(network, tmp_path / "saved")
    torch.testing.assert_close(mc.load(tmp_path / "saved").eval()(X), network(X))


def test_own_kinds_stand_beside_the_others_and_are_saved_by_name(tmp_path):
    model = mc.mixed((1, 1), 4, 10, fan_in=2, own={"shift": Shift})
    assert model.spec.kinds == (*KINDS, "shift")
    assert [layer[-1].kind for layer in model.stack.blocks] == ["shift", "shift", "conv3x3"]
    few = {"kinds": ["shift", "conv1x1"], "own": {"shift": Shift}, "connectivity": "random", "fan_in": 1}
    model = mc.mixed(2, 4, 10, **few).eval()
    mc.save(model, tmp_path / "saved")
    with pytest.raises(ConfigError, match=r"custom modules.*mc\.load\(folder, into=model\)"):
        mc.load(tmp_path / "saved")
    torch.manual_seed(1)
    again = mc.mixed(2, 4, 10, **few)
    mc.load(tmp_path / "saved", into=again)
    torch.testing.assert_close(again.eval()(X), model(X))


def test_an_own_kind_of_a_known_name_replaces_it():
    model = mc.mixed(1, 4, 10, own={"identity": Shift}, connectivity="full")
    assert model.spec.kinds == tuple(KINDS)
    (branch,) = [branch for branch in model.stack.blocks[0] if branch.kind == "identity"]
    assert isinstance(branch.identity, Shift)


def test_a_kind_may_come_twice():
    model = mc.mixed(1, 4, 10, kinds=["conv3x3", "conv3x3"], connectivity="full")
    assert not torch.equal(model.stack.blocks[0][0].conv3x3.weight, model.stack.blocks[0][1].conv3x3.weight)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kinds": ["conv3"]}, "a kind is 'conv3'; it must be one of conv3x3, .*Did you mean 'conv3x3'"),
        ({"kinds": []}, r"kinds is \[\]; it must be a list of names"),
        ({"kinds": "conv3x3"}, "kinds is 'conv3x3'; it must be a list of names"),
        ({"kinds": ["3x3"]}, "kinds has '3x3'; the name of a kind must be an identifier"),
        ({"layers": ()}, "layers is (); it must be the layers of each stage"),
        ({"layers": (1, 0)}, "layers is 0; it must be 1 or more"),
        ({"layers": (1,) * 9}, "layers has 9 stages; the limit is 8"),
        ({"layers": 2000}, "layers .2000. makes .* the limits are"),
        ({"width": 0}, "width is 0; it must be 1 or more"),
        ({"aggregation": "residual"}, "aggregation is 'residual'; it must be one of mean, sum, scaled"),
        ({"own": {"shift": lambda i, o, s: nn.Conv2d(i, o, 3)}}, r"own\['shift'\]\(4, 4, 1\) turns .* it must turn"),
        ({"own": {"shift": lambda i, o: nn.Conv2d(i, o, 3)}}, r"own\['shift'\] failed with \(4, 4, 1\)"),
        ({"own": {"shift": lambda i, o, s: None}}, r"own\['shift'\] returned a NoneType; it must return an nn.Module"),
    ],
)
def test_a_mistake_is_one_clear_sentence(options, message):
    with pytest.raises(ConfigError, match=message.replace("()", r"\(\)")):
        mc.mixed(**{"layers": 1, "width": 4, "num_classes": 10, "fan_in": 2} | options)


def test_checking_an_own_kind_draws_no_random_numbers():
    def made(**own):
        torch.manual_seed(0)
        return mc.mixed(1, 4, 10, kinds=["conv3x3"], connectivity="full", **own).classifier.weight

    def noisy(inputs, outputs, stride):
        return nn.Dropout(0.5)

    torch.testing.assert_close(made(own={"noisy": noisy}), made())
    torch.manual_seed(0)
    mc.mixed(1, 4, 10, kinds=["noisy"], own={"noisy": noisy}, connectivity="full")


def test_a_spec_is_checked_like_that_of_the_other_families():
    with pytest.raises(ConfigError, match="num_classes is 0; it must be 1 or more"):
        MixedSpec(layers=(1,), width=4, num_classes=0)
