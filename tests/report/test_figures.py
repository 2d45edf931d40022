"""The static figures: written, of the right size, the same each time."""

import sys
import xml.etree.ElementTree as ElementTree

import pytest
import torch

from maskconnect.report import charts, figures
from maskconnect.report.groups import groups_of
from maskconnect.report.mistakes import Confusion, confusion_of
from maskconnect.report.png import png
from maskconnect.report.runs import read_run
from maskconnect.report.write import drawing_of
from maskconnect.training.folder import find_runs


def test_every_figure_is_an_svg_and_a_png(folder, type_in, tmp_path):
    code, said, _ = type_in("report", folder, "--out", tmp_path / "out")
    assert code == 0
    names = {path.name for path in (tmp_path / "out/figures").iterdir() if path.suffix != ".txt"}
    stems = {name.rpartition(".")[0] for name in names}
    assert names == {f"{stem}.{kind}" for stem in stems for kind in ("svg", "png")}
    runs = ("learned", "learned-1", "prev", "resnext", "resnext-1")
    each = {f"{kind}-{run}" for kind in ("wiring", "curves", "confusion") for run in runs}
    assert stems == {"fan-in", "branching", "readers", "accuracies"} | each
    assert f"({len(names)} files)" in said
    for path in (tmp_path / "out/figures").glob("*.svg"):
        ElementTree.parse(path)
    for path in (tmp_path / "out/figures").glob("*.png"):
        assert path.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"


def test_the_same_runs_give_the_same_figures(chain, tmp_path):
    chart = charts.curves(chain)[0]
    first, again = (figures.write_chart(chart, tmp_path / name) for name in ("a", "b"))
    for one, other in zip(first, again, strict=True):
        assert one.read_bytes() == other.read_bytes()


def test_a_drawing_of_pixels_is_as_large_as_that_of_lines_and_has_something_in_it(layered, tmp_path):
    from PIL import Image

    drawing = drawing_of(layered)
    figures.write_drawing(drawing, tmp_path / "a.png")
    picture = Image.open(tmp_path / "a.png").convert("RGB")
    assert picture.size == (2 * drawing.width, 2 * drawing.height)
    assert [panel.title for panel in drawing.panels] == ["Fixed-Full", "Learned, K=2"]
    colors = {color for _, color in picture.getcolors(1 << 24)}
    assert (255, 255, 255) in colors
    assert any(blue > 150 > red for red, _, blue in colors), "wires are blue"


def test_no_text_is_left_as_mathematics(chain, tmp_path, monkeypatch):
    monkeypatch.setitem(figures.STYLE, "svg.fonttype", "none")
    (drawn, _) = figures.write_charts(charts.curves(chain), tmp_path / "curves")
    texts = [text.text for text in ElementTree.parse(drawn).iter("{http://www.w3.org/2000/svg}text")]
    assert {"0.1", "0.01", "0.001"} <= set(texts)
    assert not [text for text in texts if "$" in text]


def test_a_lone_value_stands_in_the_legend(tmp_path, monkeypatch):
    monkeypatch.setitem(figures.STYLE, "svg.fonttype", "none")
    train = charts.Line(name="train", x=(1, 2, 3), y=(90.0, None, 92.0))
    test = charts.Line(name="test", x=(1, 2, 3), y=(None, None, 94.72))
    for lines in ((train, test), (test,)):
        chart = charts.Chart(key="k", title="t", x="x", y="%", lines=lines)
        (drawn, _) = figures.write_chart(chart, tmp_path / "k")
        texts = [text.text for text in ElementTree.parse(drawn).iter("{http://www.w3.org/2000/svg}text")]
        assert [text for text in texts if "94.72" in text] == ["test: 94.72 %"]


def test_plots_do_not_need_every_value(chain, tmp_path):
    line = charts.Line(name="a", x=(1, 2, 3), y=(None, 2.0, None))
    written = figures.write_chart(charts.Chart(key="k", title="t", x="x", y="y", lines=(line,)), tmp_path / "k")
    assert [path.name for path in written] == ["k.svg", "k.png"]
    assert all(path.stat().st_size > 1000 for path in written)


@pytest.mark.parametrize("count", [2, 30])
def test_confusions_of_few_and_many_classes(count, tmp_path):
    classes = tuple(f"class {k} $\\frac$ 日本 and so on" for k in range(count))
    counts = torch.eye(count, dtype=torch.long) * 3
    counts[0, 1] = 2
    (drawn, _) = figures.write_confusion(Confusion(classes, counts), tmp_path / "c")
    sides = [float(ElementTree.parse(drawn).getroot().get(side).removesuffix("pt")) for side in ("width", "height")]
    assert sides[0] == sides[1] > 250, "long names leave room for the matrix"


def test_the_worst_confusions_come_first():
    counts = torch.tensor([[5, 1, 0], [3, 2, 0], [0, 0, 0]])
    confusion = Confusion(("a", "b", "c"), counts)
    assert confusion.worst(5) == [(1, 0, 3), (0, 1, 1)]
    assert confusion.accuracies == [pytest.approx(100 * 5 / 6), 40.0, None]


def test_confusions_count_the_predictions(chain):
    confusion = confusion_of(chain.tested, chain.classes)
    for truth, said in zip(chain.tested.label_N.tolist(), chain.tested.class_N.tolist(), strict=True):
        confusion.count_TP[truth, said] -= 1
    assert not confusion.count_TP.any()


@pytest.mark.parametrize("channels", [1, 2, 3])
def test_pictures_come_back_from_their_png(channels, tmp_path):
    import numpy as np
    from PIL import Image

    picture = torch.randint(256, (channels, 5, 7), dtype=torch.uint8)
    (tmp_path / "a.png").write_bytes(png(picture))
    shown = torch.from_numpy(np.array(Image.open(tmp_path / "a.png")))
    expected = picture.permute(1, 2, 0) if channels == 3 else picture[0]
    assert torch.equal(shown, expected)


def test_without_matplotlib_there_are_the_page_and_the_drawings(folder, type_in, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    code, _said, errors = type_in("report", folder / "learned", "--out", tmp_path / "out")
    assert code == 0
    assert "pip install 'maskconnect[plots]'" in errors
    assert sorted(path.name for path in (tmp_path / "out").rglob("*.[hs]*")) == ["index.html", "wiring.svg"]


def test_groups_with_many_lines_have_colors_in_order(folder, tmp_path):
    found = [read_run(path) for path in find_runs([folder])]
    groups = groups_of(found)
    chart = charts.accuracy_of_all([*groups, *groups, *groups])
    assert len(chart.lines) == 12
    figures.write_chart(chart, tmp_path / "many")
