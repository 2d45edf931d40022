"""What is plotted, and what stands in tables."""

import json
import re
import shlex
from dataclasses import replace

import pytest
import runs

from maskconnect.cli.main import main
from maskconnect.recipes import load
from maskconnect.report import charts
from maskconnect.report.axes import Axes, log_ticks, tick_texts, ticks
from maskconnect.report.groups import groups_of
from maskconnect.report.plot import figure, plot
from maskconnect.report.runs import read_run
from maskconnect.report.tables import commands, comparison, facts, paper_accuracy
from maskconnect.training.folder import find_runs
from maskconnect.training.statistics import statistic


@pytest.fixture(scope="module")
def found(folder):
    return [read_run(path) for path in find_runs([folder])]


def test_runs_that_differ_in_their_seed_only_are_one_group(found):
    groups = groups_of(found)
    assert [(group.label, [run.name for run in group.runs]) for group in groups] == [
        ("ResNet-14, Learned, K=2", ["learned", "learned-1"]),
        ("ResNet-14, Fixed-Prev, K=1", ["prev"]),
        ("ResNeXt {11,4,4}, Learned, K=2", ["resnext"]),
        ("ResNeXt {11,4,4}, Learned, K=1", ["resnext-1"]),
    ]
    tested = [run.summary["test"]["top1"] for run in found[:2]]
    assert groups[0].accuracy == statistic(tested)
    assert groups[0].accuracy.deviation == pytest.approx(abs(tested[0] - tested[1]) / 2**0.5)
    assert groups[1].accuracy.deviation is None


def test_groups_that_would_be_called_the_same_are_distinguished(found):
    first = found[0]
    longer = replace(
        first.recipe, name="longer", phase=(replace(first.recipe.phase[0], epochs=9), *first.recipe.phase[1:])
    )
    labels = [group.label for group in groups_of([first, replace(first, recipe=longer)])]
    assert labels == ["Learned, K=2 (phase.learn.epochs=2)", "Learned, K=2 (phase.learn.epochs=9)"]


def test_labels_name_as_many_fields_as_it_takes(found):
    recipe = found[0].recipe
    training = replace(recipe.training, batch_size=16, weight_decay=0.0, momentum=0.5)
    last = (*recipe.phase[:-1], replace(recipe.phase[-1], lr=0.02))
    others = [
        replace(found[0], recipe=replace(recipe, **change)) for change in ({"phase": last}, {"training": training})
    ]
    labels = [group.label for group in groups_of([found[0], *others])]
    assert labels == [
        "Learned, K=2",
        "Learned, K=2 (phase.finer.lr=0.02)",
        "Learned, K=2 (training.batch_size=16, training.weight_decay=0.0, training.momentum=0.5)",
    ]


def test_curves_are_the_lines_of_the_metrics(chain):
    by_key = {chart.key: chart for chart in charts.curves(chain)}
    assert list(by_key) == ["loss", "accuracy", "rates", "entropy", "changes", "scales"]
    lines = [json.loads(line) for line in (chain.path / "metrics.jsonl").read_text().splitlines()]
    epochs = [line for line in lines if line["kind"] == "epoch"]
    train, test = by_key["loss"].lines
    assert list(train.y) == [line["loss"] for line in epochs]
    assert list(test.y) == [line["test"]["loss"] for line in epochs]
    weights, masks = by_key["rates"].lines
    assert list(weights.y) == [0.1, 0.1, 0.1, 0.1, 0.01, 0.001]
    assert list(masks.y) == [0.3, 0.3, None, None, None, None]
    assert list(by_key["changes"].lines[0].y) == [line.get("top_changes") for line in epochs]
    assert list(by_key["entropy"].lines[0].y) == [line.get("mask_entropy") for line in epochs]
    assert by_key["scales"].lines[-1].name == "output"
    assert list(by_key["scales"].lines[-1].y) == [line["activation_scales"][-1] for line in epochs]
    bands = [(band.name, band.start, band.end) for band in by_key["loss"].bands]
    assert bands == [("learn", 0, 2), ("frozen", 2, 4), ("fine", 4, 5), ("finer", 5, 6)]


def test_branching_counts_the_branches_that_reach_the_output(found):
    chart = charts.branching(groups_of(found))
    assert [line.name for line in chart.lines] == ["ResNeXt {11,4,4}, Learned, K=2", "ResNeXt {11,4,4}, Learned, K=1"]
    run = found[4]
    assert run.fan_in == 1
    used = [len({s for row in run.wires.sources[8:] for s in row}), 4]
    assert list(chart.lines[1].y)[-2:] == used
    assert charts.branching(groups_of(found[:2])) is None


def test_readers_are_means_over_seeds(found):
    chart = charts.readers(groups_of(found))
    counts = [[sum(k in row for row in run.wires.sources) for k in range(5)] for run in found[:2]]
    assert list(chart.lines[0].y) == [(a + b) / 2 for a, b in zip(*counts, strict=True)]
    assert list(chart.lines[1].y) == [1.0] * 5


