"""`maskconnect reproduce`: the paper's tables and figures, with our numbers beside its own."""

import json
import shutil
from dataclasses import replace

import pytest
import runs

from maskconnect.bench import steps
from maskconnect.cli import untrained
from maskconnect.core.wiring import Layout, random_sources
from maskconnect.errors import ConfigError
from maskconnect.experiments import paper
from maskconnect.experiments import record as record_module
from maskconnect.experiments.architectures import NETWORKS, architecture
from maskconnect.experiments.controls import controls_of, shuffled, wired_cells, with_controls
from maskconnect.experiments.kept import of_file
from maskconnect.experiments.layout import table_of
from maskconnect.experiments.paper import EXPERIMENTS, Experiment, Row, recipes_of
from maskconnect.experiments.record import OPENING, record
from maskconnect.experiments.sweep import Outcome
from maskconnect.recipes import load, names
from maskconnect.ship.measure import Times
from maskconnect.training.options import Options
from maskconnect.training.statistics import paired_difference


def test_every_row_of_a_table_of_the_paper_is_in_the_experiment_of_that_name():
    stated = {name: load(name).paper for name in names() if name.startswith("paper/")}
    for number in range(1, 6):
        rows = [row.recipe for row in EXPERIMENTS[f"table{number}"].paper]
        assert len(set(rows)) == len(rows)
        of_paper = {row for row in rows if stated[row] is not None}
        assert of_paper == {name for name, found in stated.items() if found and found.where == f"table {number}"}
        assert set(rows) - of_paper == ({"paper/cifar100-resnet38-full"} if number == 1 else set())
    used = {row.recipe for experiment in EXPERIMENTS.values() for row in experiment.paper}
    assert used == set(stated), "each recipe of the paper is used"


def test_experiments_are_those_of_the_paper():
    assert [recipe.model.fan_in for recipe in recipes_of(EXPERIMENTS["fig2"], "paper")] == list(range(1, 18))
    assert [recipe.model.fan_in for recipe in recipes_of(EXPERIMENTS["fig3"], "paper")] == list(range(1, 9))
    assert [recipe.model.fan_in for recipe in recipes_of(EXPERIMENTS["fig5"], "paper")] == [1, 4]
    for name in ("table1", "table2", "table4", "table5"):
        assert EXPERIMENTS[name].seeds == 4
    for experiment in EXPERIMENTS.values():
        for scale in paper.SCALES:
            cells = [row.cell(0).name for row in experiment.rows(scale)]
            assert len(set(cells)) == len(cells)
            assert all(recipe.data.name for recipe in recipes_of(experiment, scale))


def outcome(recipe, seed, accuracy, pruned=500_000):
    cell = Row(recipe).cell(seed)
    summary = {"test": {"top1": accuracy}, "parameters": {"weights": 567_220, "pruned": pruned}}
    return Outcome(cell, None, summary if accuracy is not None else None, "" if accuracy is not None else "no data")


@pytest.fixture
def outcomes():
    """Two networks; learned wiring is better in the first, and has a gap in the second."""
    found = {
        "paper/cifar100-resnet38-prev": (68.0, 68.4, 68.2, 68.6),
        "paper/cifar100-resnet38-learned": (70.0, 70.5, 70.1, 70.7),
        "paper/cifar100-resnet74-prev": (70.0, 70.3),
        "paper/cifar100-resnet74-learned": (70.4, None),
    }
    return [outcome(recipe, seed, a) for recipe, accuracies in found.items() for seed, a in enumerate(accuracies)]


def test_a_table_has_our_numbers_beside_the_papers(outcomes):
    table = table_of("table1", outcomes, scale="paper")
    by_name = [dict(zip(table.head, row, strict=True)) for row in table.rows]
    first, learned, other, gap = by_name
    assert first["model"] == "ResNet-38"
    assert learned["model"] == ""
    assert other["model"] == "ResNet-74"
    assert first["connectivity"] == "Fixed-Prev, K=1"
    assert first["ours: best (mean ± std)"] == "68.60 (68.30 ± 0.26)"
    assert (first["n"], first["paper"]) == ("4", "68.54")
    assert first["parameters (paper)"].startswith("0.57 M")
    assert first["after pruning (paper)"].startswith("0.50 M")
    assert learned["paper"] == "70.40"
    expected = paired_difference((70.0, 70.5, 70.1, 70.7), (68.0, 68.4, 68.2, 68.6))
    low, high = expected.interval
    assert learned[table.head[-1]] == f"{expected.mean:+.2f} ({low:+.2f} to {high:+.2f}): better, at n=4"
    assert gap["n"] == "1 of 2"
    assert gap[table.head[-1]] == "+0.40 (one pair)"
    assert table.notes[-1] == "cifar100-resnet74-learned_seed=1 has no result: no data"
    assert "Quick" not in " ".join(table.notes)
    assert table_of("t", outcomes, scale="quick").notes[0].startswith("Quick scale")


