"""Prune a trained network, and say what that has gained: the report of `maskconnect prune`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from maskconnect.core.compare import tolerance
from maskconnect.core.count import stacks_of
from maskconnect.core.loop import masks_of
from maskconnect.core.prune import prune_and_compare, pruned_parameters
from maskconnect.errors import ConfigError
from maskconnect.models import Classifier, ResNetSpec, build, read_spec
from maskconnect.ship.measure import Times, latency, macs
from maskconnect.ship.random_pruning import RandomPruning, random_pruning
from maskconnect.ship.saved import Saved


@dataclass(frozen=True, kw_only=True)
class Measures:
    """What to look at, and how long."""

    draws: int = 200  # of random wirings
    batches: tuple[int, ...] = (1, 64)  # at which to time
    seconds: float = 10.0  # for each batch

    def __post_init__(self) -> None:
        if any(batch < 1 for batch in self.batches):
            raise ConfigError(f"batches are {list(self.batches)}; each must be 1 or more.")


@dataclass(frozen=True, kw_only=True)
class Timing:
    """What a batch takes, of all networks in turn."""

    batch: int
    frozen: Times
    pruned: Times
    plain: Times | None

    def describe(self) -> dict[str, Any]:
        """The milliseconds of the fastest rounds, and medians over the ratios of each round."""
        found: dict[str, Any] = {"batch": self.batch, "rounds": len(self.pruned.seconds)}
        for name, times in (("frozen", self.frozen), ("pruned", self.pruned), ("plain", self.plain)):
            found[f"{name}_ms"] = None if times is None else round(1000 * times.minimum, 3)
        found["pruned_over_frozen"] = round(self.pruned.over(self.frozen).rounds, 3)
        found["pruned_over_plain"] = None if self.plain is None else round(self.pruned.over(self.plain).rounds, 3)
        return found


@dataclass(frozen=True, kw_only=True)
class Report:
    """What pruning has done to a network."""

    modules: tuple[int, int]  # of stacks: before, after
    parameters: dict[str, int]
    macs: dict[str, int | None]
    timings: tuple[Timing, ...]
    random: RandomPruning
    difference: float  # of outputs, relative to the largest
    allowed: float

    def describe(self) -> dict[str, Any]:
        """The report as plain data."""
        rules = {"transitive": self.random.transitive, "one_step": self.random.one_step}
        return {
            "modules": {"frozen": self.modules[0], "pruned": self.modules[1]},
            "parameters": self.parameters,
            "macs": self.macs,
            "latency": [timing.describe() for timing in self.timings],
            "random_wiring": {
                "draws": len(self.random.transitive.draws),
                **{
                    f"parameters_{name}": {
                        "learned": left.learned,
                        "mean": round(left.mean, 1),
                        "deviation": round(left.deviation, 1),
                        "smallest": left.smallest,
                        "largest": left.largest,
                        "share_that_lost_as_much": left.share_that_lost_as_much(),
                    }
                    for name, left in rules.items()
                },
            },
            "difference": self.difference,
            "allowed": self.allowed,
        }


def prune_saved(
    saved: Saved,
    *,
    fold: bool,
    merge: bool,
    measures: Measures,
    say: Callable[[str], None] = lambda _: None,
) -> tuple[Saved, Report]:
    """The pruned network with its classes and preprocessing, and what that has gained. `say` hears of progress."""
    model = saved.network.eval()
    if saved.kind == "pruned":
        raise ConfigError("this network is pruned already.")
    if saved.kind == "learned":
        raise ConfigError("the wiring of this network is still being learned; train it to its end, or freeze it.")
    example = _example(saved)
    say("pruning")
    network, apart = prune_and_compare(model, (example,), fold=fold, merge=merge)
    network.eval()
    say(f"counting what {measures.draws} random wirings would lose")
    plain = _plain(model, example, fold=fold, merge=merge)
    report = Report(
        modules=_modules(model),
        parameters=_parameters(model, network),
        macs={
            "frozen": macs(model, example),
            "pruned": macs(network, example),
            "plain": None if plain is None else macs(plain, example),
        },
        timings=tuple(_timed(model, network, plain, example, measures, say)),
        random=random_pruning(model, draws=measures.draws),
        difference=apart,
        allowed=tolerance(example, exact=not (fold or merge)),
    )
    return replace(saved, network=network, kind="pruned"), report


def _example(saved: Saved) -> Tensor:
    """Pictures of noise, as large as those that the network reads."""
    if saved.preprocessing is None:
        raise ConfigError("nothing says what pictures this network reads; prune it in Python, by mc.prune(model, x).")
    like = next(saved.network.parameters())
    shape = (2, saved.preprocessing.channels, saved.preprocessing.size, saved.preprocessing.size)
    return torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(like)


def _plain(model: nn.Module, example: Tensor, *, fold: bool, merge: bool) -> nn.Module | None:
    """Plain ResNet or ResNeXt of the same spec, in the same form as the pruned network."""
    if not isinstance(model, Classifier):
        return None
    spec = read_spec(model.describe())
    rule = "prev" if isinstance(spec, ResNetSpec) else "full"
    with torch.random.fork_rng([]):
        network = build(replace(spec, connectivity=rule, fan_in=None)).to(example).eval()
    return prune_and_compare(network, (example,), fold=fold, merge=merge)[0].eval()


def _modules(model: nn.Module) -> tuple[int, int]:
    alive = [on for masks in masks_of(model) for on in masks.settled().alive]
    return len(alive), sum(alive)


def _parameters(model: nn.Module, network: nn.Module) -> dict[str, int]:
    assert stacks_of(model)
    weights, one_step, transitive = pruned_parameters(model)
    written = sum(p.numel() for p in network.parameters())
    return {"frozen": weights, "one_step": one_step, "transitive": transitive, "written": written}


def _timed(
    model: nn.Module,
    network: nn.Module,
    plain: nn.Module | None,
    example: Tensor,
    measures: Measures,
    say: Callable[[str], None],
) -> Sequence[Timing]:
    found = []
    for batch in measures.batches:
        say(f"timing at batch {batch}")
        x = example[:1].expand(batch, -1, -1, -1).contiguous()
        networks = {"frozen": model, "pruned": network, **({} if plain is None else {"plain": plain})}
        times = latency(networks, x, seconds=measures.seconds)
        found.append(Timing(batch=batch, frozen=times["frozen"], pruned=times["pruned"], plain=times.get("plain")))
    return found
