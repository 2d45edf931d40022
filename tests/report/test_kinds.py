"""Blocks that have a kind show it, in drawings and on the page."""

import re
import xml.etree.ElementTree as ElementTree
from itertools import combinations

import pytest
import torch

import maskconnect as mc
from maskconnect.core.wiring import Layout
from maskconnect.report.player import player_of
from maskconnect.report.scene import LONGEST, Scene
from maskconnect.report.wires import usual_wires
from maskconnect.report.write import drawing_of, write_page

SPACE = "{http://www.w3.org/2000/svg}"


def layered():
    """Unlike branches; masks chosen by hand, so that some cannot reach the output."""
    model = mc.mixed((1, 1), 8, 10, fan_in=2)
    model.stack.masks.real.data = torch.rand_like(model.stack.masks.real) * model.stack.masks.candidate_TS
    return model


def chain():
    """A stack of the user's own modules, of which module 3 has no kind and cannot reach the output."""
    modules = [torch.nn.Linear(2, 2) for _ in range(6)]
    for module, kind in zip(modules, ("attention", "mlp", "attention", None, "<mlp> & more", "mlp"), strict=True):
        if kind is not None:
            module.kind = kind
    return mc.MaskedStack(modules, connectivity=[[], [0], [0, 1], [1, 2], [0, 2], [2, 4]])


def blocks(svg):
    """Each block of a drawing: its place, its text, its tooltip, whether it is unused."""
    found = []
    for group in ElementTree.fromstring(svg).iter(f"{SPACE}g"):
        if (group.get("class") or "").startswith("block"):
            place = [int(group.find(f"{SPACE}rect").get(name)) for name in ("x", "y", "width", "height")]
            texts = [group.find(f"{SPACE}{name}").text or "" for name in ("text", "title")]
            found.append((place, *texts, group.get("class") == "block unused"))
    return found


@pytest.mark.parametrize("make", [layered, chain])
def test_every_block_shows_its_kind_in_a_box_that_holds_it_and_touches_no_other(make):
    model = make()
    drawing = mc.draw(model)
    stack = next(part for part in model.modules() if isinstance(part, mc.MaskedStack))
    found = blocks(drawing.svg)
    assert [text for _, text, _, _ in found] == [getattr(module, "kind", "") for module in stack.flat()]
    assert any(unused for *_, unused in found)
    for (x, y, width, height), text, _, _ in found:
        assert width > 6 * len(text), "letters of 11 px are about 6 px wide"
        assert height > 11
        assert 0 < x < x + width < drawing.panels[0].width
        assert 0 < y < y + height < drawing.panels[0].scene.height
    for ((x1, y1, w, h), *_), ((x2, y2, *_), *_) in combinations(found, 2):
        assert abs(x1 - x2) > w or abs(y1 - y2) > h