def test_fan_in_has_an_error_bar_where_there_are_seeds(found):
    chart = charts.fan_in(groups_of(found))
    by_name = {line.name: line for line in chart.lines}
    learned = by_name["ResNeXt {11,4,4}, Learned"]
    assert learned.x == (1, 2)
    assert learned.y == tuple(run.summary["test"]["top1"] for run in (found[4], found[3]))
    resnet = by_name["ResNet-14, Learned"]
    assert resnet.x == (2,)
    assert resnet.spread[0] == groups_of(found)[0].accuracy.deviation
    assert charts.fan_in(groups_of(found[:2])) is None, "one K is not a sweep"


def test_an_unfinished_run_is_in_no_statistic(found):
    running = replace(found[1], summary=None)
    both, alone = groups_of([found[0], running]), groups_of([found[0]])
    assert both[0].accuracy.count == 1
    assert "1 (+ 1 not ended)" in comparison(both)
    for chart in (charts.accuracy_of_all, charts.readers):
        assert chart(both) == chart(alone)
    branches = [replace(found[3], summary=None), found[3]]
    assert charts.branching(groups_of(branches)) == charts.branching(groups_of([found[3]]))
    assert [group.label for group in groups_of([running])] == ["Learned, K=2, not ended"]


def test_a_seed_counts_once(found):
    groups = groups_of([found[0], found[0], found[1]])
    assert groups[0].accuracy == statistic([run.summary["test"]["top1"] for run in found[:2]])
    assert "2 (+ 1 of the same seed, left out)" in comparison(groups)
    assert groups_of([found[0], found[0]])[0].accuracy.deviation is None


def test_a_sweep_of_k_never_mixes_recipes(found):
    def other(run, momentum, seed):
        return replace(
            run, recipe=replace(run.recipe, seed=seed, training=replace(run.recipe.training, momentum=momentum))
        )

    chart = charts.fan_in(groups_of([other(run, m, 0) for run in found[3:] for m in (0.9, 0.5)]))
    assert [line.name for line in chart.lines] == ["Learned (training.momentum=0.9)", "Learned (training.momentum=0.5)"]
    assert all(line.x == (1, 2) and line.spread == (None, None) for line in chart.lines)
    assert "Bars" not in chart.note


@pytest.mark.parametrize(
    ("interval", "expected"),
    [
        ((0, 100), [0, 20, 40, 60, 80, 100]),
        ((0, 1), [0, 0.2, 0.4, 0.6, 0.8, 1]),
        ((55.3, 98.2), [50, 60, 70, 80, 90, 100]),
        ((0.93, 0.997), [0.92, 0.94, 0.96, 0.98, 1]),
        ((-3e-7, 2e-7), [-3e-7, -2e-7, -1e-7, 0, 1e-7, 2e-7]),
    ],
)
def test_ticks_are_round_numbers(interval, expected):
    assert ticks(*interval) == pytest.approx(expected)


@pytest.mark.parametrize("y", [(1e6, 1e6 + 1), (1e-12, 2e-12), (1e17, 1e17), (-1e29, 1e29), (0, 1)])
def test_ticks_can_be_distinguished(y):
    line = charts.Line(name="a", x=(1, 2), y=y)
    axes = Axes(charts.Chart(key="k", title="t", x="x", y="y", lines=(line,)))
    texts = tick_texts(axes.y_ticks)
    assert len(set(texts)) == len(texts) > 1
    assert [float(text) for text in texts] == pytest.approx(axes.y_ticks)


def test_whole_ticks_and_powers_of_ten():
    assert ticks(0, 3, most=8, whole=True) == [0, 1, 2, 3]
    assert ticks(0, 2000, most=8, whole=True)[-1] == 2000
    assert log_ticks(0.0008, 0.4) == pytest.approx([0.001, 0.01, 0.1])
    assert log_ticks(0.4, 5) == pytest.approx([0.5, 1, 2, 5])


def test_a_plot_has_its_points_where_the_values_are():
    line = charts.Line(name="a<b", x=(0, 1, 2), y=(1.0, None, 3.0), points=True, spread=(0.5, None, None))
    chart = charts.Chart(key="k", title="t", x="x", y="y", lines=(line,))
    drawn, axes = plot(chart), Axes(chart)
    dots = re.search(r'class=dots data-c=0 d="([^"]+)"', drawn)[1]
    assert dots == "".join(f"M{axes.at_x(x)} {axes.at_y(y)}h0" for x, y in ((0, 1.0), (2, 3.0)))
    assert drawn.count("class=bar") == 1
    assert axes.at_y(1.0) > axes.at_y(3.0)
    assert "a<b" not in figure(replace(chart, lines=(line, line)))
    assert "a&lt;b" in figure(replace(chart, lines=(line, line)))


