"""Where recipes come from, how their layers lie over each other, and what is refused."""

import itertools
import os
import re
import tomllib
from pathlib import Path

import pytest

import maskconnect as mc
from maskconnect.recipes import load, names, write
from maskconnect.recipes.load import in_file, merged, set_field
from maskconnect.recipes.schema import Paper

WHOLE = """
[data]
name = "digits"
[augmentation]
size = 8
[model]
architecture = "resnet"
depth = 20
fan_in = 3
[training]
batch_size = 64
weight_decay = 1e-4
[[phase]]
name = "learn"
epochs = 3
lr = 0.1
mask_lr = 0.3
[[phase]]
name = "freeze"
epochs = 2
lr = 0.01
"""
TWO = f"""{WHOLE}
[variant.learned]
about = "learned"
[variant.fixed]
model.connectivity = "prev"
"""
RECIPE = "paper/cifar100-resnet38-learned"
CHAIN = [[], *([k] for k in range(17))]
"""The wiring of Fixed-Prev for the 18 blocks of a ResNet-38."""


@pytest.fixture
def file(tmp_path):
    """Write a recipe and say where it is."""

    def written(text, name="mine.toml"):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
        return str(path)

    return written


def refused(name, *settings):
    """The words with which a recipe is refused."""
    with pytest.raises(mc.ConfigError) as caught:
        load(name, settings)
    return str(caught.value)


def test_a_recipe_in_a_file_is_called_as_the_file_unless_it_says_otherwise(file):
    assert load(file(WHOLE)).name == "mine"
    assert load(file(f'name = "other"\n{WHOLE}')).name == "other"
    assert load(f"{file(TWO)}:fixed").name == "fixed"
    assert load("quick/digits-prev").name == "quick/digits-prev"


def test_what_is_left_out_has_its_default(file):
    recipe = load(file(WHOLE))
    assert (recipe.seed, recipe.paper, recipe.init_from) == (0, None, None)
    assert (recipe.training.momentum, recipe.training.norm_group, recipe.phase[1].mask_lr) == (0.9, None, 0.0)
    assert recipe.model.connectivity == "learned"


