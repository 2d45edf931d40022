"""The recipes against the paper: its numbers are typed here again, from its text."""

import re
import tomllib
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import maskconnect as mc
from maskconnect.models import build
from maskconnect.recipes import Recipe, load, names, write
from maskconnect.recipes.load import HOME, in_file
from maskconnect.recipes.schema import Paper, Phase

CLASSES = {
    "digits": 10,
    "cifar10": 10,
    "cifar100": 100,
    "fashion-mnist": 10,
    "mnist5k": 10,
    "mini-imagenet": 100,
    "imagenet": 1000,
}
OURS_OF_29_64_8 = 34.6  # where the paper has 34.4 (D3)

# Table 1: accuracy.
TABLE_1 = {
    ("resnet38", "prev"): 68.54,
    ("resnet38", "random"): 62.67,
    ("resnet38", "learned"): 70.40,
    ("resnet74", "prev"): 70.64,
    ("resnet74", "random"): 66.93,
    ("resnet74", "learned"): 72.81,
    ("resnet110", "prev"): 71.21,
    ("resnet110", "random"): 67.22,
    ("resnet110", "learned"): 73.15,
}
K_OF_TABLE_1 = {"resnet38": 10, "resnet74": 15, "resnet110": 20}

# Table 2: best, mean, std, and parameters while training and after pruning.
TABLE_2 = {
    ("29-8-8", "full"): (73.52, 73.37, 0.13, 0.86, 0.86),
    ("29-8-8", "learned-k1"): (73.91, 73.76, 0.14, 0.86, 0.65),
    ("29-8-8", "learned-k4"): (75.89, 75.77, 0.12, 0.86, 0.81),
    ("29-8-8", "random"): (72.85, 72.66, 0.24, 0.86, 0.85),
    ("29-64-8", "full"): (82.23, 82.12, 0.12, 34.4, 34.4),
    ("29-64-8", "learned-k1"): (82.31, 82.15, 0.15, 34.4, 20.5),
    ("29-64-8", "learned-k4"): (84.05, 83.94, 0.11, 34.4, 32.1),
    ("29-64-8", "random"): (81.96, 81.73, 0.20, 34.4, 34.3),
}

# Table 3: top-1, top-5.
TABLE_3 = {
    ("50-4-32", "full"): (77.8, 93.3),
    ("50-4-32", "learned"): (79.1, 94.1),
    ("101-4-32", "full"): (78.8, 94.1),
    ("101-4-32", "learned"): (79.5, 94.5),
    ("101-4-64", "full"): (79.6, 94.7),
    ("101-4-64", "learned"): (79.8, 94.8),
}

# Tables 4 and 5: best, mean, std.
TABLE_4 = {
    ("20-4-8", "full"): (91.39, 91.13, 0.11),
    ("20-4-8", "learned"): (92.85, 92.76, 0.10),
    ("29-4-8", "full"): (92.77, 92.65, 0.09),
    ("29-4-8", "learned"): (93.88, 93.76, 0.12),
    ("29-8-8", "full"): (93.26, 93.14, 0.11),
    ("29-8-8", "learned"): (95.11, 94.96, 0.12),
    ("29-64-8", "full"): (96.35, 96.23, 0.12),
    ("29-64-8", "learned"): (96.83, 96.73, 0.11),
}
TABLE_5 = {
    ("20-4-8", "full"): (62.12, 61.86, 0.15),
    ("20-4-8", "learned"): (66.09, 65.94, 0.16),
    ("20-4-8", "random"): (62.42, 61.81, 0.32),
    ("29-8-8", "full"): (68.11, 67.89, 0.19),
    ("29-8-8", "learned"): (71.36, 71.18, 0.19),
    ("29-8-8", "random"): (67.97, 67.53, 0.20),
}


def claims() -> dict[str, Paper]:
    """What the paper says of each network of its tables, by the name of the recipe."""
    best_mean_std = ("accuracy", "mean", "std")
    found = {}
    for (network, how), accuracy in TABLE_1.items():
        stated = {"parameters": 0.57} if network == "resnet38" else {}  # by the caption of figure 2
        found[f"paper/cifar100-{network}-{how}"] = Paper(where="table 1", accuracy=accuracy, **stated)
    for (network, how), row in TABLE_2.items():
        fields = dict(zip((*best_mean_std, "parameters", "pruned"), row, strict=True))
        found[f"paper/cifar100-resnext{network}-{how}"] = Paper(where="table 2", **fields)
    for (network, how), (top1, top5) in TABLE_3.items():
        found[f"paper/imagenet-resnext{network}-{how}"] = Paper(where="table 3", accuracy=top1, top5=top5)
    for table, prefix, rows in (("table 4", "cifar10", TABLE_4), ("table 5", "mini", TABLE_5)):
        for (network, how), row in rows.items():
            fields = dict(zip(best_mean_std, row, strict=True))
            found[f"paper/{prefix}-resnext{network}-{how}"] = Paper(where=table, **fields)
    found["paper/imagenet-resnet50-prev"] = Paper(where="section 4.2", accuracy=76.15)
    found["paper/imagenet-resnet50-learned"] = Paper(where="section 4.2", accuracy=78.09)
    return found


