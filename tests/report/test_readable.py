"""What can be hard to read on the page, in a real browser: contrast, text over text, tips, small screens."""

import json
import shutil
from dataclasses import replace

import pytest

from maskconnect.report.axes import Axes
from maskconnect.report.chart import Chart, Line
from maskconnect.report.mistakes import LEVELS, READABLE
from maskconnect.report.page import page as page_of
from maskconnect.report.plot import plot
from maskconnect.report.runs import read_run

PHONE = {"viewport": {"width": 390, "height": 844}}
NAMES = [f"some_rather_long_name_of_class_{k}" for k in range(10)]

CONTRAST = """
(shown, paper) => {
  const numbers = color => color.match(/[\\d.]+/g).slice(0, 3).map(Number);
  const style = (kind, key) => getComputedStyle(document.querySelector(kind))[key];
  const light = color => {
    const [r, g, b] = color.map(c => c / 255).map(c => c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4);
    return 0.2126 * r + 0.7152 * g + 0.0722 * b + 0.05;
  };
  const below = numbers(getComputedStyle(document.body).backgroundColor);
  return shown.map(([text, cell]) => {
    const over = cell ? numbers(style(cell, "stroke")) : below, part = cell ? Number(style(cell, "opacity")) : 1;
    const [a, b] = [light(numbers(style(text, "fill"))), light(below.map((c, i) => c + part * (over[i] - c)))];
    return Math.max(a, b) / Math.min(a, b);
  });
}
"""


def with_names(run, names, tmp_path):
    """The run with other names of classes; there may be more than it has."""
    shutil.copytree(run.path, tmp_path / "named")
    (tmp_path / "named/final/classes.json").write_text(json.dumps(names))
    return read_run(tmp_path / "named")


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_has_enough_contrast_at_every_shade(visit, mixed, scheme):
    page = visit(mixed, color_scheme=scheme)
    page.evaluate(
        """levels => {
          const svg = document.querySelector(".matrix");
          for (let k = 1; k <= levels; k++)
            svg.innerHTML += `<path class="cell l${k} test"/><text class="x on on${k} test">1</text>`;
        }""",
        LEVELS,
    )
    shades = [(f".matrix text.on{k}.test", f".matrix .l{k}.test") for k in range(1, LEVELS + 1)]
    plain = [(kind, None) for kind in (".plot text.phase", ".plot text.y", ".block.unused text", ".matrix text.x")]
    for shown, found in zip(
        [*shades, *plain], page.evaluate(f"([shown]) => ({CONTRAST})(shown)", [[*shades, *plain]]), strict=True
    ):
        assert found >= 4.5, shown


def test_every_number_of_the_matrix_is_in_the_color_for_its_shade(visit, chain):
    page = visit(chain)
    at = "e => [e.x.baseVal[0].value, e.y.baseVal[0].value - 4, [...e.classList].find(c => /^on\\d$/.test(c)).slice(2)]"
    numbers = page.eval_on_selector_all(".matrix text.on", f"all => all.map({at})")
    assert len(numbers) == len(json.loads(page.locator(".matrix").get_attribute("data-matrix"))["cells"]) / 3
    cells = page.eval_on_selector_all(
        ".matrix .cell", "all => all.map(p => [p.getAttribute('class'), p.getAttribute('d')])"
    )
    cell = json.loads(page.locator(".matrix").get_attribute("data-matrix"))["cell"]
    for x, y, level in numbers:
        (d,) = [d for kind, d in cells if kind == f"cell l{level}"]
        assert f"M{x - cell // 2:g} {y:g}h" in d


def test_the_title_of_an_axis_is_not_over_long_ticks(browser):
    page = browser.new_page()
    for y in ((0.99851, 0.99852), (0.041, 0.049), (1.0, 5.0)):
        chart = Chart(key="k", title="t", x="x", y="relative", lines=(Line(name="a", x=(0, 1), y=y),))
        page.set_content(f"<style>svg text{{font:13.5px sans-serif}}.y{{text-anchor:end}}</style>{plot(chart)}")
        edges = page.eval_on_selector_all("text.y", "all => all.map(t => t.getBBox().x)")
        assert min(edges) > 12 + 8, "the title is turned, at x=12"
        assert all(Axes(chart).at_x(0) > edge for edge in edges)
    page.close()