def test_tables_are_written_for_pages_spreadsheets_and_papers(outcomes):
    table = table_of("table1", outcomes, scale="paper")
    assert "| ResNet-38 | Fixed-Prev, K=1 | 68.60 (68.30 ± 0.26) | 4 | 68.54 |" in table.markdown()
    rows = table.csv().splitlines()
    assert rows[0].endswith(",scale")
    assert rows[2].endswith(",paper")
    quick = table_of("table1", outcomes, scale="quick")
    assert all(row.endswith(",quick") for row in quick.csv().splitlines()[1:])
    assert r"\emph{CIFAR-100, quick scale, not the paper's experiment}" in quick.latex()
    assert rows[2].startswith('ResNet-38,"Learned, K=10",70.70')
    latex = table.latex()
    assert latex.count(r"\midrule") == 2
    assert r"68.60 (68.30 $\pm$ 0.26)" in latex
    assert r"95 \% interval" in latex


COARSE = "CIFAR-100 (20 coarse classes, 8x8)"


def test_quick_results_say_of_which_classes_and_images_they_are():
    quick = table_of(EXPERIMENTS["table1"].title_at("quick"), [outcome("quick/cifar100", 0, 40.0)], scale="quick")
    assert quick.title == f"{COARSE}, ResNet: fixed, random and learned connectivity"
    assert quick.notes[0].startswith(f"Quick scale: {COARSE}, fewer images, fewer epochs.")
    assert f'"{COARSE}",quick' in quick.csv()
    assert rf"\emph{{{COARSE}, quick scale" in quick.latex()
    assert EXPERIMENTS["table1"].title_at("paper") == "CIFAR-100, ResNet: fixed, random and learned connectivity"
    assert EXPERIMENTS["table5"].title_at("paper").startswith("Mini-ImageNet, ResNeXt: ")


def test_a_title_names_the_networks_of_its_scale():
    assert EXPERIMENTS["fig2"].title_at("paper") == "CIFAR-100, ResNet-38: accuracy against fan-in"
    assert EXPERIMENTS["fig2"].title_at("quick") == f"{COARSE}, ResNet-20: accuracy against fan-in"
    assert EXPERIMENTS["fig5"].title_at("paper") == "CIFAR-100, ResNeXt {29,4,8}: active branches by depth"
    assert EXPERIMENTS["fig5"].title_at("quick") == f"{COARSE}, ResNeXt {{20,4,8}}: active branches by depth"


def test_braces_are_escaped_for_latex():
    latex = table_of("t", [outcome("paper/cifar100-resnext29-8-8-full", 0, 70.0)], scale="paper").latex()
    assert r"ResNeXt \{29,8,8\}" in latex
    assert "73.52 (73.37" in latex
    assert "0.57 M (0.86) & 0.50 M (0.86)" in latex


def test_pairs_that_differ_by_the_same_are_not_called_one_pair():
    found = {"paper/cifar100-resnet38-prev": (68.0, 68.4), "paper/cifar100-resnet38-learned": (69.0, 69.4)}
    rows = table_of(
        "t", [outcome(r, s, a) for r, both in found.items() for s, a in enumerate(both)], scale="paper"
    ).rows
    assert rows[1][-1] == "+1.00 (all 2 pairs differ by the same: no interval)"


def test_figures_have_no_baseline(outcomes):
    table = table_of("fig2", outcomes, scale="paper", compared=False)
    assert table.head[-1] == "after pruning (paper)"
    assert all(len(row) == len(table.head) for row in table.rows)


def test_results_are_kept_and_replaced(outcomes, tmp_path):
    place = tmp_path / "results.md"
    table = table_of("the first", outcomes, scale="quick")
    record(place, "table1", "quick", table, ["seeds: 0, 1"])
    record(place, "table2", "quick", replace(table, title="the second"), [])
    record(place, "table1", "quick", replace(table, title="the third"), ["seeds: 0"])
    text = place.read_text()
    assert text.startswith(OPENING)
    assert [title in text for title in ("the first", "the second", "the third")] == [False, True, True]
    assert text.index("## table1, quick scale") < text.index("## table2, quick scale")
    (tmp_path / "mine.md").write_text("# Mine")
    with pytest.raises(ConfigError, match="not a maskconnect file of results"):
        record(tmp_path / "mine.md", "table1", "quick", table, [])
    assert (tmp_path / "mine.md").read_text() == "# Mine"