def test_a_file_may_begin_with_a_byte_order_mark(file):
    assert load(file(f"\ufeff{WHOLE}")) == load(file(WHOLE))


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("fan_in = 3", "fanin = 3", "unknown field `model.fanin`; did you mean `model.fan_in`?"),
        ("[data]", "[date]", "unknown field `date`; did you mean `data`?"),
        ("[data]", "zzz = 1\n[data]", "unknown field `zzz`; a recipe has: name, about, seed, "),
        ("size = 8", "size = 8\ncolor = 1", "unknown field `augmentation.color`; augmentation has: size, pad, "),
        ("epochs = 2", "epoch = 2", "unknown field `phase.freeze.epoch`; did you mean `phase.freeze.epochs`?"),
        ("depth = 20", "", "model.depth is missing"),
        ("lr = 0.01", "", "phase.freeze.lr is missing"),
        ('name = "freeze"', "", "phase.1.name is missing"),
        ('[data]\nname = "digits"', "", "data is missing"),
        ("depth = 20", "depth = true", "model.depth is True; it must be an integer."),
        ("depth = 20", "depth = 20.0", "model.depth is 20.0; it must be an integer."),
        ("depth = 20", 'depth = "20"', "model.depth is '20'; it must be an integer."),
        ("lr = 0.01", "lr = true", "phase.freeze.lr is True; it must be a number."),
        ("lr = 0.01", 'lr = "fast"', "phase.freeze.lr is 'fast'; it must be a number."),
        ("lr = 0.01", f"lr = 1{'0' * 400}", "phase.freeze.lr is an integer of 1329 bits; the largest float is"),
        ("lr = 0.01", "lr = nan", "phase.freeze.lr is nan; it must be 0 or more, and finite."),
        ("size = 8", "size = 8\nflip = 1", "augmentation.flip is 1; it must be true or false."),
        ("size = 8", "size = 8\nmean = true", "augmentation.mean is True; it must be a string or a list."),
        ("size = 8", "size = 8\nmean = [1, true]", "augmentation.mean.1 is True; it must be a number."),
        ("size = 8", "size = 8\narea = [1]", "augmentation.area is [1]; it must have 2 values."),
        ("size = 8", "size = 0", "augmentation.size is 0"),
        ('name = "digits"', "name = 5", "data.name is 5; it must be a string."),
        ('name = "digits"', 'name = "digit"', "data.name is 'digit'"),
        ('name = "digits"', 'name = "digits"\nlabels = "coars"', "Did you mean 'coarse'?"),
        ('[data]\nname = "digits"', "data = 3", "data is 3; it must be a table."),
        ('[data]\nname = "digits"', "[data]\nname = 2024-05-01", "data.name is datetime.date(2024, 5, 1)"),
        ("depth = 20", "depth = 21", "model.depth is 21; with stem='cifar' it must be 6n+2, such as 20 or 26."),
        ("fan_in = 3", "fan_in = 0", "model.fan_in is 0; a target needs at least 1 source."),
        ("fan_in = 3", "", "model.fan_in is missing; learned connectivity needs it"),
        ("fan_in = 3", 'fan_in = 3\nconnectivity = "lerned"', "model.connectivity is 'lerned'"),
        ("fan_in = 3", "connectivity = 5", "model.connectivity holds 5; a wiring has a list of sources per module."),
        ("fan_in = 3", "connectivity = [[], [0]]", "model.connectivity has 2 rows; the stack has 9 modules."),
        ("fan_in = 3", "fan_in = 3\nwidth = 4", "model.width is 4; only a resnext or mixed has this field. Remove it."),
        ("fan_in = 3", "fan_in = 3\nmask_init = 2", "model.mask_init is 2.0; it must be 'uniform', or a number"),
        ("mask_lr = 0.3", "", "model.connectivity is 'learned', but phase.learn.mask_lr is 0"),
        ('name = "freeze"', 'name = "learn"', "the phases are named learn, learn; give each a different name."),
    ],
)
@pytest.mark.parametrize("place", ["file", "variant"])
def test_a_mistake_is_refused_with_the_file_and_the_field(file, old, new, said, place):
    assert WHOLE.count(old) == 1
    text = WHOLE.replace(old, new)
    name = file(text)
    if place == "variant":
        name = file("[variant.it]\n" + re.sub(r"^(\[+)", r"\1variant.it.", text, flags=re.MULTILINE)) + ":it"
    assert refused(name).startswith(f"{name}: ")
    assert said in refused(name)


def test_a_phase_that_is_not_a_list_of_tables_is_refused(file):
    head = WHOLE.partition("[[phase]]")[0]
    assert "phase is missing" in refused(file(head))
    assert "phase is 3; it must be a list." in refused(file(f"phase = 3\n{head}"))
    assert "phase.0 is 3; it must be a table." in refused(file(f"phase = [3]\n{head}"))
    assert "the recipe has no phase" in refused(file(f"phase = []\n{head}"))


@pytest.mark.parametrize(
    ("name", "near"),
    [
        ("quick/digit", "quick/digits"),
        ("digits", "quick/digits"),
        ("digts", "quick/digits"),
        ("cifar100-resnet38-lerned", "paper/cifar100-resnet38-learned"),
        ("paper/cifar100-resnet38-lerned", "paper/cifar100-resnet38-learned"),
    ],
)
def test_a_recipe_that_is_not_there_names_the_nearest(name, near):
    said = refused(name)
    assert said.startswith(f"the recipe is {name!r}; it must be one that `maskconnect recipes` lists")
    assert said.endswith(f" Did you mean {near!r}?")


def test_a_name_like_no_other_has_no_nearest():
    assert refused("xyzzy").endswith("or a file that ends in .toml.")
    assert refused("zz:zy").startswith("the recipe is 'zz:zy'; it must be one that")


