"""Names of the networks and data sets of recipes, and labels that distinguish recipes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from maskconnect.recipes.schema import Network, Recipe
from maskconnect.recipes.write import assignments, write

WIRINGS = {"learned": "Learned", "prev": "Fixed-Prev", "full": "Fixed-Full", "random": "Fixed-Random"}
SETS = {
    "mnist5k": "MNIST-5k",
    "cifar10": "CIFAR-10",
    "cifar100": "CIFAR-100",
    "fashion-mnist": "Fashion-MNIST",
    "mini-imagenet": "Mini-ImageNet",
    "imagenet": "ImageNet",
    "folder": "a folder of images",
}
FIELDS = 3
"""The number of fields that a label names, if it needs any."""


def network_name(model: Network) -> str:
    """Return the name of a network: `ResNet-38`, `ResNeXt {29,8,8}`, `Mixed {1+1+1,32,9}`."""
    return model.shape.title


def data_name(recipe: Recipe) -> str:
    """Return the name of the data: `CIFAR-100`, or `CIFAR-100 (20 coarse classes, 8x8)` if the task is another."""
    data, size = recipe.data, recipe.augmentation.size
    more = ["20 coarse classes"] * (data.labels == "coarse") + [f"{size}x{size}"] * (data.shrink > 1)
    name = SETS.get(data.name, data.name)
    return f"{name} ({', '.join(more)})" if more else name


def data_names(recipes: Iterable[Recipe]) -> str:
    """Return the names of the data of several recipes, each once."""
    return " and ".join(dict.fromkeys(map(data_name, recipes)))


def kind_of_wiring(model: Network) -> str:
    """Return the name of the connectivity: `Learned`, `Fixed-Prev`, ..."""
    return WIRINGS[model.connectivity] if isinstance(model.connectivity, str) else "Given wiring"


def fan_in_of(model: Network) -> int | None:
    """Return K; None if blocks differ in it by more than their number of candidates explains."""
    layout = model.layout()
    if model.connectivity in ("learned", "random"):
        most = max(map(len, layout.candidates()), default=0)
        return None if model.fan_in is None else min(model.fan_in, most)
    if not isinstance(model.connectivity, str):
        sources = layout.from_plain(model.connectivity, what="connectivity")
    else:
        sources = layout.prev() if model.connectivity == "prev" else layout.candidates()
    counts = {len(sources[target]) for target in layout.targets}
    return counts.pop() if len(counts) == 1 else None


def wiring_name(model: Network) -> str:
    """Return the kind of wiring and K: `Learned, K=3`."""
    fan_in = fan_in_of(model)
    return kind_of_wiring(model) if fan_in is None else f"{kind_of_wiring(model)}, K={fan_in}"


def without_seed(recipe: Recipe) -> Recipe:
    """Return the part of a recipe that all of its runs share, without seed and names."""
    return replace(recipe, seed=0, name="", about="", paper=None)


def labels_of(recipes: Sequence[Recipe], wirings: Sequence[str]) -> list[str]:
    """Return a label per recipe: its wiring, its data and network if those differ, and other fields if needed."""
    parts = [data_name(recipe) for recipe in recipes], [network_name(recipe.model) for recipe in recipes]
    shown = [part for part in parts if len(set(part)) > 1]
    return disambiguate([", ".join(words) for words in zip(*shown, wirings, strict=True)], recipes)


def disambiguate(names: Sequence[str], recipes: Sequence[Recipe]) -> list[str]:
    """Add to names that differ only in K the fields in which their recipes differ; if many, differ from the first."""
    written = [assignments(write(recipe)) for recipe in recipes]
    families = [name.partition(", K=")[0] for name in names]
    labels = list(names)
    for family in dict.fromkeys(families):
        places = [place for place, other in enumerate(families) if other == family]
        found = _labels_of_family([names[place] for place in places], [written[place] for place in places])
        for place, label in zip(places, found, strict=True):
            labels[place] = label
    return labels


def _labels_of_family(names: Sequence[str], written: Sequence[dict[str, str]]) -> list[str]:
    """Return labels for recipes of one family: the shortest of three forms that distinguishes all that differ."""
    told = {"model.fan_in"} if all(", K=" in name for name in names) else set()

    def labels(others: Sequence[dict[str, str]], most: int | None = None) -> list[str]:
        found = []
        for name, own in zip(names, written, strict=True):
            keys = [key for key in own if key not in told and any(other.get(key) != own[key] for other in others)]
            words = ", ".join(f"{key}={own[key]}" for key in keys[:most])
            found.append(f"{name} ({words})" if words else name)
        return found

    long = labels(written)
    shorter = (labels(written, FIELDS), labels(written[:1]))
    return next((found for found in shorter if len(set(found)) == len(set(long))), long)