def test_a_commit_with_changes_is_distinguished_from_one_without():
    options = Options(threads=1)
    for commit, said in (("a" * 40, "commit: aaaaaaaaaaaa"), ("a" * 40 + "+", "commit: aaaaaaaaaaaa+")):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(
                record_module, "environment", lambda _, commit=commit: {"commit": commit, "time": "2026-01-01"}
            )
            assert said in record_module.provenance_here("x", options)


def test_architectures_are_those_of_tables_6_and_7():
    assert architecture("cifar", 20, 4, 8) == [
        "3, 3x3, 16",
        "[16, 1x1, 4; 4, 3x3, 4; 4, 1x1, 64] (C=8)",
        "[64, 1x1, 4; 4, 3x3, 4; 4, 1x1, 64] (C=8)",
        "[64, 1x1, 8; 8, 3x3, 8; 8, 1x1, 128] (C=8)",
        "[128, 1x1, 8; 8, 3x3, 8; 8, 1x1, 128] (C=8)",
        "[128, 1x1, 16; 16, 3x3, 16; 16, 1x1, 256] (C=8)",
        "[256, 1x1, 16; 16, 3x3, 16; 16, 1x1, 256] (C=8)",
        "average pool",
        "100 fc, softmax",
    ]
    wide = architecture("mini", 29, 8, 8)
    assert wide[1] == "max pool, 3x3, stride 2"
    assert wide[3] == "[64, 1x1, 8; 8, 3x3, 8; 8, 1x1, 64] (C=8), x2"
    assert [len(networks) for _, networks in NETWORKS.values()] == [4, 2]


def test_an_experiment_is_run_shown_drawn_and_not_run_again(type_in, tmp_path, monkeypatch):
    runs.tiny(tmp_path)
    short = tuple(f"phase.{name}.epochs=1" for name in ("learn", "freeze", "fine", "finer"))
    rows = tuple(Row("tiny.toml", (*short, f"model.fan_in={k}")) for k in (1, 2))
    tiny = Experiment(name="fig2", title="a sweep", shows="fan-in", paper=rows, quick=rows, seeds=1)
    monkeypatch.setitem(EXPERIMENTS, "fig2", tiny)
    words = ["reproduce", "fig2", "--scale", "quick", "--out", "fig", "--results", "results.md", "--jobs", "2"]
    code, said, errors = type_in(*words)
    assert (code, errors) == (0, "")
    made = {path.name for path in (tmp_path / "fig").iterdir()}
    assert {"fig2.md", "fig2.csv", "fig2.tex", "fig2.svg", "fig2.png", "sweep.json"} <= made
    summary = json.loads((tmp_path / f"fig/{rows[1].cell(0).name}/summary.json").read_text())
    assert f"{summary['test']['top1']:.2f}" in said
    assert "Quick scale: digits, fewer images" in said
    assert said.startswith("digits, a sweep, quick scale\n")
    kept = (tmp_path / "results.md").read_text()
    assert "## fig2, quick scale" in kept
    assert "- seeds: 0" in kept
    assert "- command: `maskconnect" in kept
    code, said, _ = type_in(*words)
    assert code == 0
    assert "2 already finished" in said
    code, _, errors = type_in("reproduce", "fig2", "--out", "fig")
    assert code == 2
    assert "it was started with scale quick, now with scale paper" in errors


@pytest.mark.parametrize(("layered", "sizes"), [(True, (8,) * 5), (False, (1,) * 12)])
def test_a_shuffled_wiring_keeps_every_degree(layered, sizes):
    layout = Layout(sizes, layered=layered)
    candidates = layout.candidates()
    fan_in = [min(3, len(candidates[target])) for target in layout.targets]
    before = random_sources(candidates, fan_in, seed=0)
    after = shuffled(layout, before, seed=0)
    assert after != before
    assert after == shuffled(layout, before, seed=0)
    assert [len(row) for row in after] == [len(row) for row in before]
    for k in range(len(before)):
        assert sum(k in row for row in after) == sum(k in row for row in before)
    assert layout.from_plain(layout.to_plain(after), what="shuffled") == after


