"""Prune a trained network, and report the effect, for `maskconnect prune`."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from maskconnect.core.lookup import masks_of
from maskconnect.errors import ConfigError, integer
from maskconnect.models import Classifier, Spec, build, read_spec
from maskconnect.pruning.prune import prune_and_compare, pruned_parameters
from maskconnect.pruning.verify import tolerance
from maskconnect.ship.measure import Times, latency, macs
from maskconnect.ship.random_pruning import RandomPruning, random_pruning
from maskconnect.ship.saved import Saved


@dataclass(frozen=True, kw_only=True)
class Measures:
    """Measurements of a pruned network, and their limits."""

    draws: int = 200  # random wirings to compare with; 0: none
    batches: tuple[int, ...] = (1, 64)  # the batch sizes to time
    seconds: float = 10.0  # at most, per batch size

    def __post_init__(self) -> None:
        if any(integer("a batch", batch) < 1 for batch in self.batches):
            raise ConfigError(f"batches are {list(self.batches)}; each must be 1 or more.")
        if integer("draws", self.draws) < 0 or self.draws == 1:
            raise ConfigError(f"draws is {self.draws}; it must be 2 or more, or 0 for no random wirings.")
        if not 0 <= self.seconds < math.inf:
            raise ConfigError(f"seconds is {self.seconds}; it must be 0 or more.")


@dataclass(frozen=True, kw_only=True)
class Timing:
    """The times of one batch size, for all networks."""

    batch: int
    frozen: Times
    pruned: Times
    plain: Times | None

    def describe(self) -> dict[str, Any]:
        """Return the milliseconds of the fastest rounds, and the median ratios over rounds."""
        found: dict[str, Any] = {"batch": self.batch, "rounds": len(self.pruned.seconds)}
        for name, times in (("frozen", self.frozen), ("pruned", self.pruned), ("plain", self.plain)):
            found[f"{name}_ms"] = None if times is None else round(1000 * times.minimum, 3)
        found["pruned_over_frozen"] = round(self.pruned.over(self.frozen).rounds, 3)
        found["pruned_over_plain"] = None if self.plain is None else round(self.pruned.over(self.plain).rounds, 3)
        return found


@dataclass(frozen=True, kw_only=True)
class Report:
    """The effect of pruning on a network."""

    plain: str | None  # the name of the plain network
    modules: dict[str, int | None]  # modules in stacks; None without a plain network
    parameters: dict[str, int | None]
    macs: dict[str, int | None]
    timings: tuple[Timing, ...]
    random: RandomPruning | None
    difference: float  # of outputs, relative to the largest output
    allowed: float

    def describe(self) -> dict[str, Any]:
        """Return the report as plain data."""
        return {
            "plain": self.plain,
            "modules": self.modules,
            "parameters": self.parameters,
            "macs": self.macs,
            "latency": [timing.describe() for timing in self.timings],
            "random_wiring": None if self.random is None else _describe_random(self.random),
            "difference": self.difference,
            "allowed": self.allowed,
            "torch": torch.__version__,
            "threads": torch.get_num_threads(),
        }


def _describe_random(random: RandomPruning) -> dict[str, Any]:
    found: dict[str, Any] = {"draws": len(random.transitive.draws)}
    for name, left in (("transitive", random.transitive), ("one_step", random.one_step)):
        found[f"parameters_{name}"] = {
            "this_wiring": left.learned,
            "mean": round(left.mean, 1),
            "deviation": round(left.deviation, 1),
            "smallest": left.smallest,
            "largest": left.largest,
            "share_that_lost_as_much": left.share_that_lost_as_much(),
        }
    return found


def prune_saved(saved: Saved, *, fold: bool, merge: bool) -> tuple[Saved, float]:
    """Return the pruned network with its classes and preprocessing, and the difference of its outputs."""
    if saved.kind == "pruned":
        raise ConfigError("this network is already pruned; pass the unpruned one.")
    if saved.kind == "learned":
        raise ConfigError("the wiring of this network is still being learned; finish its training, or freeze it.")
    network, difference = prune_and_compare(saved.network.eval(), (_example(saved),), fold=fold, merge=merge)
    return replace(saved, network=network.eval(), kind="pruned"), difference


def report_of(
    before: Saved,
    after: Saved,
    difference: float,
    measures: Measures,
    *,
    fold: bool,
    merge: bool,
    say: Callable[[str], None] = lambda _: None,
) -> Report:
    """Return the report on pruning with these `fold` and `merge`; `say` is called with progress."""
    model, network, example = before.network.eval(), after.network, _example(before)
    spec, whole = _spec(model), _plain(model, example)
    plain = None if whole is None else prune_and_compare(whole, (example,), fold=fold, merge=merge)[0].eval()
    random = None
    if measures.draws:
        say(f"counting the parameters that {measures.draws} random wirings would lose")
        random = random_pruning(model, draws=measures.draws)
    return Report(
        plain=None if spec is None else spec.plain_words if spec.module_kinds else spec.title,
        modules=_modules(model, whole),
        parameters=_parameters(model, network, whole),
        macs={
            "frozen": macs(model, example),
            "pruned": macs(network, example),
            "plain": None if plain is None else macs(plain, example),
        },
        timings=tuple(_timed(model, network, plain, example, measures, say)),
        random=random,
        difference=difference,
        allowed=tolerance(example, exact=not (fold or merge)),
    )


def _example(saved: Saved) -> Tensor:
    """Return images of noise, in the size that the network reads."""
    if saved.preprocessing is None:
        raise ConfigError(
            "this network has no preprocessing, which says its input size; prune it in Python: mc.prune(model, x)."
        )
    like = next(saved.network.parameters())
    shape = (2, saved.preprocessing.channels, saved.preprocessing.size, saved.preprocessing.size)
    return torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(like)


def _spec(model: nn.Module) -> Spec | None:
    return read_spec(model.describe()) if isinstance(model, Classifier) else None


def _plain(model: nn.Module, example: Tensor) -> nn.Module | None:
    """Return the network of the same spec with its usual wiring, such as a plain ResNet."""
    spec = _spec(model)
    if spec is None:
        return None
    with torch.random.fork_rng([]):
        return build(replace(spec, connectivity=spec.PLAIN, fan_in=None)).to(example).eval()


def _modules(model: nn.Module, plain: nn.Module | None) -> dict[str, int | None]:
    alive = _alive(model)
    return {"frozen": len(alive), "pruned": sum(alive), "plain": None if plain is None else sum(_alive(plain))}


def _alive(model: nn.Module) -> list[bool]:
    return [on for masks in masks_of(model) for on in masks.current_wiring().alive]


def _parameters(model: nn.Module, network: nn.Module, plain: nn.Module | None) -> dict[str, int | None]:
    weights, one_step, transitive = pruned_parameters(model)
    written = sum(p.numel() for p in network.parameters())
    found = {"frozen": weights, "one_step": one_step, "transitive": transitive, "written": written}
    return {**found, "plain": None if plain is None else pruned_parameters(plain).transitive}


def _timed(
    model: nn.Module,
    network: nn.Module,
    plain: nn.Module | None,
    example: Tensor,
    measures: Measures,
    say: Callable[[str], None],
) -> Sequence[Timing]:
    found = []
    for batch in dict.fromkeys(measures.batches):
        say(f"timing at batch size {batch}")
        x = example[:1].expand(batch, -1, -1, -1).contiguous()
        networks = {"frozen": model, "pruned": network, **({} if plain is None else {"plain": plain})}
        times = latency(networks, x, seconds=measures.seconds)
        found.append(Timing(batch=batch, frozen=times["frozen"], pruned=times["pruned"], plain=times.get("plain")))
    return found