def test_a_file_that_is_not_there_or_no_toml_is_refused(file, tmp_path):
    missing = str(tmp_path / "none.toml")
    assert (
        refused(missing)
        == f"{missing} cannot be read: No such file or directory. Pass the name of a recipe, or a file that exists."
    )
    assert f"{tmp_path / 'broken.toml'} is not valid TOML: " in refused(file("[data\n", "broken.toml"))
    assert "is not valid TOML: " in refused(file(f"seed = {'1' * 5000}\n"))
    assert "is not valid TOML: " in refused(file(f"seed = {'[' * 5000}\n"))
    (tmp_path / "bytes.toml").write_bytes(b"\xff\xfe")
    assert "is not valid TOML: " in refused(str(tmp_path / "bytes.toml"))


def test_a_file_of_several_recipes_wants_one_to_be_named(file):
    path = file(TWO)
    assert refused(path) == f"{path} holds several recipes; name one of them: {path}:learned, {path}:fixed."
    assert refused(f"{path}:lerned") == refused(path)
    assert in_file(Path(path)) == [f"{path}:learned", f"{path}:fixed"]


def test_a_file_of_one_recipe_has_no_variants(file):
    path = file(WHOLE)
    assert refused(f"{path}:fixed") == f"{path} has no variant 'fixed', because it holds a single recipe. Pass {path}."
    assert in_file(Path(path)) == [path]


@pytest.mark.parametrize("variants", ["variant = 3", "[variant]\nx = 3", "[[variant]]\nabout = 'x'"])
def test_variants_that_are_no_tables_are_refused(file, variants):
    path = file(f"{variants}\n")
    assert refused(path).startswith(f"{path}: variant is ")
    assert refused(path).endswith("it must hold one table per recipe, as [variant.NAME].")


def test_a_variant_lies_over_what_the_file_says(file):
    path = file(TWO)
    learned, fixed = (load(f"{path}:{variant}") for variant in ("learned", "fixed"))
    assert (learned.about, learned.model.connectivity) == ("learned", "learned")
    assert (fixed.about, fixed.model.connectivity) == ("", "prev")
    assert learned.phase == fixed.phase


def test_a_base_is_a_recipe_by_name(file):
    mine = load(file('base = "quick/digits"\nseed = 3\n[model]\nfan_in = 2\n'))
    base = load("quick/digits")
    assert (mine.name, mine.seed, mine.model.fan_in) == ("mine", 3, 2)
    assert (mine.data, mine.phase) == (base.data, base.phase)


def test_a_recipe_does_not_take_over_what_its_base_says_of_itself(file):
    mine = load(file(f'base = "{RECIPE}"\n'))
    assert (mine.about, mine.paper) == ("", None)
    assert (mine.model, mine.training) == (load(RECIPE).model, load(RECIPE).training)
    assert load(file(f'base = "{RECIPE}"\n[paper]\nwhere = "here"\n')).paper == Paper(where="here")


def test_a_variant_may_have_a_base_of_its_own(file):
    text = (
        '[training]\nmomentum = 0.5\n[variant.one]\nbase = "quick/digits"\n[variant.two]\nbase = "quick/digits-prev"\n'
    )
    path = file(f'base = "quick/digits-random"\n{text}[variant.three]\nseed = 3\n')
    found = [load(f"{path}:{variant}") for variant in ("one", "two", "three")]
    assert [recipe.model.connectivity for recipe in found] == ["learned", "prev", "random"]
    assert {recipe.training.momentum for recipe in found} == {0.5}


@pytest.mark.parametrize("base", ["../lower/two.toml:fixed", "two.toml:fixed"])
def test_a_base_in_a_file_is_looked_for_beside_the_file_that_names_it(file, base, monkeypatch, tmp_path):
    file(TWO, "lower/two.toml")
    mine = file(f'base = "{base}"\nseed = 3\n', "lower/mine.toml")
    monkeypatch.chdir(tmp_path)
    assert (load(mine).seed, load(mine).model.connectivity) == (3, "prev")
    assert load("lower/mine.toml") == load(mine)


