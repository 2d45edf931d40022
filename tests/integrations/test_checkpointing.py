"""Activation checkpointing as timm and transformers do it, in rewired models."""

import copy

import pytest
import torch
from families import FAMILIES

import maskconnect as mc

TIMM_NAMES = ["vit_tiny_patch16_224", "resnet18", "regnetx_002", "convnext_atto"]
HF_NAMES = ["LLaMA", "BERT", "T5", "OPT"]
WAYS = {"default": None, "not reentrant": {"use_reentrant": False}, "reentrant": {"use_reentrant": True}}


def rewired(name, how):
    family = FAMILIES[name]
    model = mc.rewire(
        family.model(), family.path, **family.options,
        **({"connectivity": "prev"} if how == "prev" else {"fan_in": 2, "mask_init": "uniform"}),
    )  # fmt: skip
    optimizer = torch.optim.SGD(mc.param_groups(model, lr=0.1, mask_lr=0.1))
    if how != "prev":
        mc.attach(optimizer, model, mc.Blend(steps=9) if how == "blended" else mc.Draw())
    if how == "frozen":
        mc.freeze(model)
    return model.train(), family.inputs()


def gradients(model, inputs, passes=2):
    found = []
    for seed in range(passes):
        torch.manual_seed(seed)
        model.zero_grad()
        y = model(**inputs)
        y = y if isinstance(y, torch.Tensor) else y[0]
        y.square().mean().backward()
        named = model.named_parameters()  # reentrant checkpointing gives zeros where there would be no gradient
        found.append({name: torch.zeros_like(p) if p.grad is None else p.grad.clone() for name, p in named})
    return found


def assert_same_gradients(found, wanted):
    for these, those in zip(found, wanted, strict=True):
        assert these.keys() == those.keys()
        for name, value in those.items():
            torch.testing.assert_close(these[name], value, msg=lambda m, name=name: f"{name}: {m}")
    assert any(value.abs().max() > 0 for name, value in wanted[0].items() if ".masks." not in name)


def without_running_statistics(model):
    """Batch norms whose statistics a repeated pass would move twice, with or without masks."""
    for part in model.modules():
        if isinstance(part, torch.nn.BatchNorm2d):
            part.momentum = 0.0
    return model


@pytest.mark.parametrize("how", ["prev", "drawn", "blended", "frozen"])
@pytest.mark.parametrize("name", TIMM_NAMES)
def test_gradients_are_the_same_with_the_checkpointing_of_timm(name, how):
    model, inputs = rewired(name, how)
    other = without_running_statistics(copy.deepcopy(model))
    other.set_grad_checkpointing(True)
    assert_same_gradients(gradients(other, inputs), gradients(without_running_statistics(model), inputs))


@pytest.mark.filterwarnings("ignore:.*gradient_checkpointing_enable. is deprecated:FutureWarning")
@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
@pytest.mark.parametrize("how", ["prev", "drawn", "blended", "frozen"])
@pytest.mark.parametrize("name", HF_NAMES)
def test_gradients_are_the_same_with_the_checkpointing_of_transformers(name, how, way):
    model, inputs = rewired(name, how)
    other = copy.deepcopy(model)
    other.gradient_checkpointing_enable(gradient_checkpointing_kwargs=way)
    assert any(getattr(part, "gradient_checkpointing", False) for part in other.modules())
    assert_same_gradients(gradients(other, inputs), gradients(model, inputs))
