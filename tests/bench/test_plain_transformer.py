"""The plain transformer of the benchmark, and ours that is made of it."""

import torch
from torch import nn

import maskconnect as mc
from maskconnect.bench.cases import CASES
from maskconnect.bench.plain_transformer import PlainLayer, PlainTransformer


def test_a_plain_layer_is_that_of_torch():
    torch.manual_seed(0)
    plain = PlainLayer(24, 3, 4).double()
    theirs = nn.TransformerEncoderLayer(24, 3, 96, 0.0, "gelu", batch_first=True, norm_first=True).double()
    names = {
        "self_attn.in_proj_weight": plain.qkv.weight,
        "self_attn.in_proj_bias": plain.qkv.bias,
        **{f"self_attn.out_proj.{name}": p for name, p in plain.project.named_parameters()},
        **{f"linear1.{name}": p for name, p in plain.widen.named_parameters()},
        **{f"linear2.{name}": p for name, p in plain.narrow.named_parameters()},
        **{f"norm1.{name}": p for name, p in plain.attention_norm.named_parameters()},
        **{f"norm2.{name}": p for name, p in plain.mlp_norm.named_parameters()},
    }
    theirs.load_state_dict({name: p.detach() for name, p in names.items()})
    x = torch.randn(2, 5, 24, dtype=torch.float64)
    found, wanted = plain(x), theirs(x)
    torch.testing.assert_close(found, wanted)
    found.square().sum().backward()
    wanted.square().sum().backward()
    for name, p in theirs.named_parameters():
        torch.testing.assert_close(names[name].grad, p.grad)


def test_an_image_of_32_px_has_65_tokens():
    plain, seen = PlainTransformer(2, 24, 3, 10), []
    plain.blocks[0].register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0].shape))
    assert plain(torch.randn(2, 3, 32, 32)).shape == (2, 10)
    assert seen == [(2, 65, 24)]


def test_ours_is_the_plain_one_and_reads_two_layers():
    case = CASES["transformer12"]
    ours = case.network("learned")
    assert len(ours.blocks) == 12
    assert [len(sources) for sources in mc.wiring_of(ours)[2:]] == [2] * 10
    torch.manual_seed(0)
    plain = case.plain()
    torch.manual_seed(0)
    x = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    assert torch.equal(case.network("prev")(x), plain(x))
