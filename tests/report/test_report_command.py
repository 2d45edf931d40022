"""`maskconnect report`: what a person types, and what comes of it."""

import shutil

import pytest


def test_one_run_goes_beside_its_files(folder, type_in, tmp_path):
    place = tmp_path / "run"
    shutil.copytree(folder / "learned", place)
    code, said, _ = type_in("report", place, "--no-figures")
    assert code == 0
    assert said.startswith(str(place / "report/index.html"))
    assert (place / "report/index.html").exists()
    assert not (place / "report/figures").exists()


def test_several_runs_go_to_a_folder_called_report(folder, type_in, tmp_path):
    code, said, _ = type_in("report", folder / "learned", folder / "prev", "--no-figures")
    assert code == 0
    assert said.startswith("report/index.html")
    assert "2 runs" in said


def test_a_report_is_replaced_and_its_old_figures_go(folder, type_in, tmp_path):
    out = tmp_path / "out"
    assert type_in("report", folder / "learned", folder / "prev", "--out", out)[0] == 0
    assert (out / "figures/wiring-prev.svg").exists()
    (out / "figures/notes.txt").write_text("mine")
    assert type_in("report", folder / "learned", "--out", out)[0] == 0
    assert not (out / "figures/wiring-prev.svg").exists()
    assert (out / "figures/wiring.svg").exists()
    assert (out / "figures/notes.txt").read_text() == "mine"


def test_the_same_runs_give_the_same_page(folder, type_in, tmp_path):
    for name in ("a", "b"):
        assert type_in("report", folder, "--out", name, "--no-figures")[0] == 0
    assert (tmp_path / "a/index.html").read_bytes() == (tmp_path / "b/index.html").read_bytes()


def test_nothing_else_is_overwritten(folder, type_in, tmp_path):
    (tmp_path / "site").mkdir()
    (tmp_path / "site/index.html").write_text("<h1>my homepage</h1>")
    (tmp_path / "full").mkdir()
    (tmp_path / "full/thesis.tex").write_text("x")
    (tmp_path / "file").write_text("x")
    for out, words in (
        ("site", "is not a report of maskconnect"),
        ("full", "is not empty and holds no report"),
        ("file", "is a file"),
        (folder / "prev", "is the folder of a run"),
    ):
        code, said, errors = type_in("report", folder / "learned", "--out", out)
        assert (code, said, errors.count("\n")) == (2, "", 1)
        assert words in errors
        assert "--out" in errors
    assert (tmp_path / "site/index.html").read_text() == "<h1>my homepage</h1>"


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["nowhere"], "nowhere does not exist; name a run folder"),
        (["."], ". is no run folder, and there is none in it"),
        ([], "the following arguments are required: RUN"),
        (["a", "--outt", "b"], "did you mean --out?"),
    ],
)
def test_a_mistake_is_one_sentence(type_in, words, sentence):
    code, said, errors = type_in("report", *words)
    assert (code, said, errors.count("\n")) == (2, "", 1)
    assert sentence in errors


def test_help_has_examples(type_in):
    code, said, _ = type_in("report", "--help")
    assert code == 0
    assert "maskconnect report runs/quick-digits-seed0" in said
