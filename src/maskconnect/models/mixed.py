"""Layers of different branches; the network learns which branches to use and how to connect them.

    stem      stages                         widths              the first layer of each later stage
    cifar     as many layers as you like     w, 2w, 4w, ...      halves the image
    mini      the same, after a max pool
    imagenet  the same, after a 7x7 of stride 2 and a max pool

Every layer has one branch of each kind (`kinds.py`): a module, a batch norm, a ReLU. A branch reads K branches of the
layer before; the first layer reads the stem. At the end one 3x3 convolution reads K branches of the last layer, and the
classifier reads that. Branches that cannot reach it are pruned; the remaining ones and their wiring are the
architecture.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from maskconnect.errors import ConfigError, shown, unknown_name
from maskconnect.limits import within
from maskconnect.models.blocks import STEMS, Classifier
from maskconnect.models.kinds import KINDS, Kind, branch, check_own, conv3x3
from maskconnect.models.spec import Spec

MOST_STAGES = 8


@dataclass(frozen=True, kw_only=True)
class MixedSpec(Spec):
    """The layers, and the kinds of their branches."""

    FAMILY: ClassVar[str] = "mixed"
    PLAIN: ClassVar[str] = "prev"  # a chain of the first kind
    LAYERED: ClassVar[bool] = True
    AGGREGATIONS: ClassVar[tuple[str, ...]] = ("mean", "sum", "scaled")

    layers: Sequence[int]
    width: int
    kinds: Sequence[str] = tuple(KINDS)

    def __post_init__(self) -> None:
        if not isinstance(self.layers, Sequence) or isinstance(self.layers, str) or not self.layers:
            raise ConfigError(
                f"layers is {shown(self.layers)}; it must be the layers of each stage, such as (2, 2, 2)."
            )
        if len(self.layers) > MOST_STAGES:
            raise ConfigError(f"layers has {len(self.layers)} stages; the limit is {MOST_STAGES}.")
        object.__setattr__(self, "layers", tuple(within("layers", count) for count in self.layers))
        within("width", self.width)
        if not isinstance(self.kinds, Sequence) or isinstance(self.kinds, str) or not self.kinds:
            raise ConfigError(f"kinds is {shown(self.kinds)}; it must be a list of names, such as {list(KINDS)[:2]}.")
        for name in self.kinds:
            if not isinstance(name, str) or not name.isidentifier():
                raise ConfigError(
                    f"kinds has {shown(name)}; the name of a kind must be an identifier: letters, digits, _."
                )
        object.__setattr__(self, "kinds", tuple(self.kinds))
        super().__post_init__()

    @property
    def title(self) -> str:
        """The name of this network in reports."""
        return f"Mixed {{{'+'.join(map(str, self.layers))},{self.width},{len(self.kinds)}}}"

    @property
    def size(self) -> str:
        """The field that sets its size, and the value."""
        return f"layers {list(self.layers)}"

    @property
    def plain_words(self) -> str:
        """A description of the network with `PLAIN` connectivity."""
        return f"a chain of {self.kinds[0]}"

    @property
    def stages(self) -> tuple[int, ...]:
        """The number of layers of each stage; the last one includes the reader."""
        return (*self.layers[:-1], self.layers[-1] + 1)

    @property
    def modules(self) -> tuple[int, ...]:
        """A branch of each kind per layer, and the reader."""
        return (*(len(self.kinds),) * sum(self.layers), 1)

    @property
    def module_kinds(self) -> tuple[str, ...]:
        """The kind of each module, in the order in which they run."""
        return (*tuple(self.kinds) * sum(self.layers), READER)


READER = conv3x3.__name__
"""The kind of the last module."""


def build_mixed(spec: MixedSpec, own: Mapping[str, Kind] | None = None) -> Classifier:
    """Build the network that `spec` describes; `own` has the kinds that are not in `KINDS`."""
    known = KINDS | dict(own or {})
    for name in spec.kinds:
        if name not in known:
            raise unknown_name("a kind", name, known, or_else="; pass your own kinds with own={name: fn}")
    stem, inputs = STEMS[spec.stem](spec.in_channels, spec.width), spec.width
    layers = []
    for stage, count in enumerate(spec.layers):
        outputs = spec.width * 2**stage
        for number in range(count):
            stride = 2 if stage and number == 0 else 1
            for name in set(spec.kinds) & set(own or {}):
                check_own(name, known[name], inputs, outputs, stride)
            layers.append([branch(name, known[name], inputs, outputs, stride) for name in spec.kinds])
            inputs = outputs
    layers.append([branch(READER, conv3x3, inputs, inputs, 1)])
    stack = spec.stack(layers)
    return Classifier(spec, stem, stack, inputs, spec.num_classes)


def mixed(
    layers: int | Sequence[int],
    width: int,
    num_classes: int,
    fan_in: int | None = None,
    *,
    kinds: Sequence[str] | None = None,
    own: Mapping[str, Kind] | None = None,
    connectivity: str | Sequence[Any] = "learned",
    aggregation: str = "mean",
    stem: str = "cifar",
    in_channels: int = 3,
    mask_init: str | float = "uniform",
    use_all: bool = False,
    seed: int = 0,
) -> Classifier:
    """Build a network that learns which branches to use, and their wiring: `mc.mixed((1, 1, 1), 32, 10, fan_in=2)`.

    Args:
        layers: the number of layers, or that of each stage: (2, 2, 2). Each stage after the first halves the image and
            doubles the width.
        width: the channels of every branch of the first stage.
        num_classes: the number of classes.
        fan_in: K, the number of branches that a branch reads. Not needed if `connectivity` determines it.
        kinds: the kinds of the branches of a layer, by name; a name may occur twice. The default is one branch of each:
            conv3x3, dilated3x3, conv1x1, depthwise3x3, separable5x5, avgpool3x3, maxpool3x3, identity, globalmean, and
            each kind in `own`, which replaces one of the same name.
        own: your own kinds: a name, and `fn(inputs, outputs, stride)` that returns a module from `inputs` channels to
            `outputs` on every stride-th position. A batch norm and a ReLU are put after it. A saved network that has
            own kinds is loaded with `mc.load(path, into=model)`.
        connectivity: "learned", "full", "random", "prev" (each kind forms its own chain, and the classifier reads the
            first one; by default, plain 3x3 convolutions), or an explicit wiring.
        aggregation: how the branches that a branch reads are joined: "mean"; "scaled" (a learned factor per
            connection, at first 1/K); or "sum".
        stem: "cifar" (3x3), "mini" (3x3 and a max pool) or "imagenet" (7x7 and a max pool).
        in_channels: the channels of the images.
        mask_init, use_all: the initial real masks, and whether every branch must be read, as in `mc.MaskedStack`.
        seed: the seed of draws and of random connectivity. Weights come from torch's global generator.
    """
    return build_mixed(
        MixedSpec(
            layers=(layers,) if isinstance(layers, int) else layers,
            width=width,
            kinds=tuple(KINDS | dict(own or {})) if kinds is None else kinds,
            num_classes=num_classes,
            fan_in=fan_in,
            connectivity=connectivity,
            aggregation=aggregation,
            stem=stem,
            in_channels=in_channels,
            mask_init=mask_init,
            use_all=use_all,
            seed=seed,
        ),
        own,
    )
