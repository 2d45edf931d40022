"""`mc.draw`: the wiring of a model as a picture."""

import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest
import torch

import maskconnect as mc
from maskconnect.core.wiring import Layout
from maskconnect.report.scene import Scene

GOLDEN = Path(__file__).parent / "golden"
SPACE = "{http://www.w3.org/2000/svg}"


def chain():
    """Six modules; module 3 reaches the output through nothing."""
    wiring = [[], [0], [0, 1], [1, 2], [0, 2], [2, 4]]
    return mc.MaskedStack([torch.nn.Linear(2, 2) for _ in range(6)], connectivity=wiring)


def learned():
    """Three modules of three branches whose masks have been learned."""
    stack = mc.MaskedStack([[torch.nn.Linear(2, 2) for _ in range(3)] for _ in range(3)], fan_in=2)
    stack.masks.real.data = torch.tensor([[0.8, 0.1, 0.1], [0.5, 0.5, 0.0], [0.2, 0.3, 0.5]] * 2)
    mc.freeze(stack)
    return stack


@pytest.mark.parametrize(("name", "make"), [("chain", chain), ("layered", learned)])
def test_small_wirings_are_drawn_as_they_were(name, make):
    """Look at a drawing that has changed, then keep it: mc.draw(model, "tests/report/golden/NAME.svg")."""
    assert mc.draw(make()).svg == (GOLDEN / f"{name}.svg").read_text()


def test_every_connection_is_drawn_once_and_the_surest_are_the_strongest():
    root = ElementTree.fromstring(mc.draw(learned()).svg)
    wires = [path for path in root.iter(f"{SPACE}path") if path.get("class") != "end"]
    assert len(wires) == 2 * 3 * 2
    scene = Scene(Layout((3, 3, 3), layered=True))
    by_path = {path.get("d"): path for path in wires}
    wiring = learned().masks.current_wiring().sources
    assert set(by_path) == {scene.path(s, t) for t, row in enumerate(wiring) for s in row}
    # Target 3 has its masks at 0.8 and 0.1 of its candidates, in the order 0, then 1 (a tie goes to the nearer).
    sure, unsure = (by_path[scene.path(s, 3)] for s in (0, 1))
    assert float(sure.get("stroke-width")) > float(unsure.get("stroke-width"))
    assert float(sure.get("stroke-opacity")) > float(unsure.get("stroke-opacity"))


def test_what_cannot_reach_the_output_is_faded():
    root = ElementTree.fromstring(mc.draw(chain()).svg)
    unused = [g.find(f"{SPACE}title").text for g in root.iter(f"{SPACE}g") if g.get("class") == "block unused"]
    assert unused == ["module 3 reads 1 (0.50), 2 (0.50); it cannot reach the output"]
    lost = [path for path in root.iter(f"{SPACE}path") if path.get("class") == "lost"]
    assert len(lost) == 2


def test_a_drawing_shows_itself_in_a_notebook_and_is_written_to_files(tmp_path):
    model = torch.nn.Sequential(learned(), torch.nn.Linear(2, 2))
    drawing = mc.draw(model, tmp_path / "wiring.svg")
    assert drawing._repr_svg_() == (tmp_path / "wiring.svg").read_text()
    mc.draw(model, str(tmp_path / "wiring.PNG"))
    assert (tmp_path / "wiring.PNG").read_bytes()[:4] == b"\x89PNG"


def test_masks_that_are_still_learned_are_drawn_by_their_top_k():
    stack = mc.MaskedStack([torch.nn.Linear(2, 2) for _ in range(5)], fan_in=2)
    before = mc.draw(stack)
    assert "being learned, K=2" in before.svg
    assert stack.training
    assert not stack.masks.is_frozen
    mc.freeze(stack)
    assert mc.draw(stack).svg == before.svg.replace("being learned", "learned")


def test_every_stack_of_a_model_is_drawn_under_its_name():
    first, second = chain(), learned()
    model = torch.nn.ModuleDict({"a<b": first, "c": second})
    svg = mc.draw(model).svg
    assert ">a&lt;b: fixed, K=2<" in svg
    assert ">c: learned, K=2<" in svg


def test_rewired_models_and_the_papers_networks_are_drawn():
    model = torch.nn.Sequential(torch.nn.Sequential(*(torch.nn.Linear(4, 4) for _ in range(4))))
    mc.rewire(model, "0", fan_in=2)
    networks = {
        model: 1 + 2 + 2,
        mc.resnet(20, 10, fan_in=3): 1 + 2 + 6 * 3,
        mc.resnext(20, 4, 4, 10, fan_in=2): 5 * 4 * 2,
    }
    for network, connections in networks.items():
        root = ElementTree.fromstring(mc.draw(network).svg)
        assert len([path for path in root.iter(f"{SPACE}path") if path.get("class") != "end"]) == connections


def test_the_title_tells_fan_ins_that_differ():
    modules = [torch.nn.Identity() for _ in range(5)]
    assert "being learned, K=1 to 3<" in mc.draw(mc.MaskedStack(modules, fan_in=[1, 1, 3, 1])).svg
    assert "being learned, K=3<" in mc.draw(mc.MaskedStack(modules, fan_in=3)).svg


def test_a_single_module_is_drawn():
    svg = mc.draw(mc.MaskedStack([torch.nn.Identity()], fan_in=1)).svg
    assert svg.count('class="block"') == 1


@pytest.mark.parametrize(
    ("model", "path", "sentence"),
    [
        (torch.nn.Linear(2, 2), None, "there is no MaskedStack in this Linear"),
        ("a model", None, "model is a str"),
        (learned(), "wiring.pdf", r"path is 'wiring.pdf'; a drawing is written as .svg or .png"),
        (learned(), "wiring", "path is 'wiring'"),
        (learned(), "nowhere/wiring.svg", "nowhere/wiring.svg cannot be written: No such file"),
        (learned().to("meta"), None, "the masks are on the meta device"),
    ],
)
def test_a_mistake_is_one_sentence(model, path, sentence):
    with pytest.raises(mc.ConfigError, match=sentence):
        mc.draw(model, path)


def test_rows_are_centered_and_nothing_leaves_the_picture():
    for sizes in ((1, 4, 2), (64,) * 3, (5,)):
        scene = Scene(Layout(sizes, layered=True))
        half = scene.side // 2
        assert min(scene.xs) - half > 0
        assert max(scene.xs) + half < scene.width
        assert max(scene.ys) + half < scene.height
        middles = {(scene.xs[row[0]] + scene.xs[row[-1]]) // 2 for row in scene.layout.layers}
        assert max(middles) - min(middles) <= 1
    for length in (3, 30, 108):
        scene = Scene(Layout((1,) * length, layered=False))
        assert scene.xs[0] + scene.side // 2 + 0.75 * scene.bulges[-1] < scene.width
        assert max(scene.ys) < scene.height
