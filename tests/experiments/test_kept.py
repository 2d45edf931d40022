"""Results that are kept as small files: counted as done, compared, and never mistaken for another run's."""

import json
import shutil
from dataclasses import replace

import pytest
import runs

from maskconnect.errors import MaskConnectError
from maskconnect.experiments.kept import Kept, find_results, of_file
from maskconnect.training.folder import RunFolder

SHORT = [f"--set=phase.{name}.epochs=1" for name in ("learn", "freeze", "fine", "finer")]
VALIDATION = "--set=data.validation=100"


def test_a_kept_result_counts_as_done_when_the_run_is_gone(recipe, type_in, tmp_path):
    words = ["sweep", recipe, *SHORT, VALIDATION, "--fan-in", "1,2", "--out", "grid", "--keep", "kept"]
    code, said, errors = type_in(*words)
    assert (code, errors) == (0, "")
    files = sorted(path.name for path in (tmp_path / "kept").iterdir())
    assert len(files) == 2
    table = said[said.index("model.fan_in") :]
    shutil.rmtree(tmp_path / "grid")
    code, said, errors = type_in(*words)
    assert (code, errors) == (0, "")
    assert "2 already finished" in said
    assert said[said.index("model.fan_in") :] == table
    assert not list((tmp_path / "grid").glob("fan_in*")), "nothing was run"
    code, said, _ = type_in("compare", "kept", "--on", "validation", "--json")
    assert code == 0
    kept = [json.loads(path.read_text()) for path in sorted((tmp_path / "kept").iterdir())]
    accuracies = [result["summary"]["validation"]["top1"] for result in kept]
    found = json.loads(said)
    assert [found["baseline"]["accuracy"]["0"], found["others"][0]["accuracy"]["0"]] == accuracies
    assert sorted(result["summary"]["fan_in"] for result in kept) == [1, 2]


def test_only_the_very_same_run_is_done(tmp_path):
    recipe = runs.tiny(tmp_path, *(f"phase.{name}.epochs=1" for name in ("learn", "freeze", "fine", "finer")))
    runs.run(recipe, tmp_path / "run")
    kept = Kept(tmp_path / "kept")
    place = kept.keep(RunFolder(tmp_path / "run"))
    again = Kept(tmp_path / "kept")
    assert again.get(replace(recipe, name="other", about="whatever it is called")).place == place
    assert again.get(replace(recipe, seed=1)) is None
    assert again.get(replace(recipe, training=replace(recipe.training, momentum=0.5))) is None
    result = of_file(place)
    assert result.summary == RunFolder(tmp_path / "run").summary()
    assert result.wiring == RunFolder(tmp_path / "run").wiring()
    assert place.stat().st_size < 5000


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("{", "cannot be read"),
        ("{}", "is not a result file"),
        ('{"format": 3}', "is not a result file"),
        ('{"format": 1}', "tools/new_format.py of the repository converts it"),
        ('{"format": 2, "recipe": {}, "summary": {}, "starts": []}', "is damaged"),
    ],
)
def test_a_file_that_is_none_is_named(recipe, type_in, tmp_path, content, said):
    (tmp_path / "kept").mkdir()
    (tmp_path / "kept/one.json").write_text(content)
    for words in (["compare", "kept/one.json"], ["sweep", recipe, "--keep", "kept"]):
        code, _, errors = type_in(*words)
        assert code == 2
        assert "one.json" in errors
        assert said in errors
    assert not (tmp_path / "runs").exists()


def test_a_run_without_validation_images_is_not_compared_on_them(recipe, type_in, tmp_path):
    runs.run(runs.tiny(tmp_path, *(word.removeprefix("--set=") for word in SHORT)), tmp_path / "run")
    code, _, errors = type_in("compare", "run", "--on", "validation")
    assert code == 2
    assert "run has no validation images; use runs whose recipe sets data.validation" in errors
    code, _, errors = type_in("compare", "run", "--on", "train")
    assert code == 2
    assert "--on is 'train'" in errors
    assert [result.place.name for result in find_results([tmp_path / "run"])] == ["run"]


@pytest.fixture(scope="module")
def result(tmp_path_factory):
    """A kept result."""
    folder = tmp_path_factory.mktemp("kept")
    recipe = runs.tiny(folder, *(f"phase.{name}.epochs=1" for name in ("learn", "freeze", "fine", "finer")))
    runs.run(recipe, folder / "run")
    return Kept(folder / "kept").keep(RunFolder(folder / "run"))


@pytest.fixture
def kept_file(result, tmp_path):
    """A copy of it, for whoever damages it."""
    return shutil.copy(result, tmp_path / "result.json")


NUMBERS = ("Infinity", "-Infinity", "NaN", "1e999", "1" + "0" * 400, "true", "101", "-1", '"70"')


@pytest.mark.parametrize("number", NUMBERS, ids=lambda number: number[:12])
def test_a_kept_accuracy_that_is_not_a_share_is_an_error(kept_file, number):
    text = kept_file.read_text()
    top1 = json.loads(text)["summary"]["test"]["top1"]
    kept_file.write_text(text.replace(f'"top1": {top1}', f'"top1": {number}'))
    with pytest.raises(MaskConnectError):
        of_file(kept_file)


WRONG = {"summary": [None, [], {}, 3], "recipe": [None, [], "x"], "starts": [None, {}, [3]], "images": [None, 3, []]}
WRONG["wiring"] = [None, {}, 3, [3], [[["x"]]]]


@pytest.mark.parametrize(("key", "value"), [(key, value) for key, values in WRONG.items() for value in values])
def test_a_kept_part_of_another_type_is_an_error(kept_file, key, value):
    kept_file.write_text(json.dumps(json.loads(kept_file.read_text()) | {key: value}))
    with pytest.raises(MaskConnectError, match="is damaged"):
        of_file(kept_file)


@pytest.mark.timeout(20)
@pytest.mark.parametrize("text", ["[" * 100_000, "[" * 400 + "]" * 400, "[]", "3", "{"])
def test_a_kept_file_that_is_nested_deeply_or_of_another_type_is_one_sentence(tmp_path, type_in, text):
    (tmp_path / "a.json").write_text(text)
    code, _, errors = type_in("compare", "a.json", "a.json")
    assert (code, len(errors.splitlines())) == (2, 1)


def test_a_saved_network_is_named_as_such(tmp_path):
    (tmp_path / "maskconnect.json").write_text('{"format": 1}')
    with pytest.raises(MaskConnectError, match="is a saved network; name a run folder or a result file"):
        of_file(tmp_path / "maskconnect.json")
