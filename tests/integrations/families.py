"""Model families of transformers and timm that `mc.rewire` is tested with, each as small as it can be.

The table in docs/guides/rewire.md has one row per family; `test_families.py` compares them.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib.metadata import version

import timm
import torch
import transformers as hf
from timm.models.metaformer import MetaFormer
from timm.models.mlp_mixer import MlpMixer
from torch import Tensor, nn

IDS, LENGTH = 40, 8  # of tokens
NARROW = {"vocab_size": IDS, "hidden_size": 16, "intermediate_size": 24, "num_attention_heads": 2}
SPECIAL = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}


@dataclass(frozen=True, kw_only=True)
class Family:
    """A model, and where its blocks are."""

    name: str
    library: str
    build: Callable[[], nn.Module]
    path: str | list[str]
    inputs: Callable[[], dict[str, Tensor]]
    options: Mapping[str, object] = field(default_factory=dict)  # of mc.rewire
    note: str = ""  # in what it differs from a plain list of blocks

    def model(self) -> nn.Module:
        """A model that computes something: fresh ones of timm have heads and layer scales of zero, or nearly."""
        model = self.build()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(torch.randn_like(parameter), alpha=0.1)
        return model

    @property
    def row(self) -> str:
        """Its row of the table in docs/guides/rewire.md."""
        paths = [self.path] if isinstance(self.path, str) else self.path
        shown = paths if len(paths) < 3 else [paths[0], "...", paths[-1]]
        listed = ", ".join(f"`{path}`" if path != "..." else path for path in shown)
        options = "".join(f'; `{name}="{value}"`' for name, value in self.options.items())
        return f"| {self.name} | {self.library} {version(self.library)} | {listed}{options} | {self.note} |"


def tokens() -> dict[str, Tensor]:
    return {"input_ids": torch.randint(3, IDS, (2, LENGTH))}


def with_decoder() -> dict[str, Tensor]:
    return {**tokens(), "decoder_input_ids": torch.randint(3, IDS, (2, 4))}


def pixels(side: int = 16) -> dict[str, Tensor]:
    return {"pixel_values": torch.randn(2, 3, side, side)}


def pictures(side: int) -> Callable[[], dict[str, Tensor]]:
    return lambda: {"x": torch.randn(2, 3, side, side)}


def llama(layers: int = 6, **options: object) -> nn.Module:
    config = {**NARROW, **SPECIAL, "num_key_value_heads": 1, "num_hidden_layers": layers, **options}
    return hf.LlamaForCausalLM(hf.LlamaConfig(**config))


def bert() -> nn.Module:
    return hf.BertForSequenceClassification(hf.BertConfig(**NARROW, num_hidden_layers=6, num_labels=5))


def gpt2() -> nn.Module:
    return hf.GPT2LMHeadModel(
        hf.GPT2Config(
            vocab_size=IDS,
            bos_token_id=1,
            eos_token_id=2,
            n_embd=16,
            n_layer=6,
            n_head=2,
            n_positions=32,
            use_cache=False,
        )
    )


def vit() -> nn.Module:
    narrow = {name: value for name, value in NARROW.items() if name != "vocab_size"}
    return hf.ViTForImageClassification(
        hf.ViTConfig(**narrow, num_hidden_layers=6, image_size=16, patch_size=8, hidden_dropout_prob=0.1, num_labels=5)
    )


def t5() -> nn.Module:
    sizes = {"d_model": 16, "d_kv": 8, "d_ff": 24, "num_layers": 6, "num_decoder_layers": 2, "num_heads": 2}
    return hf.T5ForConditionalGeneration(hf.T5Config(vocab_size=IDS, **sizes, use_cache=False))


def opt() -> nn.Module:
    sizes = {"hidden_size": 16, "ffn_dim": 24, "num_hidden_layers": 6, "num_attention_heads": 2}
    return hf.OPTForCausalLM(
        hf.OPTConfig(vocab_size=IDS, **sizes, **SPECIAL, word_embed_proj_dim=16, layerdrop=0.3, use_cache=False)
    )


def wav2vec2() -> nn.Module:
    narrow = {name: value for name, value in NARROW.items() if name != "vocab_size"}
    ears = {"conv_dim": (8, 8), "conv_stride": (4, 4), "conv_kernel": (8, 8), "num_feat_extract_layers": 2}
    return hf.Wav2Vec2Model(
        hf.Wav2Vec2Config(
            **narrow, **ears, num_hidden_layers=6, num_conv_pos_embeddings=4, num_conv_pos_embedding_groups=2,
            layerdrop=0.3, mask_time_prob=0.0,
        )
    )  # fmt: skip


def whisper() -> nn.Module:
    depth = {"encoder_layers": 6, "decoder_layers": 1, "encoder_attention_heads": 2, "decoder_attention_heads": 2}
    sizes = {"d_model": 16, "encoder_ffn_dim": 24, "decoder_ffn_dim": 24, "num_mel_bins": 4, "max_source_positions": 10}
    ends = {**SPECIAL, "decoder_start_token_id": 1, "dropout": 0.1, "use_cache": False}
    return hf.WhisperModel(hf.WhisperConfig(vocab_size=IDS, **depth, **sizes, **ends))


def mamba() -> nn.Module:
    return hf.MambaForCausalLM(
        hf.MambaConfig(vocab_size=IDS, hidden_size=16, num_hidden_layers=6, state_size=4, use_cache=False, **SPECIAL)
    )


def qwen3() -> nn.Module:
    config = {**NARROW, **SPECIAL, "num_key_value_heads": 1, "head_dim": 8, "num_hidden_layers": 6, "use_cache": False}
    return hf.Qwen3ForCausalLM(hf.Qwen3Config(**config))


def modernbert() -> nn.Module:
    ends = {**SPECIAL, "cls_token_id": 1, "sep_token_id": 2}
    return hf.ModernBertForMaskedLM(hf.ModernBertConfig(**NARROW, **ends, num_hidden_layers=6, mlp_dropout=0.1))


def resnet() -> nn.Module:
    sizes = {"hidden_sizes": [8, 12], "depths": [3, 3], "embedding_size": 8, "layer_type": "basic"}
    return hf.ResNetForImageClassification(hf.ResNetConfig(**sizes, num_labels=5))


def timm_model(name: str, **options: object) -> Callable[[], nn.Module]:
    return lambda: timm.create_model(name, num_classes=5, **options)


def mixer() -> nn.Module:
    return MlpMixer(num_classes=5, img_size=16, patch_size=8, num_blocks=6, embed_dim=16)


def poolformer() -> nn.Module:
    return MetaFormer(num_classes=5, depths=(2, 2, 2, 2), dims=(8, 8, 12, 16))


def stages(form: str, count: int) -> list[str]:
    return [form.format(number) for number in range(count)]


def _of(library: str, *rows: tuple) -> dict[str, Family]:
    keys = ("name", "build", "path", "inputs", "note", "options")
    made = [Family(library=library, **dict(zip(keys, row, strict=False))) for row in rows]
    return {family.name: family for family in made}


SPEECH = "LayerDrop in training: a dropped block passes on its input"
TRANSFORMERS = _of(
    "transformers",
    ("LLaMA", lambda: llama(use_cache=False), "model.layers", tokens, "cached generation, also pruned"),
    ("BERT", bert, "bert.encoder.layer", tokens, ""),
    ("GPT-2", gpt2, "transformer.h", tokens, "tied embeddings"),
    ("ViT", vit, "vit.layers", pixels, ""),
    ("T5", t5, "encoder.block", with_decoder, "blocks return tuples and pass on a position bias"),
    ("OPT", opt, "model.decoder.layers", tokens, SPEECH),
    ("wav2vec 2.0", wav2vec2, "encoder.layers", lambda: {"input_values": torch.randn(2, 160)}, SPEECH),
    (
        "Whisper", whisper, "encoder.layers",
        lambda: {"input_features": torch.randn(2, 4, 20), "decoder_input_ids": torch.randint(3, IDS, (2, 4))}, "",
    ),
    ("Mamba", mamba, "backbone.layers", tokens, "state-space blocks"),
    ("Qwen3", qwen3, "model.layers", tokens, ""),
    ("ModernBERT", modernbert, "model.layers", tokens, "local and global attention alternate"),
    (
        "ResNet", resnet, ["resnet.encoder.stages.0.layers", "resnet.encoder.stages.1.layers"], pixels,
        "one chain over all stages",
    ),
)  # fmt: skip
TIMM = _of(
    "timm",
    (
        "resnet18", timm_model("resnet18", channels=(8, 8, 12, 16)), stages("layer{}", 5)[1:], pictures(32),
        "one chain over all stages",
    ),
    (
        "convnext_atto", timm_model("convnext_atto", depths=(2, 2, 2, 2), dims=(8, 8, 12, 16)),
        stages("stages.{}.blocks", 4), pictures(64), "one chain; downsampling between the lists stays",
    ),
    (
        "vit_tiny_patch16_224",
        timm_model(
            "vit_tiny_patch16_224", img_size=16, patch_size=8, depth=6, embed_dim=24, num_heads=2, drop_rate=0.1
        ),
        "blocks", pictures(16), "",
    ),
    ("regnetx_002", timm_model("regnetx_002"), stages("s{}", 5)[1:], pictures(32), "stages with their own forward"),
    ("efficientnet_b0", timm_model("efficientnet_b0", drop_path_rate=0.1), stages("blocks.{}", 7), pictures(32), ""),
    (
        "swin_tiny_patch4_window7_224",
        timm_model(
            "swin_tiny_patch4_window7_224", img_size=56, embed_dim=8, num_heads=(1, 2), depths=(2, 4), window_size=7
        ),
        stages("layers.{}.blocks", 2), pictures(56), "one chain over all stages; channels last", {"align": "nhwc"},
    ),
    ("mixer (MlpMixer)", mixer, "blocks", pictures(16), ""),
    ("mobilenetv3_small_100", timm_model("mobilenetv3_small_100"), stages("blocks.{}", 6), pictures(32), ""),
    ("poolformer (MetaFormer)", poolformer, stages("stages.{}.blocks", 4), pictures(64), "one chain over all stages"),
)  # fmt: skip
FAMILIES = TRANSFORMERS | TIMM
HEADER = "| family | library | path | note |\n|---|---|---|---|"


def table() -> str:
    """The table in docs/guides/rewire.md.

    In this folder, `python -c "import torchvision_operators, families; print(families.table())"` prints it.
    """
    return "\n".join([HEADER, *(family.row for family in FAMILIES.values())])
