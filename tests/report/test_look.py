"""How the page looks and answers, in a real browser: sizes, axes, hints, values on hover and tap, cards of blocks."""

import json
import re
import shutil
from dataclasses import replace

import pytest
import runs

from maskconnect.report import charts
from maskconnect.report.axes import Axes
from maskconnect.report.groups import groups_of
from maskconnect.report.plot import figure, strip
from maskconnect.report.runs import read_run

LONG = [f"some_rather_long_name_of_class_{k}" for k in range(10)]


@pytest.fixture(scope="module")
def once(tmp_path_factory):
    """Runs that were evaluated once, after the last epoch; the masks of one decay."""
    place = tmp_path_factory.mktemp("once")
    for name, settings in {
        "blend": ("learning.way=blend", "learning.decay=true"),
        "prev": ("model.connectivity=prev",),
    }.items():
        runs.run(runs.tiny(place, "training.evaluate_every=0", *settings), place / name)
    return [read_run(place / name) for name in ("blend", "prev")]


def with_long_names(run, tmp_path):
    shutil.copytree(run.path, tmp_path / "long")
    (tmp_path / "long/final/classes.json").write_text(json.dumps(LONG))
    return read_run(tmp_path / "long")


@pytest.mark.parametrize("width", [1400, 1100, 390])
def test_nothing_is_clipped_where_class_names_are_long(visit, chain, tmp_path, width):
    page = visit(with_long_names(chain, tmp_path), viewport={"width": width, "height": 900})
    hidden = "e => e.scrollWidth - e.clientWidth"
    if width > 1000:
        assert page.locator(".confusions .wide").evaluate(hidden) <= 0
    assert page.evaluate("document.documentElement.scrollWidth") == width
    captions = page.locator(".pictures span b").all_inner_texts()
    assert set(captions) <= set(LONG)
    assert "<wbr>" in page.locator(".pictures span b").first.inner_html(), "lines break between words"


def test_long_labels_do_not_take_the_width_of_the_table(visit, chain):
    other = replace(chain.recipe.training, batch_size=16, weight_decay=0.0, momentum=0.5)
    second = replace(chain, recipe=replace(chain.recipe, training=other))
    page = visit(chain, second, viewport={"width": 1400, "height": 900})
    table, first = (page.locator(f"section:not(.run) {part}").first.bounding_box() for part in ("table", "td"))
    assert first["width"] < 0.4 * table["width"]
    assert page.locator("section:not(.run) .wide").first.evaluate("e => e.scrollWidth <= e.clientWidth")


def test_runs_that_were_evaluated_once_have_numbers_instead_of_lone_dots(visit, once):
    chart = charts.accuracy_of_all(groups_of(once))
    assert chart.is_strip
    page = visit(*once)
    shown = page.locator("section:not(.run) .strip li b").all_inner_texts()
    assert shown == [f"{run.summary['test']['top1']:.2f} %" for run in once]
    names = page.locator("section:not(.run) .strip li span").all_inner_texts()
    assert names == [group.label for group in groups_of(once)]
    assert "Recorded once, after epoch 6." in page.locator("section:not(.run)").inner_text()
    accuracy = page.locator(".run:not([hidden]) figure.chart", has_text="Accuracy")
    legend = accuracy.locator(".legend li").all_inner_texts()
    assert legend == ["train", f"test: {once[0].summary['test']['top1']:.2f} %"], "the value of a lone dot"
    assert not [text for text in accuracy.locator("svg.plot text").all_text_contents() if "." in text]


def test_a_strip_has_the_deviation_over_seeds_and_escapes_names():
    line = charts.Line(name="<a>", x=(3,), y=(50.0,), spread=(1.25,))
    other = charts.Line(name="b", x=(3,), y=(60.0,))
    text = strip(charts.Chart(key="k", title="t", x="epoch", y="%", lines=(line, other), most=100.0))
    assert "&lt;a&gt;" in text
    assert "50.00 ± 1.25 %" in text
    assert "The scale runs from 48.19 to 60.56 %." in text, "the deviation is on the scale"
    low, high = 48.1875, 60.5625
    first, width = (100 * part / (high - low) for part in (48.75 - low, 2.5))
    assert f"--from:{first:.1f}%;--width:{width:.1f}%" in text


