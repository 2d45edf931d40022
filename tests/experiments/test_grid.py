"""Which runs a sweep is made of."""

import pytest

import maskconnect as mc
from maskconnect.experiments.grid import Grid, field_and_values, seeds_of, values_of
from maskconnect.recipes import load
from maskconnect.recipes.naming import wiring_name


def test_every_combination_of_values_and_seeds_is_a_cell():
    grid = Grid(
        recipe="quick/digits",
        settings=("phase.learn.epochs=2",),
        over=(("model.fan_in", ("1", "3")), ("phase.learn.mask_lr", ("0.1",))),
        seeds=(0, 5),
    )
    cells = grid.cells()
    assert [cell.name for cell in cells] == [
        "fan_in=1_mask_lr=0.1_seed=0",
        "fan_in=1_mask_lr=0.1_seed=5",
        "fan_in=3_mask_lr=0.1_seed=0",
        "fan_in=3_mask_lr=0.1_seed=5",
    ]
    settings = ["phase.learn.epochs=2", "model.fan_in=3", "phase.learn.mask_lr=0.1"]
    assert list(cells[3].settings) == settings
    assert cells[3].recipe.seed == 5
    assert cells[2].recipe == load("quick/digits", settings)


def test_fields_that_end_alike_keep_their_whole_names():
    over = (("phase.learn.lr", ("0.1",)), ("phase.fine.lr", ("0.01",)))
    assert Grid(recipe="quick/digits", over=over).cells()[0].name == "phase.learn.lr=0.1_phase.fine.lr=0.01_seed=0"


def test_long_names_are_cut_and_stay_apart():
    cells = Grid(recipe="quick/digits", over=(("name", ("x" * 300, "x" * 301)),)).cells()
    assert all(len(cell.name) < 120 for cell in cells)
    assert cells[0].name != cells[1].name


def test_names_of_cells_are_names_of_folders():
    cell = Grid(recipe="quick/digits", over=(("about", ("a/b ../c",)),)).cells()[0]
    assert cell.name == "about=a-b-..-c_seed=0"


@pytest.mark.parametrize(
    ("text", "values"),
    [
        ("1..4", ("1", "2", "3", "4")),
        ("0.1,0.3", ("0.1", "0.3")),
        ("1, 5..7", ("1", "5", "6", "7")),
        ("prev", ("prev",)),
        ('[[],[0]],"a, b"', ("[[],[0]]", '"a, b"')),
    ],
)
def test_values_as_people_write_them(text, values):
    assert values_of(text, "--over") == values
    assert field_and_values(f"model.x={text}") == ("model.x", values)


@pytest.mark.parametrize(("text", "seeds"), [("3", (0, 1, 2)), ("2..4", (2, 3, 4)), ("7,0", (7, 0)), ("0,00", (0,))])
def test_seeds_are_how_many_or_which(text, seeds):
    assert seeds_of(text) == seeds


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (lambda: values_of("4..1", "--fan-in"), "4..1 is not a range"),
        (lambda: values_of("1..999999999", "--fan-in"), "has more than 100,000 values"),
        (lambda: values_of("", "--fan-in"), "must be values such as"),
        (lambda: values_of("1,1", "--fan-in"), "each once"),
        (lambda: seeds_of("0"), "must be from 1 to 100,000"),
        (lambda: seeds_of("-1"), "must be a number of seeds"),
        (lambda: seeds_of("1.5,2"), "integers"),
        (lambda: field_and_values("model.fan_in"), "it must be FIELD=VALUES"),
        (lambda: Grid(recipe="quick/digits", over=(("model.fan_in", ("0",)),)).cells(), "fan_in is 0"),
        (lambda: Grid(recipe="quick/digits", over=(("model.fanin", ("1",)),)).cells(), "did you mean `model.fan_in`?"),
        (lambda: Grid(recipe="quick/digits", over=(("model.fan_in", ("2-3",)),)).cells(), "or a range such as 2..3"),
        (lambda: Grid(recipe="quick/digitz").cells(), "Did you mean 'quick/digits'"),
        (lambda: Grid(recipe="quick/digits", over=(("about", ("1",)),) * 2).cells(), "name each field once"),
        (lambda: Grid(recipe="quick/digits", over=(("seed", ("1", "2")),)).cells(), "use --seeds instead"),
        (lambda: Grid(recipe="quick/digits", settings=("seed=3",)).cells(), "use --seeds instead"),
        (lambda: Grid(recipe="quick/digits", over=(("phase.learn.lr", ("0.1", "1e-1")),)).cells(), "runs are equal"),
        (lambda: Grid(recipe="quick/digits", over=(("about", ("a/b", "a-b")),)).cells(), "the same folder"),
        (lambda: Grid(recipe="quick/digits", over=(("phase.lern.lr", ("1",)),)).cells(), "--over phase.lern.lr=1"),
        (lambda: Grid(recipe="quick/digits", seeds=tuple(range(100_001))).cells(), "the limit is 100,000"),
    ],
)
def test_a_mistake_is_one_sentence(make, sentence):
    with pytest.raises(mc.ConfigError, match=sentence):
        make()


@pytest.mark.parametrize(
    ("values", "sentence"),
    [
        ("1..99", "fan_in 9 to 99 exceed the 8 candidates of the largest target; use 1..8."),
        ("8,9", "fan_in 9 exceeds the 8 candidates of the largest target; use 1..8."),
    ],
)
def test_a_sweep_over_fan_ins_that_no_block_can_have_is_an_error(values, sentence):
    with pytest.raises(mc.ConfigError) as told:
        Grid(recipe="quick/digits", over=(("model.fan_in", values_of(values, "--fan-in")),)).cells()
    assert str(told.value) == sentence


def test_a_fan_in_that_only_the_larger_of_two_networks_can_have_is_swept_with_a_warning():
    over = (("model.depth", ("20", "26")), ("model.fan_in", ("8", "11")))
    with pytest.warns(UserWarning, match="model.fan_in is 11, but no module has more than 8 candidates"):
        cells = Grid(recipe="quick/digits", over=over).cells()
    assert len(cells) == 4
    fixed = Grid(recipe="quick/digits", settings=("model.connectivity=full",), over=(("model.fan_in", ("8", "9")),))
    assert len(fixed.cells()) == 2


def test_a_fan_in_that_no_block_can_have_is_reported_and_named_by_what_it_is():
    with pytest.warns(UserWarning, match="model.fan_in is 9, but no module has more than 8 candidates: K is 8"):
        (cell,) = Grid(recipe="quick/digits", over=(("model.fan_in", ("9",)),)).cells()
    assert wiring_name(cell.recipe.model) == "Learned, K=8"