def test_a_base_may_have_a_base_and_the_nearer_one_wins(file):
    file(f"seed = 1\nabout = 'first'\n{WHOLE}", "first.toml")
    file("base = 'first.toml'\nseed = 2\n[training]\nmomentum = 0.5\n", "second.toml")
    recipe = load(file("base = 'second.toml'\n[training]\nbatch_size = 8\n", "third.toml"))
    assert (recipe.augmentation.size, recipe.seed, recipe.name) == (8, 2, "third")
    assert (recipe.training.momentum, recipe.training.batch_size) == (0.5, 8)


@pytest.mark.parametrize("back", ["mine.toml", "./mine.toml", "../lower/mine.toml"])
def test_a_base_that_leads_back_is_refused(file, back, tmp_path):
    mine = file("base = 'other.toml'\n", "lower/mine.toml")
    file(f"base = '{back}'\n", "lower/other.toml")
    said = refused(mine)
    assert "its base leads back to itself: " in said
    assert f"{mine} -> {tmp_path / 'lower' / 'other.toml'} -> " in said


def test_a_recipe_may_not_be_its_own_base_but_another_variant_of_its_file_may(file):
    path = file("base = 'mine.toml'\n")
    assert refused(path) == f"{path}: its base leads back to itself: {path} -> {path}. Change one of the bases."
    file(TWO, "two.toml")
    assert load(file("base = 'two.toml:learned'\n[variant.a]\nseed = 4\n", "three.toml") + ":a").seed == 4


@pytest.mark.parametrize(("base", "said"), [("3", "base is 3; it must be the name"), ("'quick/digit'", "Did you mean")])
def test_a_base_that_cannot_be_is_refused(file, base, said):
    assert said in refused(file(f"base = {base}\n"))


def test_a_later_layer_changes_a_phase_by_its_name_or_replaces_all(file):
    file(WHOLE, "below.toml")
    changed = load(file("base = 'below.toml'\n[phase.learn]\nepochs = 7\n"))
    assert [(phase.name, phase.epochs, phase.lr) for phase in changed.phase] == [("learn", 7, 0.1), ("freeze", 2, 0.01)]
    replaced = load(file("base = 'below.toml'\n[[phase]]\nname = 'all'\nepochs = 1\nlr = 1\nmask_lr = 1\n"))
    assert [phase.name for phase in replaced.phase] == ["all"]
    path = file("base = 'below.toml'\n[phase.lern]\nepochs = 7\n")
    assert refused(path).startswith(f"{path}: the name of a phase is 'lern'; it must be one of learn, freeze.")
    path = file(f"{WHOLE}\n[variant.it.phase]\nlearn = 3\n")
    assert refused(f"{path}:it").startswith(f"{path}:it: phase.learn is 3; it must be a table")


def test_merging_leaves_both_layers_as_they_were():
    below, above = {"a": {"b": 1}, "phase": [{"name": "x", "n": 1}]}, {"a": {"c": 2}, "phase": {"x": {"n": 2}}}
    assert merged(below, above) == {"a": {"b": 1, "c": 2}, "phase": [{"name": "x", "n": 2}]}
    assert below == {"a": {"b": 1}, "phase": [{"name": "x", "n": 1}]}
    assert above == {"a": {"c": 2}, "phase": {"x": {"n": 2}}}


def test_what_was_loaded_once_is_not_changed_by_the_settings_of_another():
    before = load("quick/digits")
    assert load("quick/digits", ["phase.learn.epochs=1", "model.depth=8"]) != before
    assert load("quick/digits") == before