def test_controls_follow_the_row_that_they_are_of():
    rows = with_controls(EXPERIMENTS["table4"].paper[:2], controls_of("random, shuffled,sum,retrained,draws"))
    assert [row.control for row in rows] == ["", "", "random", "shuffled", "sum", "retrained", "draws"]
    assert [row.needs_wiring for row in rows] == [False, False, False, True, False, True, False]
    assert rows[6].cell(0).recipe.learning.gradient == "none"
    assert rows[6].label == "Drawn, not learned, K=4"
    assert rows[4].cell(0).recipe.model.aggregation == "sum"
    assert rows[2].cell(0).recipe.model.connectivity == "random"
    assert len({row.name for row in rows}) == 7
    table1 = with_controls(EXPERIMENTS["table1"].paper, ("random",))
    assert table1 == list(EXPERIMENTS["table1"].paper), "it has random rows of its own"
    with pytest.raises(ConfigError, match=r"a control is 'shufled'.*Did you mean 'shuffled'"):
        controls_of("shufled")


@pytest.mark.slow
def test_learned_wirings_are_trained_again_as_they_are_and_shuffled(type_in, tmp_path, monkeypatch):
    runs.tiny(tmp_path)
    short = tuple(f"phase.{name}.epochs=1" for name in ("learn", "freeze", "fine", "finer"))
    rows = (Row("tiny.toml", (*short, "model.connectivity=prev")), Row("tiny.toml", short))
    monkeypatch.setitem(EXPERIMENTS, "table1", Experiment(name="table1", title="t", shows="table", paper=rows, seeds=1))
    words = ["reproduce", "table1", "--out", "out", "--controls", "retrained,shuffled,sum", "--jobs", "2"]
    code, said, errors = type_in(*words)
    assert (code, errors) == (0, "")
    lines = (tmp_path / "out/table1.md").read_text().splitlines()
    named = [line.split(" | ")[1] for line in lines if line.startswith("|")][2:]
    assert named == [
        "Fixed-Prev, K=1",
        "Learned, K=2",
        "Learned wiring, from scratch, K=2",
        "Learned wiring, shuffled, K=2",
        "Learned, K=2, literal sum",
    ]
    learned = rows[1].name
    wiring = {
        kind: json.loads((tmp_path / f"out/{learned}{kind}_seed=0/wiring.json").read_text())
        for kind in ("", "_retrained", "_shuffled")
    }
    assert wiring["_retrained"] == wiring[""]
    assert wiring["_shuffled"] != wiring[""]
    assert sorted(k for row in wiring["_shuffled"] for k in row) == sorted(k for row in wiring[""] for k in row)
    code, said, _ = type_in(*words)
    assert code == 0
    assert "3 already finished" in said
    assert "2 already finished" in said


def test_a_learned_run_without_a_result_leaves_a_gap_in_its_controls(tmp_path):
    runs.tiny(tmp_path)
    learned = Row(str(tmp_path / "tiny.toml"))
    rows = with_controls([learned], ["shuffled"])
    failed, damaged = (
        Outcome(learned.cell(seed), tmp_path / f"{seed}", summary) for seed, summary in ((0, None), (1, {}))
    )
    damaged.folder.mkdir()
    (damaged.folder / "wiring.json").write_text("[[], [0")
    cells, gaps = wired_cells(rows, [failed, damaged], tmp_path)
    assert cells == []
    assert [gap.cell.recipe.seed for gap in gaps] == [0, 1]
    assert "has no result, and this run needs the wiring that it learns" in gaps[0].why
    assert "wiring.json cannot be read" in gaps[1].why
    assert gaps[0].cell.values == (rows[1].name,)


def test_results_with_gaps_replace_nothing(type_in, tmp_path, monkeypatch):
    runs.tiny(tmp_path)
    row = Row("tiny.toml", ("data.name=cifar10",))
    monkeypatch.setitem(
        EXPERIMENTS, "table1", Experiment(name="table1", title="t", shows="table", paper=(row,), seeds=1)
    )
    (tmp_path / "results.md").write_text(f"{OPENING}\n## table1, paper scale\n\nfine numbers\n")
    code, said, _ = type_in("reproduce", "table1", "--out", "out", "--results", "results.md")
    assert code == 1
    assert "The table was not written to results.md" in said
    assert "fine numbers" in (tmp_path / "results.md").read_text()