def path(drawn, kind):
    return re.search(rf'class={kind} data-c=0 d="([^"]*)"', drawn)[1]


def test_a_missing_value_breaks_the_line_and_a_value_between_two_breaks_is_a_dot():
    line = charts.Line(name="a", x=(1, 2, 3, 4, 5, 6, 7), y=(1.0, 2.0, None, 3.0, None, 4.0, 5.0), spread=(0.5,) * 7)
    drawn = plot(charts.Chart(key="k", title="t", x="x", y="y", lines=(line,)))
    assert [piece.count("L") for piece in path(drawn, "line").split("M")[1:]] == [1, 0, 1]
    assert path(drawn, "dots").count("M") == 1
    assert path(drawn, "area").count("z") == 3


def test_a_value_of_every_few_epochs_breaks_no_line():
    y = (None, 1.0, None, 2.0, None, 3.0, 4.0)  # evaluate_every=2, and after the last epoch
    line = charts.Line(name="a", x=(1, 2, 3, 4, 5, 6, 7), y=y)
    drawn = plot(charts.Chart(key="k", title="t", x="x", y="y", lines=(line,)))
    assert path(drawn, "line").count("M") == 1
    assert "class=dots" not in drawn
    nothing = charts.Line(name="a", x=(1, 2), y=(None, None))
    assert nothing.pieces == nothing.known == []


@pytest.mark.parametrize(
    ("y", "text"), [("%", "50.00 ± 1.25 %"), ("test accuracy, %", "50.00 ± 1.25 %"), ("loss", "50 ± 1.2")]
)
def test_accuracies_have_their_unit_and_the_decimals_of_the_table(y, text):
    line = charts.Line(name="a", x=(1,), y=(50.0,), spread=(1.25,))
    chart = charts.Chart(key="k", title="t", x="x", y=y, lines=(line,))
    assert chart.text(line.known[0]) == text
    assert chart.legend(line) == f"a: {text}"


def test_branches_that_are_unlike_stand_in_layers(mixed, layered):
    assert charts.branching(groups_of([mixed])).x == "layer, from the input"
    assert charts.branching(groups_of([layered])).x == "module, from the input"
    assert charts.branching(groups_of([layered, mixed])).place == "layer or module"


@pytest.mark.parametrize("y", [(5.0, 5.0), (0.0, 0.0), (1e-9, 1e9), (7.0, None)])
def test_any_values_make_a_plot(y):
    for log in (False, True):
        line = charts.Line(name="a", x=(1, 2), y=y)
        drawn = plot(charts.Chart(key="k", title="t", x="x", y="y", lines=(line,), log=log))
        assert "nan" not in drawn
        assert "inf" not in drawn


def test_tables_have_the_numbers_of_the_summary_and_of_the_paper(chain):
    shown = dict(facts(chain))
    summary = chain.summary
    assert shown["test accuracy, last epoch"] == f"{summary['test']['top1']:.2f} %"
    assert (
        shown[f"best epoch, {summary['best']['epoch']} (chosen on test)"] == f"{summary['best']['test']['top1']:.2f} %"
    )
    assert shown["parameters"] == f"{summary['parameters']['weights']:,}"
    assert shown["after pruning"] == f"{summary['parameters']['pruned']:,}"
    paper = load("paper/cifar100-resnet38-learned").paper
    assert paper_accuracy(paper) == "70.40"
    assert paper_accuracy(load("paper/cifar100-resnext29-8-8-learned-k4").paper) == "75.89 (mean 75.77 ± 0.12)"
    with_paper = replace(chain, recipe=replace(chain.recipe, paper=paper))
    assert ("the paper, table 1", "70.40 %") in facts(with_paper)
    assert "70.40" in comparison(groups_of([with_paper]))


def test_the_command_makes_the_run_again(chain, tmp_path):
    typed = shlex.split(dict(commands(chain))["to repeat the run"])
    assert typed[:2] == ["maskconnect", "train"]
    words = [str(tmp_path / "again") if word == f"{chain.path}-again" else word for word in typed[1:]]
    assert main(words) == 0
    again = read_run(tmp_path / "again")
    assert again.summary["test"] == chain.summary["test"]
    assert again.wires.sources == chain.wires.sources


def test_what_chose_the_best_epoch_is_said(tmp_path):
    runs.run(runs.tiny(tmp_path, "data.validation=40", "training.evaluate_every=2"), tmp_path / "run")
    run = read_run(tmp_path / "run")
    train, test, validation = next(chart for chart in charts.curves(run) if chart.key == "accuracy").lines
    assert [line.name for line in (train, test, validation)] == ["train", "test", "validation"]
    assert [value is None for value in validation.y] == [True, False, True, False, False, False]
    shown = comparison(groups_of([run]))
    assert "best epoch, % (chosen on validation)" in shown
    assert "chosen on test" not in shown
    assert any("chosen on validation" in name for name, _ in facts(run))
