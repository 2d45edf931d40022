"""What people call the networks and the data of recipes, and how recipes are told apart."""

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
"""How many fields a label names, if it needs any."""


def network_name(model: Network) -> str:
    """`ResNet-38`, `ResNeXt {29,8,8}`, `Mixed {1+1+1,32,9}`."""
    return model.shape.title


def data_name(recipe: Recipe) -> str:
    """`CIFAR-100`; with what makes it another task, as in `CIFAR-100 (20 coarse classes, 8x8)`."""
    data, size = recipe.data, recipe.augmentation.size
    more = ["20 coarse classes"] * (data.labels == "coarse") + [f"{size}x{size}"] * (data.shrink > 1)
    name = SETS.get(data.name, data.name)
    return f"{name} ({', '.join(more)})" if more else name


def data_names(recipes: Iterable[Recipe]) -> str:
    """The data of some recipes, each once."""
    return " and ".join(dict.fromkeys(map(data_name, recipes)))


def kind_of_wiring(model: Network) -> str:
    """`Learned`, `Fixed-Prev`, ..."""
    return WIRINGS[model.connectivity] if isinstance(model.connectivity, str) else "Given wiring"


def fan_in_of(model: Network) -> int | None:
    """K; None where blocks differ in it by more than how many candidates they have."""
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
    """The kind of wiring, and K: `Learned, K=3`."""
    fan_in = fan_in_of(model)
    return kind_of_wiring(model) if fan_in is None else f"{kind_of_wiring(model)}, K={fan_in}"


def without_seed(recipe: Recipe) -> Recipe:
    """What is the same in all runs of a recipe, whatever their seeds and whatever it is called."""
    return replace(recipe, seed=0, name="", about="", paper=None)


def labels_of(recipes: Sequence[Recipe], wirings: Sequence[str]) -> list[str]:
    """Each wiring; with its data set and network where those differ, and with fields that differ if need be."""
    parts = [data_name(recipe) for recipe in recipes], [network_name(recipe.model) for recipe in recipes]
    shown = [part for part in parts if len(set(part)) > 1]
    return told_apart([", ".join(words) for words in zip(*shown, wirings, strict=True)], recipes)


def told_apart(names: Sequence[str], recipes: Sequence[Recipe]) -> list[str]:
    """Names, with the fields in which recipes differ whose names are the same but for K; if many, from the first."""
    written = [assignments(write(recipe)) for recipe in recipes]
    families = [name.partition(", K=")[0] for name in names]
    labels = list(names)
    for family in dict.fromkeys(families):
        places = [place for place, other in enumerate(families) if other == family]
        found = _apart([names[place] for place in places], [written[place] for place in places])
        for place, label in zip(places, found, strict=True):
            labels[place] = label
    return labels


def _apart(names: Sequence[str], written: Sequence[dict[str, str]]) -> list[str]:
    """Labels of recipes of one family: the shortest of three kinds that tells apart whatever can be."""
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