@pytest.mark.parametrize(
    ("setting", "found", "value"),
    [
        ("seed=5", lambda recipe: recipe.seed, 5),
        (" seed = 5 ", lambda recipe: recipe.seed, 5),
        ("training.weight_decay=1e-3", lambda recipe: recipe.training.weight_decay, 0.001),
        ("training.momentum=0", lambda recipe: recipe.training.momentum, 0.0),
        ("augmentation.flip=false", lambda recipe: recipe.augmentation.flip, False),
        ("augmentation.mean=[0.5]", lambda recipe: recipe.augmentation.mean, (0.5,)),
        ("augmentation.mean=[1]", lambda recipe: recipe.augmentation.mean, (1.0,)),
        ("model.connectivity=random", lambda recipe: recipe.model.connectivity, "random"),
        ('model.connectivity="prev"', lambda recipe: recipe.model.connectivity, "prev"),
        (f"model.connectivity={CHAIN}", lambda recipe: recipe.model.connectivity, CHAIN),
        ("model.mask_init=0.5", lambda recipe: recipe.model.mask_init, 0.5),
        ("phase.learn.epochs=2", lambda recipe: [phase.epochs for phase in recipe.phase][:2], [2, 30]),
        ("phase.finer.lr=1", lambda recipe: recipe.phase[-1].lr, 1.0),
        ("about=a = b, and more", lambda recipe: recipe.about, "a = b, and more"),
        ("about=", lambda recipe: recipe.about, ""),
        ("init_from=runs/one", lambda recipe: recipe.init_from, "runs/one"),
        ("init_from=2024-05-01", lambda recipe: recipe.init_from, "2024-05-01"),
        ("init_from=10:30:00", lambda recipe: recipe.init_from, "10:30:00"),
        ("training.norm_group=none", lambda recipe: recipe.training.norm_group, None),
        ("paper=none", lambda recipe: recipe.paper, None),
        ("name=mine", lambda recipe: recipe.name, "mine"),
        (
            "training={momentum = 0.8}",
            lambda recipe: (recipe.training.momentum, recipe.training.batch_size),
            (0.8, 128),
        ),
    ],
)
def test_a_setting_lies_over_the_recipe(setting, found, value):
    before, after = load(RECIPE), load(RECIPE, [setting])
    assert found(after) == value
    assert type(found(after)) is type(value)
    assert before != after


def test_settings_that_make_another_experiment_are_named_and_the_paper_is_not():
    changed = load(RECIPE, iter(["model.fan_in=4", "seed=1", "phase.learn.lr=0.2"]))
    assert changed.paper is None
    assert changed.about == f"{load(RECIPE).about}; changed: model.fan_in=4, phase.learn.lr=0.2"
    assert (changed.seed, changed.model.fan_in) == (1, 4)


def test_another_seed_or_name_is_the_same_experiment():
    before, after = load(RECIPE), load(RECIPE, [" seed = 3", "name=mine", "init_from=runs/one"])
    assert (after.paper, after.about, after.seed) == (before.paper, before.about, 3)


def test_the_last_of_two_settings_wins():
    assert load(RECIPE, ["seed=1", "seed=2"]).seed == 2


@pytest.mark.parametrize(
    ("setting", "said"),
    [
        ("model.fan=3", f"{RECIPE}: unknown field `model.fan`; did you mean `model.fan_in`?"),
        ("fan_in=3", f"{RECIPE}: unknown field `fan_in`; did you mean `model.fan_in`?"),
        ("batchsize=3", f"{RECIPE}: unknown field `batchsize`; did you mean `training.batch_size`?"),
        ("epochs=3", f"{RECIPE}: unknown field `epochs`; did you mean `phase.learn.epochs`?"),
        ("modle.fan_in=3", f"{RECIPE}: unknown field `modle`; did you mean `model`?"),
        ("freeze.epochs=3", f"{RECIPE}: unknown field `freeze`; did you mean `phase.freeze`?"),
        ("phase.learn.epoch=3", f"{RECIPE}: unknown field `phase.learn.epoch`; did you mean `phase.learn.epochs`?"),
        ("phase.lern.epochs=3", "--set phase.lern.epochs=3: the name of a phase is 'lern'; it must be one of learn, "),
        ("phase.learn=3", "--set phase.learn=3: phase.learn is 3; it must be a table. Set one of its fields instead."),
        ("phase=3", f"{RECIPE}: phase is 3; it must be a list."),
        ("model.fan_in.x=3", f"{RECIPE}: model.fan_in is {{'x': 3}}; it must be an integer."),
        ("model.fan_in=true", f"{RECIPE}: model.fan_in is True; it must be an integer."),
        ("model.fan_in=3.0", f"{RECIPE}: model.fan_in is 3.0; it must be an integer."),
        ("model.fan_in=three", f"{RECIPE}: model.fan_in is 'three'; it must be an integer."),
        ("model.depth=none", f"{RECIPE}: model.depth is missing; a resnet needs it."),
        ("about=5", f"{RECIPE}: about is 5; it must be a string."),
        ("model.fan_in", "--set model.fan_in is not a setting; write FIELD=VALUE, such as model.fan_in=4."),
        ("=3", "--set =3 is not a setting; write FIELD=VALUE"),
        ("model..fan_in=3", "--set model..fan_in=3 is not a setting; write FIELD=VALUE"),
        ("model.connectivity=[[0]]", f"{RECIPE}: model.connectivity has 1 rows; the stack has 18 modules."),
        ("base=quick/cifar10", f"{RECIPE}: unknown field `base`"),
    ],
)
def test_a_setting_that_cannot_be_is_refused(setting, said):
    assert refused(RECIPE, setting).startswith(said)