CLAIMS = claims()
IN_FIGURES = {
    "paper/cifar100-resnext20-4-8-learned": Paper(where="figure 3", parameters=0.28),
    "paper/cifar100-resnext29-4-8-learned-k1": Paper(where="figure 5"),
    "paper/cifar100-resnext29-4-8-learned-k4": Paper(where="figure 5"),
}
OURS = {"paper/cifar100-resnet38-full": None}
"""Rows beside those of the paper."""
ALL = {name: load(name) for name in names()}
OF_PAPER = {name: recipe for name, recipe in ALL.items() if name.startswith("paper/")}
QUICK = [name for name in ALL if name.startswith("quick/")]
FILES = sorted(HOME.glob("*/*.toml"))


def epochs_and_rates(*phases: tuple[int, float, float]) -> tuple[Phase, ...]:
    given = zip(("learn", "freeze", "fine", "finer"), phases, strict=True)
    return tuple(Phase(name=name, epochs=epochs, lr=lr, mask_lr=mask_lr) for name, (epochs, lr, mask_lr) in given)


SHORT = epochs_and_rates((30, 0.1, 0.3), (30, 0.1, 0), (10, 0.01, 0), (10, 0.001, 0))
LONG = epochs_and_rates((120, 0.1, 0.2), (100, 0.1, 0), (50, 0.01, 0), (50, 0.001, 0))
# The appendix: data, batch, images of a GPU, weight decay, phases.
SETTINGS = {
    "paper/cifar100-resnet": ("cifar100", 128, 128 // 2, 0.0001, SHORT),
    "paper/cifar100-resnext": ("cifar100", 128, 16, 0.0005, LONG),
    "paper/cifar10-resnext": ("cifar10", 128, 16, 0.0005, LONG),
    "paper/mini-resnext": ("mini-imagenet", 256, 32, 0.0005, LONG),
    "paper/imagenet-resnet": (
        *("imagenet", 256, None, 0.0001),
        epochs_and_rates((30, 0.1, 0.3), (30, 0.1, 0), (30, 0.01, 0), (30, 0.001, 0)),
    ),
    "paper/imagenet-resnext": (
        *("imagenet", 256, 32, 0.0001),
        epochs_and_rates((30, 0.1, 0.2), (30, 0.1, 0), (30, 0.01, 0), (30, 0.001, 0)),
    ),
}
# Colors of ImageNet: the eigenvectors of their covariance are the columns, as AlexNet-like code has them.
EIGENVALUES = (0.2175, 0.0188, 0.0045)
EIGENVECTORS = ((-0.5675, 0.7192, 0.4009), (-0.5808, -0.0045, -0.8140), (-0.5836, -0.6948, 0.4203))


def family(name: str) -> str:
    """The name of a recipe up to its architecture."""
    return re.match(r"[a-z]+/[a-z0-9]+-(resnext|resnet)", name)[0]


def header(path: Path) -> str:
    """The comment that a file begins with."""
    return re.match(r"(#.*\n)+", path.read_text())[0]


def test_every_row_of_every_table_is_a_recipe_and_the_figures_need_three_more():
    assert len(CLAIMS) == 39
    assert OF_PAPER.keys() == CLAIMS.keys() | IN_FIGURES.keys() | OURS.keys()
    assert len(OF_PAPER) == 43


def test_the_quick_recipes_are_these():
    resnet = ("", "-strong", "-prev", "-full", "-random")
    resnext = ("-resnext", "-resnext-strong", "-resnext-full", "-resnext-published", "-resnext-random")
    wanted = [f"quick/cifar{n}{kind}" for n in (10, 100) for kind in (*resnet, *resnext)]
    wanted += [f"quick/digits{kind}" for kind in ("", "-prev", "-random")]
    assert wanted == QUICK
    assert len(ALL) == len(wanted) + 8 * 6 + 4 + 43  # discover, strong, paper


@pytest.mark.parametrize("name", [name for name in ALL if name.startswith("discover/")])
def test_every_set_of_discover_has_the_same_six_wirings(name):
    recipe = ALL[name]
    kind = name.rpartition("/")[2].removeprefix(recipe.data.name.removesuffix("-mnist")).removeprefix("-quick")
    wanted = {
        "": ("learned", "mean", "blend"),
        "-drawn": ("learned", "mean", "draw"),
        "-prev": ("prev", "mean", "blend"),
        "-random": ("random", "mean", "blend"),
        "-full": ("full", "mean", "blend"),
        "-scaled": ("full", "scaled", "blend"),
    }
    assert (recipe.model.connectivity, recipe.model.aggregation, recipe.learning.way) == wanted[kind]
    assert recipe.model.shape.module_kinds[:2] == ("conv3x3", "dilated3x3")


@pytest.mark.parametrize("name", [name for name in ALL if name.startswith("quick/cifar")])
def test_quick_recipes_of_cifar_choose_on_validation_images_and_are_tested_on_all(name):
    recipe = ALL[name]
    assert recipe.data.validation >= 5000
    assert recipe.data.test_images is None
    assert recipe.model.layout().candidates()[-1]
    assert sum(recipe.model.stages) == {"resnet": 9, "resnext": 6}[recipe.model.architecture]


def test_no_two_recipes_share_a_name():
    assert sum(len(in_file(path)) for path in FILES) == len(names())


@pytest.mark.parametrize("name", OF_PAPER)
def test_a_recipe_says_what_the_paper_reports_of_its_network(name):
    assert ALL[name].paper == (CLAIMS | IN_FIGURES | OURS)[name]


@pytest.mark.parametrize("name", OF_PAPER)
def test_a_recipe_trains_as_the_appendix_says(name):
    recipe = ALL[name]
    data, batch, group, decay, phases = SETTINGS[family(name)]
    assert (recipe.data.name, recipe.data.train_images, recipe.data.test_images) == (data, None, None)
    assert (recipe.data.validation, recipe.data.shrink, recipe.data.labels) == (0, 1, "fine")
    assert (recipe.training.batch_size, recipe.training.norm_group) == (batch, group)
    assert (recipe.training.weight_decay, recipe.training.momentum) == (decay, 0.9)
    assert recipe.phase == phases


@pytest.mark.parametrize(
    ("start", "epochs"), [("cifar100-resnet3", 80), ("imagenet", 120), ("cifar100-resnext", 320), ("mini", 320)]
)
def test_epochs_are_as_many_as_the_appendix_adds_up_to(start, epochs):
    assert {recipe.epochs for name, recipe in OF_PAPER.items() if name.startswith(f"paper/{start}")} == {epochs}


@pytest.mark.parametrize("name", OF_PAPER)
def test_a_network_is_the_one_in_its_name(name):
    model, dataset = ALL[name].model, ALL[name].data.name
    architecture, numbers, how = re.search(r"(resnext|resnet)([\d-]+\d)-(.*)", name).groups()
    sizes = [int(number) for number in numbers.split("-")]
    found = [model.depth] if architecture == "resnet" else [model.depth, model.width, model.cardinality]
    assert (model.architecture, found) == (architecture, sizes)
    assert model.connectivity == how.partition("-")[0]
    join = {"resnet": "mean", "resnext": "residual"}[architecture]
    assert (model.aggregation, model.norm, model.mask_init) == (join, None, "uniform")
    assert model.stem == {"mini-imagenet": "mini", "imagenet": "imagenet"}.get(dataset, "cifar")


@pytest.mark.parametrize("name", OF_PAPER)
def test_fan_in_is_the_one_of_the_tables(name):
    model = ALL[name].model
    if model.connectivity in ("prev", "full"):
        wanted = None  # 1, or all
    elif name.startswith("paper/cifar100-resnet") and model.architecture == "resnet":
        wanted = K_OF_TABLE_1[f"resnet{model.depth}"]
    elif name == "paper/imagenet-resnet50-learned":
        wanted = 10
    elif name.startswith("paper/imagenet"):
        wanted = model.cardinality // 2
    else:
        wanted = 1 if name.endswith("-k1") else 4
    assert model.fan_in == wanted


@pytest.mark.parametrize("name", OF_PAPER)
def test_images_are_augmented_as_the_appendix_says(name):
    plan, dataset = ALL[name].augmentation, ALL[name].data.name
    assert plan.flip
    if dataset != "imagenet":
        size, pad = (64, 0) if dataset == "mini-imagenet" else (32, 4)
        assert (plan.size, plan.pad, plan.mean, plan.std) == (size, pad, "pixel", None)
        assert (plan.area, plan.shorter, plan.test_shorter, plan.jitter, plan.lighting) == (None, None, None, 0, 0)
        return
    resnext = ALL[name].model.architecture == "resnext"
    assert (plan.size, plan.pad, plan.test_shorter, plan.lighting) == (224, 0, 256, 0.1)
    assert (plan.area, plan.shorter) == (((0.08, 1.0), None) if resnext else (None, (256, 480)))
    assert plan.jitter == (0.4 if resnext else 0)
    assert (plan.mean, plan.std) == ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
    vectors, values, found = (
        torch.tensor(each, dtype=torch.float64) for each in (EIGENVECTORS, EIGENVALUES, plan.components)
    )
    torch.testing.assert_close(found, vectors.T * values[:, None], rtol=1e-9, atol=0)


@pytest.mark.parametrize("name", ALL)
def test_a_network_builds_and_has_as_many_parameters_as_the_paper_states(name):
    recipe = ALL[name]
    dataset = recipe.data.name
    channels = 1 if dataset in ("digits", "mnist5k", "fashion-mnist") else 3
    with torch.device("meta"):
        model = build(recipe.model.spec(num_classes=CLASSES[dataset], in_channels=channels, seed=recipe.seed))
    millions = mc.count_parameters(model).weights / 1e6
    assert model.stack.masks.learned == recipe.learns
    if recipe.paper is not None and recipe.paper.parameters is not None:
        stated = recipe.paper.parameters
        assert round(millions, 2 if stated < 1 else 1) == (OURS_OF_29_64_8 if stated == 34.4 else stated)


@pytest.mark.parametrize("name", QUICK)
def test_a_quick_recipe_is_small_and_claims_nothing_of_the_paper(name):
    recipe = ALL[name]
    assert recipe.paper is None
    assert (recipe.model.depth, recipe.model.architecture) == (20, "resnext" if "resnext" in name else "resnet")
    assert [phase.name for phase in recipe.phase] == ["learn", "freeze", "fine", "finer"]
    assert recipe.epochs <= 60
    assert recipe.augmentation.size == (8 if recipe.data.name == "digits" else 32 // recipe.data.shrink)
    assert recipe.data.name == "digits" or recipe.data.train_images <= 10_000
    assert recipe.augmentation.flip == (recipe.data.name != "digits")


@pytest.mark.parametrize("name", [name for name in QUICK if not name.endswith("-strong")])
def test_a_quick_baseline_differs_from_the_learned_network_in_its_connectivity_alone(name):
    recipe = ALL[name]
    learned = ALL[re.sub("-(prev|random|full|published)$", "", name)]
    kind = name.split("-")[-1].replace("published", "full") if recipe is not learned else "learned"
    assert recipe.model.connectivity == kind
    assert recipe.model.norm == ("sum" if name.endswith("-published") else None)
    model = replace(recipe.model, connectivity="learned", fan_in=learned.model.fan_in, norm=None)
    assert replace(recipe, name=learned.name, about=learned.about, model=model) == learned


@pytest.mark.parametrize("name", ALL)
def test_every_recipe_says_in_words_what_it_is(name):
    recipe = ALL[name]
    model, about = recipe.model, recipe.about
    how = {"prev": "Fixed-Prev", "full": "Fixed-Full", "random": "Fixed-Random", "learned": "learned connectivity"}
    tail = "" if model.fan_in is None else f", K={model.fan_in}"
    tail += ", strong" if model.use_all else ""
    if name.startswith("discover/"):
        tail += ", by draws" * (recipe.learning.way == "draw") + ", scaled" * (model.aggregation == "scaled")
    network = model.shape.title
    network += " as it was published" if model.norm == "sum" and name.startswith("quick/") else ""
    assert about.endswith(f", {network}, {how[model.connectivity]}{tail}")
    assert about.split(",")[0].lower().replace("-", "").startswith(recipe.data.name.replace("-", ""))


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_a_file_begins_with_the_numbers_and_commands_of_its_recipes(path):
    said = header(path)
    commands = re.findall(r"maskconnect train (\S+)", said)
    own = [f"{path.parent.name}/{variant}" for variant in tomllib.loads(path.read_text())["variant"]]
    assert commands
    assert set(commands) <= set(own)
    if path.parent.name != "paper":
        assert ("It differs from the paper's" if path.parent.name == "strong" else "Not in the paper") in said
        return
    found = [claim for name in own if (claim := ALL[name].paper) and claim.accuracy is not None]
    stated = [number for claim in found for number in (claim.accuracy, claim.mean, claim.std, claim.top5)]
    if "table 2" in said:  # the only one with parameters
        stated += [number for claim in found for number in (claim.parameters, claim.pruned)]
    rows = "".join(line for line in said.splitlines() if line.startswith("#   "))
    assert Counter(map(float, re.findall(r"\d+\.\d+", rows))) == Counter(each for each in stated if each is not None)
    assert all(claim.where in said for claim in found)


@pytest.mark.parametrize("name", ALL)
def test_what_is_written_loads_as_the_same_recipe(name, tmp_path):
    path = tmp_path / "again.toml"
    path.write_text(write(ALL[name]))
    again = load(str(path))
    assert isinstance(again, Recipe)
    assert again == ALL[name]
