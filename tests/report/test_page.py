"""The page of a report, in a real browser."""

import json
import re
import shutil
from dataclasses import replace

import pytest
from made_up import CIFAR_RESNET, CIFAR_RESNEXT, made_up_run

from maskconnect.core.wiring import reaching_output
from maskconnect.report.runs import read_run
from maskconnect.report.scene import Scene
from maskconnect.report.write import write_page
from maskconnect.training.folder import find_runs

SHOWN = ".run:not([hidden])"


def drawn(page):
    """Every connection that is drawn, as the path that it is."""
    paths = page.eval_on_selector_all(f"{SHOWN} .wiring .base path", "all => all.map(p => p.getAttribute('d') || '')")
    return sorted(re.findall(r"M[^M]+", "".join(paths)))


def expected(wires):
    scene = wires.scene
    return sorted(scene.path(edge.source, edge.target) for edge in wires.edges)


def blocks(page, kind):
    """The blocks that are marked as of a kind."""
    return page.eval_on_selector_all(f"{SHOWN} .wiring .{kind}", "all => all.map(b => Number(b.dataset.k))")


def slide(page, epoch):
    page.locator(f"{SHOWN} input[type=range]").fill(str(epoch))


@pytest.mark.parametrize("name", ["learned", "resnext", "resnext-1"])
def test_the_page_shows_the_wiring_of_the_run(visit, folder, name):
    run = read_run(folder / name)
    page = visit(run)
    layout = run.recipe.model.layout()
    plain = json.loads((folder / name / "wiring.json").read_text())
    sources = layout.from_plain(plain, what="wiring.json")
    scene = Scene(layout)
    assert drawn(page) == sorted(scene.path(s, t) for t, row in enumerate(sources) for s in row)
    count = sum(map(len, sources))
    assert f"{count} connections" in page.locator(f"{SHOWN} .count").inner_text()
    alive = reaching_output(sources, layout.layers[-1])
    assert blocks(page, "unused") == [k for k, on in enumerate(alive) if not on]


@pytest.mark.parametrize("name", ["learned", "resnext"])
def test_the_slider_plays_the_whole_of_training_and_marks_the_freeze(visit, folder, name):
    run = read_run(folder / name)
    page = visit(run)
    for frame in run.frames:
        slide(page, frame.epoch)
        assert drawn(page) == expected(frame.wires)
        assert blocks(page, "unused") == [k for k, on in enumerate(frame.wires.alive) if not on]
    states = {0: "learning", 1: "learning", 2: "wiring frozen", 3: "wiring frozen", 6: "wiring frozen"}
    for epoch, state in states.items():
        slide(page, epoch)
        assert page.locator(f"{SHOWN} output").inner_text() == f"epoch {epoch} of 6: {state}"
    assert page.locator(f"{SHOWN} .phases i").get_attribute("style") == "left: 33.3333%;"
    assert page.locator(f"{SHOWN} .phases span").all_inner_texts() == ["learn", "frozen", "fine", "finer"]
    moment = "getComputedStyle(document.querySelector('.phases i'), '::after').content"
    assert page.evaluate(moment) == '"wiring frozen"', "the moment has another name than the phase"


def test_the_button_plays_from_the_start_to_the_end(visit, chain):
    page = visit(chain)
    page.locator(".play").click()
    page.wait_for_function("document.querySelector('.wiring').dataset.epoch === '1'")
    page.wait_for_function("document.querySelector('.wiring').dataset.epoch === '6'")
    assert page.locator(".play").get_attribute("aria-label") == "Play training"
    assert drawn(page) == expected(chain.wires)


def test_a_block_that_is_pointed_at_tells_its_sources_values_and_parameters(visit, chain):
    page = visit(chain)
    wires = chain.wires
    page.locator(".wiring .block[data-k='4']").hover()
    panel = page.locator(".panel").inner_text()
    assert panel.startswith("block 4")
    assert f"{chain.block_parameters[4]:,} parameters" in panel
    for source, value in zip(wires.sources[4], wires.values[4], strict=True):
        assert re.search(rf"\b{source}\s+{value:.3f}", panel)
    assert blocks(page, "isup") == list(wires.sources[4])
    assert blocks(page, "isdown") == [t for t, row in enumerate(wires.sources) if 4 in row]
    page.mouse.move(5, 5)
    assert "Point at a block" in page.locator(".panel").inner_text()


def closure(start, step):
    seen, todo = set(), [start]
    while todo:
        new = [k for k in step(todo.pop()) if k not in seen]
        seen.update(new)
        todo += new
    return sorted(seen)