def test_axes_span_the_values_and_the_page_says_so(visit, chain):
    def axis(*y, **options):
        line = charts.Line(name="a", x=tuple(range(len(y))), y=y)
        return Axes(charts.Chart(key="k", title="t", x="x", y="y", lines=(line,), **options))

    assert axis(31.0, 99.0, most=100.0).y == pytest.approx((27.6, 100))
    assert axis(31.0, 99.0, most=100.0).y_ticks == [40, 60, 80, 100]
    assert axis(95.0, 96.0, most=100.0).y == pytest.approx((94.95, 96.05))
    assert axis(0.0, 3.0).y[0] == 0
    assert axis(4.0, 4.0, whole=True).y_ticks == [3, 4, 5], "counts have whole ticks"
    assert "Vertical axes span the values shown" in visit(chain).locator(".run").inner_text()


def test_a_tap_shows_values_until_the_next_tap_elsewhere(visit, chain):
    page = visit(chain, viewport={"width": 390, "height": 800}, has_touch=True)
    plot = page.locator("figure.chart", has=page.locator("figcaption", has_text=re.compile("^Accuracy$"))).locator(
        "svg.plot"
    )
    plot.scroll_into_view_if_needed()
    plot.tap(position={"x": 340, "y": 80})
    assert page.locator("#tip").inner_text().startswith("epoch 6\ntrain: ")
    marks = plot.locator(".marks").get_attribute("d")
    assert marks.count("M") == 2, "a mark on each line"
    page.locator("svg.plot").first.tap(position={"x": 340, "y": 80})
    assert page.locator("#tip").is_visible(), "one chart after another"
    page.locator("h1").tap()
    assert not page.locator("#tip").is_visible()


@pytest.mark.parametrize(
    ("touch", "words", "others"), [(True, "Tap a block", "Point at"), (False, "Point at a", "Tap")]
)
def test_hints_fit_the_device(visit, chain, touch, words, others):
    page = visit(chain, has_touch=touch)
    for part in (page.locator(".panel"), page.locator(".player + .note")):
        assert words in part.inner_text()
        assert others not in part.inner_text()


def test_a_card_lists_rejected_candidates_with_their_masks(visit, chain):
    page = visit(chain)
    for frame in (chain.frames[0], chain.frames[-1]):
        page.locator("input[type=range]").fill(str(frame.epoch))
        page.locator(".wiring .block[data-k='4']").hover()
        shown = page.locator(".panel details li").all_inner_texts()
        rejected = sorted(frame.wires.rejected(4), key=lambda pair: -pair[1])
        assert [text.split() for text in shown] == [[f"{source}", f"{value:.3f}"] for source, value in rejected]
        assert {source for source, _ in rejected} == set(range(4)) - set(frame.wires.sources[4])
    assert page.locator(".panel summary").inner_text() == "2 rejected candidates"
    values = sum(value for _, value in chain.wires.rejected(4)) + sum(chain.wires.values[4])
    assert values == pytest.approx(1)
    assert "Mask value: how strongly" in page.locator(".run").inner_text()


def test_many_rejected_candidates_are_folded_until_they_are_wanted(visit, tmp_path):
    from made_up import CIFAR_RESNET, made_up_run

    page = visit(read_run(made_up_run(tmp_path / "deep", CIFAR_RESNET, "model.depth=62", "model.fan_in=3")))
    page.locator(".wiring .block[data-k='20']").click()
    assert page.locator(".panel summary").inner_text() == "17 rejected candidates"
    assert not page.locator(".panel details li").first.is_visible()
    page.locator(".panel summary").click()
    assert page.locator(".panel details li").first.is_visible()


def test_the_rate_of_mask_updates_has_its_decay(once):
    rates = next(chart for chart in charts.curves(once[0]) if chart.key == "rates")
    lines = {line.name: line.y for line in rates.lines}
    assert list(lines) == ["weights", "masks", "masks, with decay"]
    # 5 steps per epoch, 10 in which masks learn: the factor falls from 1 in the first to 0 in the last
    assert lines["masks, with decay"][:2] == (pytest.approx(0.3 * (1 - 4 / 9)), None)
    assert "masks, with decay" not in figure(next(c for c in charts.curves(once[1]) if c.key == "rates"))