@pytest.mark.slow
def test_show_only_trains_nothing_and_shows_what_is_kept_with_its_gaps(type_in, tmp_path, monkeypatch):
    runs.tiny(tmp_path)
    short = tuple(f"phase.{name}.epochs=1" for name in ("learn", "freeze", "fine", "finer"))
    rows = (Row("tiny.toml", (*short, "model.connectivity=prev")), Row("tiny.toml", short))
    monkeypatch.setitem(EXPERIMENTS, "table1", Experiment(name="table1", title="t", shows="table", paper=rows, seeds=2))
    words = ["reproduce", "table1", "--controls", "shuffled,draws", "--keep", "kept"]
    code, said, errors = type_in(*words, "--out", "out", "--results", "whole.md", "--jobs", "2")
    assert (code, errors) == (0, "")
    shutil.rmtree(tmp_path / "out")
    code, _, errors = type_in(*words, "--show-only", "--results", "shown.md")
    assert (code, errors) == (0, "")
    assert not (tmp_path / "out").exists()
    whole, shown = (_rows((tmp_path / name).read_text()) for name in ("whole.md", "shown.md"))
    assert shown == whole
    assert len(shown) == 4
    kept = {path: of_file(path).recipe for path in (tmp_path / "kept").iterdir()}
    (gone,) = (path for path, recipe in kept.items() if recipe.model.connectivity == "prev" and recipe.seed == 1)
    gone.unlink()
    code, said, errors = type_in(*words, "--show-only", "--results", "shown.md")
    assert (code, errors) == (0, "")
    assert "1 of 8 runs are missing." in said
    assert "1 of 2" in _rows((tmp_path / "shown.md").read_text())[0]


def _rows(text):
    return [line for line in text.splitlines() if line.startswith("| ") and not line.startswith(("| model", "| ---"))]


def test_show_only_of_nothing_is_a_table_of_gaps(type_in, tmp_path):
    code, said, errors = type_in("reproduce", "table1", "--show-only", "--seeds", "1", "--keep", "nowhere")
    assert (code, errors) == (0, "")
    assert said.count("no result") == 10
    assert "10 of 10 runs are missing." in said
    assert list(tmp_path.iterdir()) == []


def test_the_overhead_is_timed_beside_the_papers(type_in, tmp_path, monkeypatch):
    monkeypatch.setattr(untrained, "OVERHEAD", {"resnet38": 1.13})
    monkeypatch.setattr(steps, "interleaved", lambda made, *_, **__: {name: Times((1.0, 1.1)) for name in made})
    words = ["overhead", "--scale", "quick", "--threads", "1", "--results", "results.md"]
    code, said, _ = type_in("reproduce", *words)
    assert code == 0
    kept = (tmp_path / "results.md").read_text()
    assert "## overhead, quick scale" in kept
    assert "| ResNet-38, K=10 | 32 | 1.00 | 1.00 to 1.00 | 1.13 |" in kept
    assert "- machine: CPU" in kept
    assert said.splitlines()[1].split() == ["ResNet-38,", "K=10", "32", "1.00", "1.00", "to", "1.00", "1.13"]


def test_the_list_says_what_each_costs(type_in):
    code, said, _ = type_in("reproduce")
    assert code == 0
    lines = {line.split()[0]: line for line in said.splitlines()}
    assert "40 runs of 80 epochs" in lines["table1"]
    assert "68 runs of 80 epochs" in lines["fig2"]
    assert list(lines)[1:] == [*EXPERIMENTS, "overhead", *NETWORKS]


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["tabel1"], "Did you mean 'table1'"),
        (["table1", "--scale", "small"], "--scale is 'small'"),
        (["table5", "--scale", "quick"], "has no quick scale"),
        (["table1", "--seeds", "0"], "--seeds is 0"),
        (["table1", "--jobs", "0"], "--jobs is 0"),
        (["table1", "--results", "nowhere/results.md"], "the folder nowhere does not exist"),
        (["overhead", "--results", "nowhere/results.md"], "the folder nowhere does not exist"),
        (["overhead", "--engine", "slrum"], "overhead trains nothing, so --engine is not used"),
        (["table6", "--show-only"], "table6 trains nothing, so --show-only is not used"),
        (["table6", "--results", "results.md"], "table6 trains nothing, so --results is not used"),
    ],
)
def test_a_mistake_is_one_sentence(type_in, tmp_path, words, sentence):
    code, _, errors = type_in("reproduce", *words)
    assert (code, errors.count("\n")) == (2, 1)
    assert sentence in errors
    assert list(tmp_path.iterdir()) == []
