"""What errors repeat of what they were given, and what of it reaches a terminal."""

import pytest

import maskconnect as mc
from maskconnect.errors import integer, printable, shown, unknown_name
from maskconnect.recipes import load


def nested(depth):
    found = []
    for _ in range(depth):
        found = [found]
    return found


def test_a_short_value_is_shown_as_python_writes_it():
    assert shown("a\n'b") == repr("a\n'b")
    assert shown([1, None]) == "[1, None]"


@pytest.mark.parametrize("found", ["x" * 10_000, list(range(10_000)), 10**4000, 10**5000, nested(100_000)], ids=type)
def test_a_long_value_is_cut_where_it_is_shown(found):
    assert len(shown(found)) < 120
    with pytest.raises(mc.ConfigError) as error:
        raise unknown_name("a name", found, ("one", "two"))
    assert len(str(error.value)) < 250


def test_an_integer_that_is_none_is_cut():
    with pytest.raises(mc.ConfigError, match=r"^size is 'xxx.* \(10,002 characters\); it must be an integer\.$"):
        integer("size", "x" * 10_000)


def test_text_that_a_terminal_would_obey_is_printed_as_escapes():
    assert printable("a\x1b[2Jb\nc\x9bd\u202ee\udcff") == "a\\x1b[2Jb\\nc\\x9bd\\u202ee\\udcff"
    assert printable("naïve 猫 \\ ok") == "naïve 猫 \\ ok"


LONG = "x" * 20_000
NUMBERS = "[" + "1, " * 20_000 + "]"


@pytest.mark.parametrize(
    "setting",
    [
        *(f"model.depth={LONG}", f"model.{LONG}=1", f"{LONG}=1", f"model.connectivity={LONG}", f"phase.{LONG}.lr=1"),
        *(f"phase.learn={LONG}", f"model={LONG}", f"augmentation.mean={LONG}", f"augmentation.area={NUMBERS}"),
        *(f"model.connectivity={NUMBERS}", f"model.norm={LONG}", f"data.name={LONG}", f"model.mask_init={LONG}"),
        *(f"augmentation.std={NUMBERS.replace('1', '0')}", "model.depth=-1" + "0" * 4000, f"learning.way={LONG}", LONG),
        *("training.momentum=1" + "0" * 300, f"augmentation.shorter=[1, 1{'0' * 4000}]", f"phase.learn.{LONG}=1"),
    ],
    ids=lambda setting: setting[:24],
)
def test_a_setting_of_thousands_of_characters_is_not_repeated(setting):
    with pytest.raises(mc.ConfigError) as error:
        load("quick/digits", [setting])
    assert len(str(error.value)) < 700


@pytest.mark.parametrize("words", [("train", LONG), ("data", "check", LONG), ("prune", "x", "--batches", LONG)])
def test_an_argument_of_thousands_of_characters_is_not_repeated(type_in, words):
    code, _, errors = type_in(*words)
    assert code == 2
    assert len(errors) < 700
