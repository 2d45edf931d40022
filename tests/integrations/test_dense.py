"""The DenseNets of timm and torchvision: learn, freeze, prune, save, load, export."""

import copy

import pytest
import timm
import torch
import torchvision
from torch import nn
from torch.nn import functional as F

import maskconnect as mc
from maskconnect.pruning.prune import difference, pruned_parameters
from maskconnect.ship.export import export_onnx, export_pt2

pytestmark = pytest.mark.integrations

BLOCKS = [f"features.denseblock{number}" for number in range(1, 5)]
X = torch.linspace(-2, 2, 4 * 3 * 64 * 64).sin().reshape(4, 3, 64, 64)


LIBRARIES = ["timm", "torchvision"]


def densenet(library="timm", **options):
    torch.manual_seed(0)
    if library == "torchvision":
        return torchvision.models.densenet121(num_classes=10, **options)
    return timm.create_model("densenet121", num_classes=10, **options)


def trained(model, steps=20):
    optimizer = torch.optim.SGD(mc.param_groups(model, lr=0.01, mask_lr=0.1), momentum=0.9)
    mc.attach(optimizer, model, mc.Blend(steps=steps))
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(X), torch.arange(4))
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0]
    return model


@pytest.mark.parametrize("library", LIBRARIES)
@pytest.mark.parametrize("training", [True, False])
def test_with_full_connectivity_densenet121_is_what_it_was_bitwise(library, training):
    model = densenet(library, drop_rate=0.1).train(training)
    rewired = mc.rewire(copy.deepcopy(model), BLOCKS, connectivity="full")
    outputs = []
    for network in (model, rewired):
        torch.manual_seed(1)
        outputs.append(network(X))
        outputs[-1].square().sum().backward()
    assert torch.equal(*outputs)
    weights, state = dict(rewired.named_parameters()), rewired.state_dict()
    assert all(torch.equal(weights[name].grad, p.grad) for name, p in model.named_parameters())
    assert all(torch.equal(state[name], value) for name, value in model.state_dict().items())


@pytest.mark.parametrize("library", LIBRARIES)
def test_densenet121_is_trained_frozen_pruned_saved_loaded_and_exported(library, tmp_path):
    model = trained(mc.rewire(densenet(library), BLOCKS, fan_in=4))
    mc.freeze(model)
    model.eval()
    pruned = mc.prune(model, X)
    weights = sum(p.numel() for p in pruned.parameters())
    assert pruned_parameters(model).transitive == weights < 0.8 * mc.count_parameters(model).weights
    assert difference(model, pruned, X) < 1e-5
    assert not any(type(part).__module__.startswith("maskconnect") for part in pruned.modules())
    last = pruned.get_submodule(BLOCKS[2]).denselayer24
    assert last.conv1.in_channels <= 256 + 3 * 32  # of 992
    mc.save(pruned, tmp_path / "pruned")
    loaded = mc.load(tmp_path / "pruned", into=mc.rewire(densenet(library), BLOCKS, fan_in=4))
    assert difference(pruned, loaded, X) == 0
    assert export_onnx(model, X, tmp_path / "net.onnx") < 1e-4
    assert export_pt2(pruned, X, tmp_path / "net.pt2") < 1e-4
    assert set(mc.wiring_of(model)) == set(BLOCKS)
    assert mc.draw(model).svg.count("<title>") == sum(1 + count for count in (6, 12, 24, 16))


@pytest.mark.parametrize("library", LIBRARIES)
@pytest.mark.parametrize("connectivity", ["learned", "random"])
def test_gradient_checkpointing_inside_of_the_layers_changes_nothing(library, connectivity):
    plain = mc.rewire(densenet(library), BLOCKS, fan_in=4, connectivity=connectivity)
    saving = copy.deepcopy(plain)
    if library == "timm":
        saving.set_grad_checkpointing()
        assert saving.get_submodule(BLOCKS[0]).denselayer2.grad_checkpointing
    else:
        for part in saving.modules():
            if hasattr(part, "memory_efficient"):
                part.memory_efficient = True
    for network in (plain, saving):
        F.cross_entropy(network(X), torch.arange(4)).backward()
    for (name, a), b in zip(plain.named_parameters(), saving.parameters(), strict=True):
        assert (a.grad is None) == (b.grad is None), name
        if a.grad is not None:
            torch.testing.assert_close(b.grad, a.grad, msg=name)


def test_a_checkpoint_of_timm_loads_before_and_after():
    model = densenet()
    rewired = mc.rewire(densenet(), BLOCKS[2], connectivity="full")
    rewired.load_state_dict(model.state_dict())
    assert torch.equal(rewired.eval()(X), model.eval()(X))
    without = {name: value for name, value in rewired.state_dict().items() if ".masks." not in name}
    densenet().load_state_dict(without)
    assert isinstance(rewired.features.denseblock3, mc.MaskedStack)
    assert isinstance(rewired.features.denseblock2, nn.ModuleDict)