def test_a_tip_has_a_name_a_color_and_a_deviation_for_each_value(visit, folder):
    found = [read_run(folder / name) for name in ("learned", "learned-1", "prev")]
    page = visit(*found)
    plots = page.locator("section:not(.run) svg.plot")
    page.locator("section:not(.run) figure", has_text="Test accuracy").locator("svg.plot").focus()
    page.keyboard.press("ArrowLeft")
    values = [run.epochs[-2].test_top1 for run in found]
    mean, deviation = (values[0] + values[1]) / 2, abs(values[0] - values[1]) / 2**0.5
    assert page.locator("#tip div").all_inner_texts() == [
        "epoch 5",
        f"Learned, K=2: {mean:.2f} ± {deviation:.2f} %",
        f"Fixed-Prev, K=1: {values[2]:.2f} %",
    ]
    strokes = "all => all.map(p => getComputedStyle(p).stroke + getComputedStyle(p).strokeDasharray)"
    lines = plots.first.locator(".line").evaluate_all(strokes)
    assert page.eval_on_selector_all("#tip svg path", strokes) == lines
    assert len(set(lines)) == 2
    page.locator("section:not(.run) figure", has_text="Readers of each block").locator("svg.plot").focus()
    page.keyboard.press("ArrowRight")
    assert page.locator("#tip").inner_text().startswith("block 4\nLearned, K=2: ")


def test_the_tip_of_a_single_line_names_what_is_measured(visit, chain):
    page = visit(chain)
    page.locator("figure.chart", has_text="Top-K changes").locator("svg.plot").focus()
    page.keyboard.press("ArrowLeft")
    page.keyboard.press("Home")
    for _ in range(6):
        page.keyboard.press("ArrowLeft")
    assert page.locator("#tip").inner_text() == f"epoch 1\nconnections: {chain.epochs[0].changes}"


def test_a_chart_has_a_ring_for_the_keyboard_and_none_for_the_mouse(visit, chain):
    page = visit(chain)
    ring = "getComputedStyle(document.activeElement).outlineStyle"
    page.locator("svg.plot").first.click()
    assert page.evaluate("document.activeElement.matches('.plot')")
    assert page.evaluate(ring) == "none"
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.matches('.plot')")
    assert page.evaluate(ring) != "none"


def test_on_a_phone_long_names_of_classes_are_readable(visit, chain, tmp_path):
    many = [*NAMES, *(f"{name}_again" for name in NAMES)]
    page = visit(with_names(chain, many, tmp_path), **PHONE)
    assert page.evaluate("document.documentElement.scrollWidth") == 390
    matrix = page.locator(".matrix").evaluate("m => m.getBoundingClientRect().width / m.viewBox.baseVal.width")
    assert matrix >= READABLE - 0.01
    assert page.locator(".wide:has(.matrix)").evaluate("e => e.scrollWidth > e.clientWidth")
    assert page.locator(".confusions .wide").evaluate("e => e.scrollWidth <= e.clientWidth")
    names = page.locator(".bars span")
    assert set(names.evaluate_all("all => all.map(e => e.title)")) <= set(many)
    widths = names.first.evaluate("e => [e.clientWidth, e.closest('ul').clientWidth]")
    assert widths[0] == pytest.approx(0.45 * widths[1], abs=2)


def test_on_a_phone_a_wide_drawing_starts_at_its_middle(visit, mixed):
    page = visit(mixed, **PHONE)
    view = page.locator(".wiring").evaluate("svg => svg.parentNode.getBoundingClientRect().toJSON()")
    for word in ("input", "output"):
        box = page.locator(".wiring text", has_text=word).filter(has_not_text="x").bounding_box()
        assert view["left"] < box["x"] < box["x"] + box["width"] < view["right"]
    caption = page.locator("figcaption", has_text="Learned").first.bounding_box()
    assert caption["x"] == pytest.approx(view["left"], abs=1), "the caption does not scroll"


def test_on_a_phone_the_note_on_seeds_does_not_hide_the_accuracies(visit, chain, folder):
    other = replace(read_run(folder / "prev"), summary=None)
    page = visit(chain, other, **PHONE)
    assert "0 (+ 1 not ended)" in page.locator("section:not(.run) table").inner_text()
    cell = page.locator("section:not(.run) tbody td:nth-child(3)").first.bounding_box()
    assert cell["x"] + cell["width"] <= 390


def test_values_of_a_card_are_sorted_across(visit, chain):
    page = visit(chain)
    page.locator(".wiring .block[data-k='4']").hover()
    first, second = (page.locator(".panel details li").nth(i).bounding_box() for i in (0, 1))
    assert first["y"] == second["y"]
    assert first["x"] < second["x"]


def test_without_javascript_the_first_lines_say_what_is_missing(browser, chain, tmp_path):
    (tmp_path / "index.html").write_text(page_of([chain]))
    context = browser.new_context(java_script_enabled=False, viewport={"width": 1000, "height": 400})
    page = context.new_page()
    page.goto((tmp_path / "index.html").as_uri())
    hint = page.locator("noscript p")
    box = hint.bounding_box()
    assert box["y"] + box["height"] < 200
    assert "folder" not in hint.inner_text(), "with --no-figures there is none"
    context.close()
