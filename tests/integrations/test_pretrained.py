"""Rewired models from the low-memory ways to build and load models of transformers and timm."""

import pytest
import timm
import torch
from families import FAMILIES

import maskconnect as mc

NAMES = ["LLaMA", "GPT-2", "BERT", "ResNet", "resnet18", "vit_tiny_patch16_224"]
WIRING = {"fan_in": 2, "mask_init": "uniform"}


def output(model, inputs):
    y = model.eval()(**inputs)
    return y if isinstance(y, torch.Tensor) else y[0]


def rewired(model, family, **options):
    return mc.rewire(model, family.path, **family.options, **(options or WIRING))


@pytest.mark.parametrize("name", NAMES)
def test_a_model_that_is_built_and_rewired_on_meta_takes_weights_and_masks(name):
    family = FAMILIES[name]
    model, inputs = rewired(family.model(), family), family.inputs()
    with torch.device("meta"):
        empty = rewired(family.build(), family)
    assert all(p.is_meta for p in empty.parameters())
    assert [*empty.state_dict()] == [*model.state_dict()]
    empty.to_empty(device="cpu")
    empty.load_state_dict(model.state_dict())
    for (part, buffer), (_, wanted) in zip(empty.named_buffers(), model.named_buffers(), strict=True):
        if part not in model.state_dict():
            buffer.copy_(wanted)  # such as the frequencies of rotary embeddings, which no checkpoint has
    assert torch.equal(output(empty, inputs), output(model, inputs))


@pytest.mark.parametrize("name", NAMES[:4])
def test_weights_of_save_pretrained_load_into_a_rewired_model(name, tmp_path):
    family = FAMILIES[name]
    plain, inputs = family.model(), family.inputs()
    plain.save_pretrained(tmp_path)
    again = type(plain).from_pretrained(tmp_path)
    model = rewired(family.model(), family, connectivity="prev")
    missing, unexpected = model.load_state_dict(again.state_dict())
    assert not missing + unexpected
    assert torch.equal(output(model, inputs), output(plain, inputs))
    assert torch.equal(output(rewired(again, family, connectivity="prev"), inputs), output(plain, inputs))


def test_weights_of_a_timm_checkpoint_load_into_a_rewired_model(tmp_path):
    family = FAMILIES["resnet18"]
    plain, inputs = family.model(), family.inputs()
    torch.save(plain.state_dict(), tmp_path / "resnet.pth")
    model = rewired(family.build(), family, connectivity="prev")
    timm.models.load_checkpoint(model, str(tmp_path / "resnet.pth"))
    assert torch.equal(output(model, inputs), output(plain, inputs))