def test_a_click_shows_all_ancestors_and_descendants_until_escape(visit, layered):
    page = visit(layered)
    wires = layered.wires
    k = next(k for k in range(4, 8) if wires.readers[k])
    page.locator(f".wiring .block[data-k='{k}']").click()
    before = closure(k, lambda t: wires.sources[t])
    after = closure(k, lambda s: [t for t, row in enumerate(wires.sources) if s in row])
    assert blocks(page, "isup") == before
    assert blocks(page, "isdown") == after
    assert f"Blocks before it: {len(before)}. Blocks after it: {len(after)}." in page.locator(".panel").inner_text()
    page.mouse.move(5, 5)
    assert blocks(page, "isup") == before, "a picked block stays"
    page.keyboard.press("Escape")
    assert blocks(page, "isup") == blocks(page, "isdown") == []


def test_everything_can_be_reached_by_the_keyboard(visit, layered):
    page = visit(layered)
    name = "(e => e.dataset.k ?? (e.type === 'range' ? 'range' : e.getAttribute('class')))(document.activeElement)"
    reached = []
    for _ in range(8):
        page.keyboard.press("Tab")
        reached.append(page.evaluate(name))
    assert "play" in reached
    assert "range" in reached
    assert reached.count("0") == 1, "blocks are one stop; arrows walk among them"
    assert not [name for name in reached if "wiring" in name], "the drawing itself is none"
    page.locator(".wiring .block[data-k='0']").focus()
    for key, block in (("ArrowDown", 4), ("ArrowRight", 5), ("ArrowUp", 1), ("ArrowLeft", 0), ("End", 11), ("Home", 0)):
        page.keyboard.press(key)
        assert page.evaluate("document.activeElement.dataset.k") == str(block)
        assert page.locator(".panel h4").inner_text() == f"branch {block % 4} of module {block // 4}"
    page.keyboard.press("Enter")
    assert "Blocks before it" in page.locator(".panel").inner_text()
    page.locator("input[type=range]").focus()
    page.keyboard.press("Home")
    assert page.locator("output").inner_text() == "epoch 0 of 6: learning"


@pytest.fixture(scope="session")
def large(tmp_path_factory):
    """Networks at the limits of what the page must show smoothly."""
    place = tmp_path_factory.mktemp("large")
    wide = (CIFAR_RESNEXT, "model.depth=29", "model.cardinality=64", "phase.learn.epochs=30")
    return [
        read_run(made_up_run(place / "deep", CIFAR_RESNET, "model.depth=218", "model.fan_in=20")),
        read_run(made_up_run(place / "wide", *wide, "model.fan_in=4")),
        read_run(made_up_run(place / "dense", *wide, "model.fan_in=32")),
    ]


CHANGES = """() => {
  window.changes = { elements: 0, paths: 0 };
  new MutationObserver(all => {
    window.changes.elements += all.filter(change => change.type === 'childList').length;
    window.changes.paths += all.filter(change => change.attributeName === 'd').length;
  }).observe(document.querySelector('.wiring'), { subtree: true, childList: true, attributes: true });
}"""
"""Counts changes of the drawing."""


@pytest.mark.parametrize("number", [0, 1, 2], ids=["108 blocks", "C=64, K=4", "C=64, K=32"])
def test_large_networks_stay_smooth_and_small(visit, large, number):
    run = large[number]
    page = visit(run)
    assert len(page.content()) < 2_000_000
    assert drawn(page) == expected(run.wires)
    slide(page, 11)
    page.evaluate(CHANGES)
    slide(page, 12)
    assert page.locator("output").inner_text().startswith("epoch 12 of")
    assert drawn(page) != expected(run.wires)
    changes = page.evaluate("window.changes")
    assert not changes["elements"], "thousands of new elements would be slow"
    assert 0 < changes["paths"] < 20  # benchmarks/page_speed.py times steps


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_phone_has_no_sideways_scroll(visit, folder, large, scheme):
    found = [read_run(path) for path in find_runs([folder])]
    for shown in (found, [found[0]], [found[3]], [large[0]], [large[1]]):
        page = visit(*shown, viewport={"width": 360, "height": 740}, color_scheme=scheme)
        assert page.evaluate("document.documentElement.scrollWidth") == 360
        paper = page.evaluate("getComputedStyle(document.body).backgroundColor")
        assert paper == {"light": "rgb(255, 255, 255)", "dark": "rgb(13, 17, 23)"}[scheme]


