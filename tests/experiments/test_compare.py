"""`maskconnect compare`: pairs of seeds, intervals, verdicts."""

import json
import re
import shutil

import pytest
import runs

from maskconnect.experiments.compare import sides_of
from maskconnect.report.differences import BETTER, WORSE, Row
from maskconnect.report.figures import INK
from maskconnect.training.statistics import paired_difference


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Three seeds of Fixed-Prev and of learned wiring; accuracies are set by hand."""
    place = tmp_path_factory.mktemp("compare")
    short = ("phase.learn.epochs=1", "phase.freeze.epochs=1")
    runs.run(runs.tiny(place, *short, "model.connectivity=prev"), place / "prev/0")
    runs.run(runs.tiny(place, *short), place / "learned/0")
    for kind, accuracies in {"prev": (70.0, 71.0, 70.4), "learned": (72.0, 73.1, 72.3)}.items():
        for seed, accuracy in enumerate(accuracies):
            run = place / kind / str(seed)
            if seed:
                shutil.copytree(place / kind / "0", run)
            text = (run / "recipe.toml").read_text()
            (run / "recipe.toml").write_text(text.replace("seed = 0", f"seed = {seed}"))
            summary = json.loads((run / "summary.json").read_text())
            summary["test"]["top1"] = accuracy
            (run / "summary.json").write_text(json.dumps(summary))
    return place


def test_runs_are_compared_seed_by_seed(folder, type_in):
    code, said, _ = type_in("compare", folder / "prev", folder / "learned")
    assert code == 0
    baseline, learned = said.splitlines()[1:3]
    assert baseline.split() == ["Fixed-Prev,", "K=1", "3", "70.47", "±", "0.50", "the", "baseline"]
    expected = paired_difference((72.0, 73.1, 72.3), (70.0, 71.0, 70.4))
    low, high = expected.interval
    assert learned.split()[:2] == ["Learned,", "K=2"]
    assert f"{expected.mean:+.2f}" in learned
    assert f"{low:+.2f} to {high:+.2f}" in learned
    assert learned.endswith("better, at n=3")


def test_what_pruning_leaves_is_shown_on_request(folder, tmp_path, type_in):
    shutil.copytree(folder, tmp_path / "here")
    for seed, left in enumerate((900, 1000, 1400)):
        place = tmp_path / f"here/learned/{seed}/summary.json"
        summary = json.loads(place.read_text())
        summary["parameters"]["pruned"] = left
        place.write_text(json.dumps(summary))
    words = ("compare", tmp_path / "here/prev", tmp_path / "here/learned")
    code, said, _ = type_in(*words, "--parameters", "--see", "0.5")
    assert code == 0
    before = json.loads((tmp_path / "here/prev/0/summary.json").read_text())["parameters"]["pruned"]
    fewer = paired_difference((900, 1000, 1400), [before] * 3)
    head, _, learned, *_ = (re.split(r" {2,}", line) for line in said.splitlines())
    assert head[-2:] == ["parameters after pruning", "difference of parameters"]
    assert learned[-2:] == ["1,100 ± 265", fewer.text(digits=0)]
    assert "1,100" not in type_in(*words)[1]
    assert json.loads(type_in(*words, "--json")[1])["others"][0]["parameters"] == {"0": 900, "1": 1000, "2": 1400}
    del summary["parameters"]
    place.write_text(json.dumps(summary))
    code, _, errors = type_in(*words)
    assert code == 2
    assert "summary.json is damaged: it has no parameters" in errors


def test_only_seeds_that_both_have_are_pairs(folder, type_in):
    code, said, _ = type_in("compare", folder / "prev/0", folder / "prev/1", folder / "learned", "--json")
    assert code == 0
    found = json.loads(said)
    assert found["baseline"]["accuracy"] == {"0": 70.0, "1": 71.0}
    (other,) = found["others"]
    assert other["pairs"] == 2
    assert other["difference"] == pytest.approx(2.05)
    code, said, _ = type_in("compare", folder / "prev/0", folder / "learned/1")
    assert "no pair" in said


def test_some_seeds_alone_are_compared(folder, type_in):
    words = ("compare", folder / "prev", folder / "learned", "--json", "--seeds")
    (other,) = json.loads(type_in(*words, "1..2")[1])["others"]
    assert other["accuracy"] == {"1": 73.1, "2": 72.3}
    assert other["difference"] == pytest.approx(2.0)
    code, _, errors = type_in(*words, "7,8")
    assert code == 2
    assert "no run of these seeds has finished; name runs of two recipes or more." in errors
    code, _, errors = type_in(*words, "one")
    assert code == 2
    assert "--seeds is 'one'" in errors


@pytest.mark.parametrize("see", ["0", "-1", "1e-300", "nan", "inf"])
def test_a_difference_that_nobody_can_see_is_one_sentence(folder, type_in, see):
    code, _, errors = type_in("compare", folder / "prev", folder / "learned", f"--see={see}")
    assert code == 2
    assert errors == f"error: --see is {float(see)}; it must be at least 1e-06 points. Pass a difference such as 0.5.\n"


def test_rows_have_the_names_they_are_given(folder, type_in):
    words = ("compare", folder / "prev", folder / "learned", "--names")
    assert [line.split()[0] for line in type_in(*words, "chain", "ours")[1].splitlines()[1:3]] == ["chain", "ours"]
    code, _, errors = type_in(*words, "chain")
    assert code == 2
    assert "--names has 1, but there are 2 rows; pass one name per row: Fixed-Prev, K=1; Learned, K=2." in errors


def test_several_baselines_have_a_column_each(folder, type_in):
    words = ("compare", folder / "prev", folder / "learned", "--baseline", folder / "prev/0")
    both = (*words, "--baseline", folder / "learned/0")
    code, said, _ = type_in(*both, "--names", "chain", "ours", "--markdown")
    assert code == 0
    prev, learned = (70.0, 71.0, 70.4), (72.0, 73.1, 72.3)
    assert [line.split("|")[1:-1] for line in said.replace(" | ", "|").splitlines()[:4]] == [
        [" ", "seeds", "test accuracy, %", "over chain", "over ours "],
        [" ---", "---", "---", "---", "--- "],
        [" chain", "3", "70.47 ± 0.50", "", f"{paired_difference(prev, learned).text()} "],
        [" ours", "3", "72.47 ± 0.57", paired_difference(learned, prev).text(), " "],
    ]
    code, _, errors = type_in(*words, "--baseline", folder / "prev/1")
    assert code == 2
    assert "all runs are of one recipe (Fixed-Prev, K=1); name runs of two recipes or more." in errors
    code, _, errors = type_in(*both, "--see", "0.5")
    assert code == 2
    assert "--json, --figure and --see work with one --baseline only; leave the others out." in errors


def test_given_wirings_are_one_side_if_their_folders_differ_in_the_seed(folder, tmp_path):
    """Each seed has learned its own wiring, and each is trained again."""
    for seed, wiring in enumerate(
        ("[[], [0], [0, 1], [1, 2], [2, 3], [3, 4]]", "[[], [0], [0, 1], [0, 2], [1, 3], [3, 4]]")
    ):
        place = tmp_path / f"again_seed={seed}"
        shutil.copytree(folder / f"learned/{seed}", place)
        text = (place / "recipe.toml").read_text()
        (place / "recipe.toml").write_text(text.replace('connectivity = "learned"', f"connectivity = {wiring}"))
    again = sides_of([folder / "learned", tmp_path])[1]
    assert (again.label, again.accuracy) == ("Given wiring (again)", {0: 72.0, 1: 73.1})


def test_the_first_recipe_is_the_baseline(folder):
    assert [side.label for side in sides_of([folder / "learned", folder / "prev"])] == [
        "Learned, K=2",
        "Fixed-Prev, K=1",
    ]


def test_a_baseline_can_be_named_and_unfinished_runs_in_folders_are_left_out(folder, type_in, tmp_path):
    shutil.copytree(folder, tmp_path / "all")
    (tmp_path / "all/learned/2/summary.json").unlink()
    words = ["compare", "all/learned", "all/prev", "--baseline", "all/prev/1", "--json"]
    code, said, _ = type_in(*words)
    assert code == 0
    found = json.loads(said)
    assert found["baseline"]["label"] == "Fixed-Prev, K=1"
    assert found["others"][0]["pairs"] == 2


def test_runs_in_a_folder_of_sweeps_are_compared(folder, type_in, tmp_path):
    _, expected, _ = type_in("compare", folder / "learned", folder / "prev", "--json")
    shutil.copytree(folder, tmp_path / "all/sweeps")
    code, said, _ = type_in("compare", "all", "--json")
    assert code == 0
    assert json.loads(said) == json.loads(expected)


def test_mistakes_are_one_sentence(folder, type_in, tmp_path):
    other = tmp_path / "other"
    shutil.copytree(folder / "learned/0", other)
    data = json.loads((other / "data.json").read_text())
    data["test"]["sha256"] = "0" * 64
    (other / "data.json").write_text(json.dumps(data))
    unfinished = tmp_path / "unfinished"
    shutil.copytree(folder / "learned/1", unfinished)
    (unfinished / "summary.json").unlink()
    again = tmp_path / "again"
    shutil.copytree(folder / "learned/1", again)
    for words, sentence in (
        ([folder / "prev"], "all runs are of one recipe (Fixed-Prev, K=1); name runs of two"),
        ([folder / "prev", other], "were tested on different images"),
        ([folder / "prev", unfinished], "has not finished"),
        ([folder / "learned", again], "is a second run of seed 1 of the same recipe"),
        ([tmp_path / "nowhere"], "does not exist"),
    ):
        code, said, errors = type_in("compare", *words)
        assert (code, said, errors.count("\n")) == (2, "", 1)
        assert sentence in errors


@pytest.mark.parametrize("given", ["drawn/differences", "drawn/differences.svg"])
def test_differences_are_drawn(folder, type_in, tmp_path, given):
    code, said, _ = type_in("compare", folder / "prev", folder / "learned", "--figure", tmp_path / given)
    assert code == 0
    assert "better, at n=3" in said
    assert sorted(path.name for path in (tmp_path / "drawn").iterdir()) == ["differences.png", "differences.svg"]
    text = (tmp_path / "drawn/differences.svg").read_text()
    assert "Learned, K=2  (n=3)" in text
    assert "Points of test accuracy over Fixed-Prev, K=1" in text


def test_a_row_has_the_color_of_its_verdict():
    def color(*pairs):
        return Row("", paired_difference(pairs, [0.0] * len(pairs))).color

    assert color(1.0, 1.1, 1.2) == BETTER
    assert color(-1.0, -1.1, -1.2) == WORSE
    assert color(-1.0, 1.0, 0.3) == color(1.0) == INK


def test_rows_of_another_fan_in_say_what_else_is_set_in_them(folder, tmp_path):
    """Else `K=1` at another rate would look as if K were all."""
    place = tmp_path / "other"
    shutil.copytree(folder / "learned/0", place)
    text = (place / "recipe.toml").read_text()
    assert "fan_in = 2" in text
    text = text.replace("fan_in = 2", "fan_in = 1").replace("mask_lr = 0.3", "mask_lr = 3.0")
    (place / "recipe.toml").write_text(text)
    labels = [side.label for side in sides_of([folder / "learned", place])]
    assert labels == ["Learned, K=2 (phase.learn.mask_lr=0.3)", "Learned, K=1 (phase.learn.mask_lr=3.0)"]