@pytest.mark.parametrize("make", [layered, chain])
def test_wires_begin_and_end_at_the_edges_of_blocks(make):
    (panel,) = mc.draw(make()).panels
    scene = panel.scene
    for edge in panel.wires.edges:
        numbers = list(map(int, re.findall(r"-?\d+", scene.path(edge.source, edge.target))))
        ys = {scene.ys[edge.source] + scene.side // 2, scene.ys[edge.target] - scene.side // 2}
        if panel.wires.layout.layered or edge.target - edge.source == 1:
            assert {numbers[1], numbers[-1]} == ys
        else:
            assert numbers[0] == numbers[-2] == scene.xs[0] + scene.wide // 2


def test_tooltips_name_kinds_and_text_is_escaped():
    texts = [text for _, _, text, _ in blocks(mc.draw(chain()).svg)]
    assert texts[0] == "attention (module 0) reads the input"
    assert texts[3] == "module 3 reads mlp 1 (0.50), attention 2 (0.50); it cannot reach the output"
    assert texts[4] == "<mlp> & more (module 4) reads attention 0 (0.50), attention 2 (0.50)"
    assert texts[5] == "mlp (module 5) reads attention 2 (0.50), <mlp> & more 4 (0.50)"


def test_a_long_kind_is_cut_and_a_wide_one_gets_room():
    layout = Layout((1, 1), layered=False)
    long = Scene(layout, ("a" * 50, "b"))
    assert long.labels == ("a" * (LONGEST - 1) + "…", "b")
    assert Scene(layout, ("注意機構", "b")).wide > 4 * 11
    assert Scene(layout).wide == Scene(layout).side


def test_a_kind_that_is_not_text_is_not_drawn():
    modules = [torch.nn.Linear(2, 2) for _ in range(3)]
    before = mc.draw(mc.MaskedStack(modules, fan_in=1)).svg
    modules[0].kind = torch.nn.Identity()
    assert mc.draw(mc.MaskedStack(modules, fan_in=1)).svg == before


def test_unlike_modules_without_a_kind_show_their_classes():
    from maskconnect.report.wires import kinds_of

    unlike = [torch.nn.Linear(2, 2), torch.nn.Identity(), mc.Residual(torch.nn.Tanh())]
    assert kinds_of(mc.MaskedStack(unlike, fan_in=1)) == ("Linear", "Identity", "Tanh")
    drawn = mc.draw(mc.MaskedStack(unlike, fan_in=1)).svg
    assert re.findall(r">(\w+)</text></g>", drawn) == ["Linear", "Identity", "Tanh"]
    unlike[0].kind = "mine"
    assert kinds_of(mc.MaskedStack(unlike, fan_in=1)) == ("mine", "", ""), "a kind of your own is the only one"


def test_a_picture_of_pixels_has_the_text_too(tmp_path):
    from PIL import Image

    named, bare = chain(), chain()
    for module in bare.flat()[1:]:
        module.kind = ""
    dark = []
    for model in (named, bare):
        drawing = mc.draw(model, tmp_path / "a.png")
        scene, picture = drawing.panels[0].scene, Image.open(tmp_path / "a.png").convert("L")
        left, top = 16 + scene.xs[5] - scene.wide // 2 + 4, 16 + 34 + scene.ys[5] - 6
        inside = picture.crop((2 * left, 2 * top, 2 * (left + scene.wide - 8), 2 * (top + 12)))
        dark.append(sum(value < 100 for value in inside.tobytes()))
    assert dark[0] > 20 > dark[1] == 0


def test_a_run_of_unlike_branches_is_drawn_beside_a_chain_of_the_first(mixed, tmp_path):
    drawing = drawing_of(mixed)
    assert [panel.title for panel in drawing.panels] == ["Fixed-Prev", "Learned, K=2"]
    kinds = ("conv3x3", "maxpool3x3", "identity", "globalmean") * 2 + ("conv3x3",)
    assert all(panel.wires.kinds == kinds for panel in drawing.panels)
    assert drawing.panels[0].wires.alive == (True, False, False, False) * 2 + (True,)
    page = write_page([mixed], tmp_path / "page").read_text()
    assert "Fixed-Prev, a chain of conv3x3" in page
    assert "plain ResNeXt" not in page
    assert player_of(mixed, 10**6)["kinds"] == kinds


def test_plain_wirings_are_those_that_people_know():
    for model, sources in (
        (mc.resnet(14, 10, fan_in=2), ((), (0,), (1,), (2,), (3,), (4,))),
        (mc.resnext(11, 2, 2, 10, fan_in=1), ((), (), (0, 1), (0, 1), (2, 3), (2, 3))),
    ):
        assert usual_wires(model.spec).sources == sources
        assert usual_wires(model.spec).kinds == ()


def test_the_page_shows_kinds_in_blocks_and_cards(visit, mixed):
    page = visit(mixed)
    kinds = list(mixed.wires.kinds)
    for drawn in (".wiring", ".usual"):
        assert page.locator(f"{drawn} .block text").all_text_contents() == kinds
    fits = "b => b.querySelector('rect').getBBox().width - b.querySelector('text').getBBox().width"
    assert min(page.eval_on_selector_all(".wiring .block", f"all => all.map({fits})")) >= 2
    boxes = page.eval_on_selector_all(
        ".wiring .block rect", "all => all.map(r => [r.x.baseVal.value, r.y.baseVal.value, r.width.baseVal.value])"
    )
    scene = mixed.wires.scene
    assert boxes == [
        [x - scene.wide // 2, y - scene.side // 2, scene.wide] for x, y in zip(scene.xs, scene.ys, strict=True)
    ]
    page.locator(".wiring .block[data-k='8']").hover()
    card = page.locator(".panel").inner_text()
    assert card.startswith("conv3x3\n")
    assert "branch 0 of layer 2" in card
    assert "Reads branches of layer 1" in card
    for source in mixed.wires.sources[8]:
        assert f"{kinds[source]} {source - 4}" in card
    assert page.locator(".wiring .block[data-k='1']").get_attribute("aria-label") == "maxpool3x3, branch 1 of layer 0"


def test_the_plain_wiring_on_the_page_is_the_chain_of_the_first_kind(visit, mixed):
    page = visit(mixed)
    wires = usual_wires(mixed.recipe.model.shape)
    paths = page.eval_on_selector_all(".usual .base path", "all => all.map(p => p.getAttribute('d') || '')")
    drawn = sorted(re.findall(r"M[^M]+", "".join(paths)))
    assert drawn == sorted(wires.scene.path(edge.source, edge.target) for edge in wires.edges)
    unused = page.eval_on_selector_all(".usual .unused", "all => all.map(b => Number(b.dataset.k))")
    assert unused == [k for k, on in enumerate(wires.alive) if not on]


def test_on_a_phone_the_drawing_scrolls_and_the_page_does_not(visit, mixed):
    page = visit(mixed, viewport={"width": 360, "height": 740})
    assert page.evaluate("document.documentElement.scrollWidth") == 360
    size = page.evaluate("document.querySelector('.wiring').getBoundingClientRect().width")
    assert size == mixed.wires.scene.width, "text keeps its size"
