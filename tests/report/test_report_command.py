"""`maskconnect report`: what a person types, and what comes of it."""

import shutil

import pytest

from maskconnect.report.runs import read_run
from maskconnect.report.write import write_figures


def test_one_run_goes_beside_its_files(folder, type_in, tmp_path):
    place = tmp_path / "run"
    shutil.copytree(folder / "learned", place)
    code, said, _ = type_in("report", place, "--no-figures")
    assert code == 0
    assert said.startswith(str(place / "report/index.html"))
    assert (place / "report/index.html").exists()
    assert not (place / "report/figures").exists()


@pytest.mark.parametrize("found", [True, False, None])
def test_a_page_is_opened_where_there_is_a_browser(folder, type_in, tmp_path, monkeypatch, found):
    import webbrowser

    opened = []

    def open_(address):
        opened.append(address)
        if found is None:
            raise webbrowser.Error("could not locate runnable browser")
        return found

    monkeypatch.setattr(webbrowser, "open", open_)
    code, said, errors = type_in("report", folder / "prev", "--no-figures", "--out", "page", "--open")
    assert code == 0
    assert said.startswith("page/index.html")
    assert opened == [(tmp_path / "page/index.html").as_uri()]
    sentence = "there is no browser on this machine; open page/index.html in one."
    assert (sentence in errors.splitlines()) == (not found)


def test_several_runs_go_to_a_folder_called_report(folder, type_in, tmp_path):
    code, said, _ = type_in("report", folder / "learned", folder / "prev", "--no-figures")
    assert code == 0
    assert said.startswith("report/index.html")
    assert "2 runs" in said


def test_a_report_is_replaced_and_its_old_figures_go(folder, type_in, tmp_path):
    out = tmp_path / "out"
    assert type_in("report", folder / "learned", folder / "prev", "--out", out)[0] == 0
    assert (out / "figures/wiring-prev.svg").exists()
    for name in ("notes.txt", "mine.png"):
        (out / "figures" / name).write_text("mine")
    assert type_in("report", folder / "learned", "--out", out)[0] == 0
    assert not (out / "figures/wiring-prev.svg").exists()
    assert (out / "figures/wiring.svg").exists()
    for name in ("notes.txt", "mine.png"):
        assert (out / "figures" / name).read_text() == "mine"
    assert type_in("report", folder / "prev", "--out", out, "--no-figures")[0] == 0
    assert sorted(path.name for path in (out / "figures").iterdir()) == ["mine.png", "notes.txt"]


def test_a_report_that_is_stopped_leaves_the_older_figures(folder, type_in, tmp_path):
    out = tmp_path / "out"
    assert type_in("report", folder / "learned", "--out", out)[0] == 0
    before = {path: path.read_bytes() for path in (out / "figures").iterdir()}

    def stop(what):
        if what == "drawing curves":
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_figures([read_run(folder / "resnext")], out, stop)
    assert {path: path.read_bytes() for path in (out / "figures").iterdir()} == before
    assert sorted(path.name for path in out.iterdir()) == ["figures", "index.html"]


def test_runs_may_have_any_names(folder, type_in, tmp_path):
    names = ["run", "x" * 240, "run\udcff", "$\\frac$ <b>"]
    for name in names:
        shutil.copytree(folder / "prev", tmp_path / "runs" / name)
    shutil.copytree(folder / "prev", tmp_path / "other/run")
    code, _, errors = type_in("report", "runs", "other/run", "--out", "out")
    assert code == 0, errors
    drawn = list((tmp_path / "out/figures").glob("wiring*.svg"))
    assert len(drawn) == 5
    page = (tmp_path / "out/index.html").read_text()
    assert "seed 0 — runs/run<" in page
    assert "seed 0 — other/run<" in page


def test_a_place_that_cannot_be_written_is_said_before_the_work(folder, type_in, tmp_path):
    (tmp_path / "file").write_text("x")
    code, said, errors = type_in("report", folder / "learned", "--out", tmp_path / "file/report")
    assert (code, said, errors.count("\n")) == (2, "", 1)
    assert "cannot be written" in errors


def test_the_same_runs_give_the_same_page(folder, type_in, tmp_path):
    for name in ("a", "b"):
        assert type_in("report", folder, "--out", name, "--no-figures")[0] == 0
    assert (tmp_path / "a/index.html").read_bytes() == (tmp_path / "b/index.html").read_bytes()


def test_a_page_that_was_killed_as_it_was_written_does_not_block_its_folder(folder, type_in, tmp_path):
    (tmp_path / "page").mkdir()
    (tmp_path / "page/.writing-0123456789abcdef").write_text("<!doc")
    assert type_in("report", folder / "learned", "--no-figures", "--out", "page")[0] == 0
    (tmp_path / "other").mkdir()
    (tmp_path / "other/.writing-notes").write_text("mine")
    assert type_in("report", folder / "learned", "--no-figures", "--out", "other")[0] == 2


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
        (["nowhere"], "nowhere does not exist; pass a run folder"),
        (["."], ". holds no run: neither it nor a folder in it has a recipe.toml or recording.json"),
        ([], "missing: RUN"),
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
