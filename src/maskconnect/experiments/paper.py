"""The tables and figures of the paper, each with its runs.

`paper` scale is the experiment of the paper; `quick` asks the same question at a size for two cores.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from maskconnect.experiments.grid import Cell
from maskconnect.recipes import Recipe, load
from maskconnect.recipes.naming import data_names, network_name

SCALES = ("paper", "quick")


@dataclass(frozen=True)
class Row:
    """A recipe with some fields set; its runs differ in their seeds."""

    recipe: str
    settings: tuple[str, ...] = ()
    control: str = ""  # the name of the control, if it is one: see controls.py
    label: str = ""  # its name in tables, if that does not follow from the recipe

    @property
    def name(self) -> str:
        """The start of the names of its run folders."""
        words = [self.recipe.rpartition("/")[2].removesuffix(".toml"), *(s.rpartition(".")[2] for s in self.settings)]
        return "_".join([*words, *([self.control] if self.needs_wiring else [])])

    @property
    def needs_wiring(self) -> bool:
        """Whether it trains a wiring that another row has learned."""
        return self.control in ("retrained", "shuffled")

    def cell(self, seed: int) -> Cell:
        """Return the run of a seed."""
        recipe = replace(load(self.recipe, self.settings), seed=seed)
        name = f"{self.name}_seed={seed}"
        return Cell(
            name=name, source=self.recipe, settings=self.settings, values=(self.name,), recipe=recipe, label=self.label
        )


@dataclass(frozen=True, kw_only=True)
class Experiment:
    """A table or a figure."""

    name: str
    title: str  # without the data set; that and {network} depend on the scale
    shows: str  # "table", or the key of a chart: "fan-in", "branching"; "wiring" for figure 4
    paper: tuple[Row, ...]
    quick: tuple[Row, ...] = ()
    seeds: int = 4  # as in the paper, if it has several runs

    def title_at(self, scale: str) -> str:
        """Return the title, with the data set and the network of a scale."""
        recipes = recipes_of(self, scale)
        networks = " and ".join(dict.fromkeys(network_name(recipe.model) for recipe in recipes))
        return f"{data_names(recipes)}, {self.title.replace('{network}', networks)}"

    def rows(self, scale: str) -> tuple[Row, ...]:
        """Return the rows at a scale."""
        return self.paper if scale == "paper" else self.quick


def _rows(pattern: str, *names: str) -> tuple[Row, ...]:
    return tuple(Row(pattern.format(name)) for name in names)


def _fan_ins(recipe: str, *fan_ins: int) -> tuple[Row, ...]:
    return tuple(Row(recipe, (f"model.fan_in={k}",)) for k in fan_ins)


def _networks(pattern: str, networks: tuple[str, ...], kinds: tuple[str, ...]) -> tuple[Row, ...]:
    return tuple(Row(pattern.format(network, kind)) for network in networks for kind in kinds)


TABLE1 = (
    *_rows("paper/cifar100-resnet38-{}", "prev", "random", "full", "learned"),
    *_networks("paper/cifar100-resnet{}-{}", ("74", "110"), ("prev", "random", "learned")),
)
TABLE2 = _networks("paper/cifar100-resnext{}-{}", ("29-8-8", "29-64-8"), ("full", "learned-k1", "learned-k4", "random"))
TABLE3 = _networks("paper/imagenet-resnext{}-{}", ("50-4-32", "101-4-32", "101-4-64"), ("full", "learned"))
TABLE4 = _networks("paper/cifar10-resnext{}-{}", ("20-4-8", "29-4-8", "29-8-8", "29-64-8"), ("full", "learned"))
TABLE5 = _networks("paper/mini-resnext{}-{}", ("20-4-8", "29-8-8"), ("full", "learned", "random"))
QUICK_RESNEXT = (
    Row("quick/cifar100-resnext-full"),
    Row("quick/cifar100-resnext", ("model.fan_in=1",)),
    Row("quick/cifar100-resnext"),
    Row("quick/cifar100-resnext-random"),
)

EXPERIMENTS = {
    experiment.name: experiment
    for experiment in (
        Experiment(
            name="table1",
            title="ResNet: fixed, random and learned connectivity",
            shows="table",
            paper=TABLE1,
            quick=_rows("quick/cifar100{}", "-prev", "-random", ""),
        ),
        Experiment(
            name="table2",
            title="ResNeXt: fixed, learned and random connectivity",
            shows="table",
            paper=TABLE2,
            quick=QUICK_RESNEXT,
        ),
        Experiment(
            name="table3",
            title="ResNeXt: fixed and learned connectivity",
            shows="table",
            paper=TABLE3,
            seeds=1,
        ),
        Experiment(
            name="table4",
            title="ResNeXt: fixed and learned connectivity",
            shows="table",
            paper=TABLE4,
            quick=_rows("quick/cifar10-resnext{}", "-full", "", "-random"),
        ),
        Experiment(
            name="table5",
            title="ResNeXt: fixed, learned and random connectivity",
            shows="table",
            paper=TABLE5,
        ),
        Experiment(
            name="resnet50",
            title="ResNet-50: fixed and learned connectivity (section 4.2)",
            shows="table",
            paper=_rows("paper/imagenet-resnet50-{}", "prev", "learned"),
            seeds=1,
        ),
        Experiment(
            name="fig2",
            title="{network}: accuracy against fan-in",
            shows="fan-in",
            paper=_fan_ins("paper/cifar100-resnet38-learned", *range(1, 18)),
            quick=_fan_ins("quick/cifar100", *range(1, 9)),
        ),
        Experiment(
            name="fig3",
            title="{network}: accuracy against fan-in",
            shows="fan-in",
            paper=_fan_ins("paper/cifar100-resnext20-4-8-learned", *range(1, 9)),
            quick=_fan_ins("quick/cifar100-resnext", *range(1, 9)),
        ),
        Experiment(
            name="fig4",
            title="{network}: the connectivity learned with K=1",
            shows="wiring",
            paper=_rows("paper/cifar100-resnext29-8-8-{}", "learned-k1"),
            quick=QUICK_RESNEXT[1:2],
            seeds=1,
        ),
        Experiment(
            name="fig5",
            title="{network}: active branches by depth",
            shows="branching",
            paper=_rows("paper/cifar100-resnext29-4-8-learned-{}", "k1", "k4"),
            quick=QUICK_RESNEXT[1:3],
        ),
        Experiment(
            name="fig6",
            title="{network}: active branches by depth",
            shows="branching",
            paper=_rows("paper/imagenet-resnext50-4-32-{}", "learned"),
            seeds=1,
        ),
    )
}


def recipes_of(experiment: Experiment, scale: str) -> list[Recipe]:
    """Return the recipes of an experiment's rows."""
    return [load(row.recipe, row.settings) for row in experiment.rows(scale)]
