"""The libraries that the tests of this folder use are there and work, beside the pinned torch."""

from importlib.metadata import version

import lightning
import timm
import torch
from transformers import LlamaConfig, LlamaForCausalLM


def test_torch_is_the_pinned_one():
    assert torch.__version__.split("+")[0] == "2.13.0"


def test_lightning_is_not_one_of_the_malicious_releases():
    for name in ("lightning", "pytorch-lightning"):
        assert version(name).startswith("2.5.")
    assert lightning.__version__ == version("lightning")


def test_timm_makes_a_network():
    assert timm.create_model("resnet18", num_classes=3)(torch.zeros(2, 3, 32, 32)).shape == (2, 3)


def test_transformers_makes_a_network():
    config = LlamaConfig(
        vocab_size=7, hidden_size=8, intermediate_size=8, num_hidden_layers=2, num_attention_heads=2, pad_token_id=0
    )
    assert LlamaForCausalLM(config)(torch.zeros(1, 4, dtype=torch.int64)).logits.shape == (1, 4, 7)
