"""Models of transformers and timm, rewired, pruned and exported."""

import onnxruntime
import pytest
import timm
import torch
from transformers import BertConfig, BertModel, LlamaConfig, LlamaForCausalLM

import maskconnect as mc
from maskconnect.ship.export import export_onnx, export_pt2

WIRING = [[], [0], [0], [0, 2]]  # nothing reads block 1
AXES = {0: "batch", 1: "length"}
DYNAMIC = {"input_ids": AXES, "attention_mask": AXES}
SIZES = {"vocab_size": 50, "hidden_size": 16, "intermediate_size": 24, "num_attention_heads": 2}


def llama(attention):
    config = LlamaConfig(**SIZES, num_hidden_layers=4, pad_token_id=0, attn_implementation=attention)
    return mc.rewire(LlamaForCausalLM(config).eval(), "model.layers", connectivity=WIRING)


def bert(attention):
    config = BertConfig(**SIZES, num_hidden_layers=4, max_position_embeddings=16, attn_implementation=attention)
    return mc.rewire(BertModel(config).eval(), "encoder.layer", connectivity=WIRING)


def text(batch, length):
    mask = torch.ones(batch, length, dtype=torch.int64)
    mask[-1, length - length // 3 :] = 0
    return {"input_ids": torch.randint(1, 50, (batch, length)), "attention_mask": mask}


def run_onnx(path, **given):
    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    found = session.run(None, {name: x.numpy() for name, x in given.items()})
    return {y.name: torch.from_numpy(value) for y, value in zip(session.get_outputs(), found, strict=True)}


def run_pt2(path, **given):
    return torch.export.load(path).module()(**given)


FORMS = pytest.mark.parametrize(("write", "run"), [(export_onnx, run_onnx), (export_pt2, run_pt2)])


def check(run, path, slim, outputs, **constants):
    for batch, length in ((1, 7), (3, 2), (4, 1), (2, 16)):
        given = text(batch, length)
        with torch.no_grad():
            expected = slim(**given, **constants)
        found = run(path, **given)
        assert list(found) == outputs
        for name in outputs:
            torch.testing.assert_close(found[name], expected[name], rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@FORMS
def test_a_pruned_llama_is_exported_for_any_batch_and_length(write, run, attention, tmp_path):
    given = {**text(1, 6), "use_cache": False}
    slim = mc.prune(llama(attention), given)
    assert write(slim, given, tmp_path / "a.file", dynamic=DYNAMIC) < 1e-5
    check(run, tmp_path / "a.file", slim, ["logits"], use_cache=False)


@FORMS
def test_the_cache_of_a_llama_is_left_out(write, run, tmp_path):
    slim = mc.prune(llama("sdpa"), text(2, 6))
    write(slim, text(2, 6), tmp_path / "a.file", dynamic=DYNAMIC)
    check(run, tmp_path / "a.file", slim, ["logits"])


@FORMS
def test_a_frozen_llama_is_pruned_first_and_may_read_ids_alone(write, run, tmp_path):
    model, ids = llama("sdpa"), text(2, 6)["input_ids"]
    write(model, ids, tmp_path / "a.file")
    more = text(5, 6)["input_ids"]
    found = run(tmp_path / "a.file", input_ids=more) if write is export_onnx else run_of_ids(tmp_path / "a.file", more)
    with torch.no_grad():
        torch.testing.assert_close(found["logits"], model(more).logits, rtol=1e-3, atol=1e-5)


def run_of_ids(path, ids):
    return torch.export.load(path).module()(ids)


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@FORMS
def test_a_pruned_bert_is_exported_up_to_the_length_that_it_has_places_for(write, run, attention, tmp_path):
    slim = mc.prune(bert(attention), text(2, 16))
    assert write(slim, text(2, 16), tmp_path / "a.file", dynamic=DYNAMIC) < 1e-5
    check(run, tmp_path / "a.file", slim, ["last_hidden_state", "pooler_output"])


@FORMS
def test_a_pruned_vit_is_exported_for_any_number_of_images(write, run, tmp_path):
    model = timm.create_model("vit_tiny_patch16_224", img_size=32, depth=4, num_classes=3).eval()
    slim = mc.prune(mc.rewire(model, "blocks", connectivity=WIRING), torch.randn(1, 3, 32, 32))
    assert write(slim, torch.zeros(1, 3, 32, 32), tmp_path / "a.file") < 1e-5
    x = torch.randn(5, 3, 32, 32)
    path = tmp_path / "a.file"
    found = run(path, images=x)["scores"] if write is export_onnx else torch.export.load(path).module()(x)
    with torch.no_grad():
        torch.testing.assert_close(found, slim(x), rtol=1e-3, atol=1e-5)