def test_set_field_changes_the_table_that_it_is_given():
    table = {"phase": [{"name": "learn", "epochs": 1}, {"name": "fine", "epochs": 2}]}
    set_field(table, "phase.fine.epochs=5")
    set_field(table, "model.depth=8")
    assert table == {
        "phase": [{"name": "learn", "epochs": 1}, {"name": "fine", "epochs": 5}],
        "model": {"depth": 8},
    }


def test_quick_recipes_are_named_first():
    folders = [name.split("/")[0] for name in names()]
    assert [folder for folder, _ in itertools.groupby(folders)] == ["quick", "discover", "strong", "paper"]


def test_what_may_be_none_can_be_set_to_none():
    name = "paper/cifar100-resnet38-learned"
    assert load(name).training.norm_group == 64
    assert load(name, ["training.norm_group=none"]).training.norm_group is None
    with pytest.raises(mc.ConfigError, match=r"training.batch_size is 'none'; it must be an integer"):
        load(name, ["training.batch_size=none"])


def test_text_that_a_terminal_would_obey_is_written_as_escapes():
    written = write(load("quick/digits", ['about="a\\u009b31m \\u202e \\U000e0001"']))
    assert all(character.isprintable() for character in written.replace("\n", ""))
    assert tomllib.loads(written)["about"].startswith("a\x9b31m \u202e \U000e0001")


@pytest.mark.timeout(20)
@pytest.mark.parametrize(
    "text",
    [
        *("a = " + "[" * 5000, "a = " + "[" * 200 + "]" * 200, ".".join("a" * 50_000) + " = 1"),
        *("[" + ".".join("a" * 50_000) + "]", "model." + ".".join("a" * 150) + " = 1", "model = " + "{a=" * 150),
    ],
    ids=lambda text: text[:12],
)
def test_a_recipe_that_is_nested_deeply_is_one_sentence_and_no_hang(file, text):
    assert "is not valid TOML: " in refused(file(text))


@pytest.mark.timeout(20)
@pytest.mark.parametrize("setting", [".".join("a" * 5000), f"model.connectivity={'[' * 200}{']' * 200}"])
def test_a_setting_that_is_nested_deeply_is_one_sentence(setting):
    assert len(refused("quick/digits", f"model.connectivity.{setting}=1")) < 400
    assert len(refused("quick/digits", setting)) < 400


@pytest.mark.parametrize("field", ["name", "about", "init_from", "phase.learn.name", "data.name", "model.connectivity"])
def test_a_setting_that_is_not_text_is_one_sentence(field):
    assert "\\udcff" in refused("quick/digits", f"{field}=a\udcff")


def test_a_recipe_that_is_a_pipe_is_an_error_and_no_hang(tmp_path):
    os.mkfifo(tmp_path / "pipe.toml")
    assert "cannot be read: it is a pipe" in refused(str(tmp_path / "pipe.toml"))


def test_a_run_folder_that_is_passed_as_a_recipe_names_the_command(tmp_path):
    (tmp_path / "recipe.toml").write_text("")
    with pytest.raises(mc.ConfigError, match=r"is a run folder; to resume it, train .*/recipe\.toml with --out"):
        load(str(tmp_path))