def test_runs_side_by_side(visit, folder):
    found = [read_run(path) for path in find_runs([folder])]
    page = visit(*found)
    rows = page.locator("section:not(.run) tbody tr").all_inner_texts()
    assert [row.split("\t")[0] for row in rows] == [
        "ResNet-14, Learned, K=2",
        "ResNet-14, Fixed-Prev, K=1",
        "ResNeXt {11,4,4}, Learned, K=2",
        "ResNeXt {11,4,4}, Learned, K=1",
    ]
    tested = [run.summary["test"]["top1"] for run in found[:2]]
    assert f"{sum(tested) / 2:.2f} ±" in rows[0]
    assert [row.split("\t")[1] for row in rows] == ["2", "1", "1", "1"]
    titles = page.locator("section:not(.run) figcaption").all_inner_texts()
    assert titles == [
        "Test accuracy against fan-in",
        "Test accuracy",
        "Active branches by depth",
        "Readers of each block",
    ]
    for number, run in enumerate(found):
        page.locator("#choose").select_option(str(number))
        assert page.locator(f"{SHOWN} h2").inner_text() == f"{run.network}, {run.wiring}, seed {run.recipe.seed}"
        assert (
            page.locator("#choose option")
            .nth(number)
            .inner_text()
            .startswith(f"{page.locator(f'{SHOWN} h2').inner_text()} — ")
        )
        assert drawn(page) == expected(run.wires)
    assert page.locator(f"{SHOWN} .usual").count() == 1


def test_a_fixed_wiring_has_no_slider_and_nothing_beside_it(visit, folder):
    page = visit(read_run(folder / "prev"))
    assert page.locator("input[type=range]").count() == 0
    assert page.locator(".usual").count() == 0
    assert len(drawn(page)) == 5


def test_plots_tell_the_values_of_the_metrics(visit, chain):
    page = visit(chain)
    plot = page.locator("figure.chart", has=page.locator("figcaption", has_text=re.compile("^Accuracy$"))).locator(
        "svg.plot"
    )
    plot.focus()
    for back in range(1, 3):
        page.keyboard.press("ArrowLeft")
        epoch = chain.epochs[-1 - back]
        tip = page.locator("#tip").inner_text()
        assert tip == f"epoch {epoch.epoch}\ntrain: {epoch.accuracy:.2f} %\ntest: {epoch.test_top1:.2f} %"
    plot.hover(position={"x": 200, "y": 80})
    assert page.locator("#tip").is_visible()
    page.mouse.move(5, 5)
    assert not page.locator("#tip").is_visible()
    phases = plot.locator("text.phase").all_text_contents()
    assert phases[:2] == ["learn", "frozen"]


def test_confusion_classes_and_mistakes_are_those_of_the_predictions(visit, chain):
    page = visit(chain)
    tested = chain.tested
    flat = json.loads(page.locator(".matrix").get_attribute("data-matrix"))["cells"]
    cells = list(zip(flat[::3], flat[1::3], flat[2::3], strict=True))
    assert sum(count for _, _, count in cells) == len(tested.label_N) == 60
    right = sum(count for truth, said, count in cells if truth == said)
    assert right == int((tested.label_N == tested.class_N).sum())
    assert 100 * right / 60 == pytest.approx(chain.summary["test"]["top1"])
    assert page.locator(".bars li").count() == 10
    shown = page.locator(".pictures img")
    assert shown.count() == min(12, 60 - right) > 0
    assert page.evaluate("[...document.images].every(i => i.complete && i.naturalWidth === 8)")
    first = tested.wrong[0]
    caption = page.locator(".pictures li").first.inner_text()
    assert caption.startswith(f"said {int(tested.class_N[first])} (")
    assert caption.endswith(f"is {int(tested.label_N[first])}")


HOSTILE = "</script><script>window.bad = 1</script><img src=x onerror='window.bad = 1'>\"&"


def test_words_from_files_are_words(visit, folder, tmp_path):
    place = tmp_path / "<b>run&"
    shutil.copytree(folder / "learned", place)
    classes = [f"{HOSTILE}{k}" for k in range(10)]
    (place / "final/classes.json").write_text(json.dumps(classes))
    environment = json.loads((place / "environment.json").read_text())
    environment[0] |= {"platform": HOSTILE, "arguments": ["train", HOSTILE], "packages": {HOSTILE: HOSTILE}}
    (place / "environment.json").write_text(json.dumps(environment))
    run = read_run(place)
    hostile = replace(run, recipe=replace(run.recipe, name=HOSTILE, about=HOSTILE))
    page = visit(hostile, read_run(folder / "prev"))
    assert page.evaluate("window.bad") is None
    assert HOSTILE in page.locator(".bars li span").first.inner_text()
    assert page.locator("main img:not(.pictures img)").count() == 0
    assert page.locator("script").count() == 2
    page = visit(hostile)
    assert HOSTILE in page.locator("header p").inner_text()
    assert page.evaluate("window.bad") is None


def test_nothing_in_the_page_points_elsewhere(folder, tmp_path):
    text = write_page([read_run(path) for path in find_runs([folder])], tmp_path / "page").read_text()
    addresses = re.findall(r"""(?:src|href|url|action)\s*[=(]\s*["']?([^"'\s>)]+)""", text)
    assert addresses
    assert all(address.startswith("data:image/png;base64,") for address in addresses)
    assert not re.search(r"@import|<link|<iframe|fetch\(|XMLHttpRequest|WebSocket|import\(", text)


def test_a_run_that_has_not_ended_is_shown_as_far_as_it_has_come(visit, folder, tmp_path):
    place = tmp_path / "running"
    shutil.copytree(folder / "learned", place)
    for name in ("summary.json", "wiring.json"):
        (place / name).unlink()
    shutil.rmtree(place / "final")
    for left in (place / "masks").glob("epoch-0002*"):
        left.unlink()
    lines = (place / "metrics.jsonl").read_text().splitlines(keepends=True)
    first = next(i for i, line in enumerate(lines) if '"kind": "epoch"' in line)
    (place / "metrics.jsonl").write_text("".join(lines[: first + 1]) + lines[first + 1][:30])
    page = visit(read_run(place))
    assert "epoch 1 of 6" in page.locator(".facts").inner_text()
    assert page.locator("output").inner_text() == "epoch 1 of 6: learning"
    assert page.locator(".phases span").all_inner_texts() == ["learn"]
    assert page.locator(".phases i").count() == 0
    shutil.rmtree(place / "masks")
    (place / "metrics.jsonl").unlink()
    for width in (360, 1240):
        page = visit(read_run(place), viewport={"width": width, "height": 740})
        assert "not yet tested" in page.locator(".facts").inner_text()
        assert "epoch 0 of 6" in page.locator(".facts").inner_text()
        assert page.locator(".controls").count() == 0, "there is nothing to play yet"
        assert len(drawn(page)) == 9
        assert page.evaluate("document.documentElement.scrollWidth") == width


def test_the_panel_is_seen_on_a_phone_and_moves_nothing(visit, large):
    page = visit(large[0], viewport={"width": 360, "height": 740}, has_touch=True)
    for k in (0, 40, 100):
        block = page.locator(f".wiring .block[data-k='{k}']")
        block.evaluate("b => b.scrollIntoView({ block: 'center' })")
        before = block.bounding_box()
        block.tap()
        assert block.bounding_box() == before
        panel = page.locator(".panel").bounding_box()
        assert panel["y"] >= 0
        assert panel["y"] + panel["height"] <= 741
        assert page.locator(".panel h4").inner_text() == f"block {k}"


def test_a_long_tip_stays_in_the_window(visit, folder, tmp_path):
    place = tmp_path / "long"
    shutil.copytree(folder / "learned", place)
    (place / "final/classes.json").write_text(json.dumps([f"{k}" + "long" * 30 for k in range(10)]))
    page = visit(read_run(place), viewport={"width": 360, "height": 400})
    page.locator(".matrix").hover(position={"x": 300, "y": 300})
    tip = page.locator("#tip").bounding_box()
    assert tip["x"] >= 0
    assert tip["x"] + tip["width"] <= 360
    assert tip["y"] + tip["height"] <= 400
    assert page.evaluate("document.documentElement.scrollWidth") == 360


def test_a_run_that_is_no_longer_shown_stops_playing(visit, chain, layered):
    page = visit(chain, layered)
    page.locator(f"{SHOWN} .play").click()
    page.locator("#choose").select_option("1")
    before = page.locator(".run").first.locator(".wiring").get_attribute("data-epoch")
    page.wait_for_timeout(900)
    assert page.locator(".run").first.locator(".wiring").get_attribute("data-epoch") == before


def test_epochs_that_are_left_out_are_said_to_be(visit, large):
    page, epochs = visit(large[2]), large[2].recipe.epochs
    kept = [epoch for epoch, *_ in json.loads(page.locator("#runs").text_content())[0]["frames"]]
    assert kept[:2] == [0, 4]
    slide(page, 3)
    assert page.locator("output").inner_text() == f"epoch 3 of {epochs}: learning (wiring of epoch 0)"
    slide(page, 4)
    assert page.locator("output").inner_text() == f"epoch 4 of {epochs}: learning"
