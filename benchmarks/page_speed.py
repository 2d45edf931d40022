"""Time a step of the page's slider, from the key press to the next frame, in a real Chromium.

    python benchmarks/page_speed.py        prints a table, writes benchmarks/page_speed.json

The browser measures (Event Timing), in units of 8 ms; less than 16 ms counts as 16. The runs are synthetic: the largest
networks that the page must show smoothly, with most connections changing at every step.
"""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path += [str(ROOT / "tests"), str(ROOT / "tools")]

from get_packages import find  # noqa: E402
from made_up import CIFAR_RESNET, CIFAR_RESNEXT, made_up_run  # type: ignore[import-not-found]  # noqa: E402
from playwright.sync_api import Page, sync_playwright  # noqa: E402

from maskconnect.report.runs import read_run  # noqa: E402
from maskconnect.report.write import write_page  # noqa: E402

WIDE = (CIFAR_RESNEXT, "model.depth=29", "model.cardinality=64", "phase.learn.epochs=30")
CASES = {
    "ResNet-38, K=10": (CIFAR_RESNET,),
    "ResNet of 108 blocks, K=20": (CIFAR_RESNET, "model.depth=218", "model.fan_in=20"),
    "ResNeXt {29,4,64}, K=4": (*WIDE, "model.fan_in=4"),
    "ResNeXt {29,4,64}, K=32": (*WIDE, "model.fan_in=32"),
}
OBSERVE = """() => {
  window.steps = [];
  new PerformanceObserver(list => {
    for (const entry of list.getEntries()) if (entry.name === 'keydown') window.steps.push(entry.duration);
  }).observe({ type: 'event', durationThreshold: 16 });
}"""
STEPS = 25


def slider_steps(page: Page, count: int = STEPS) -> list[float]:
    """Press the arrow key of the slider `count` times; return the milliseconds of steps that changed the picture."""
    slider, drawing = page.locator("input[type=range]"), page.locator(".wiring")
    slider.fill("0")
    slider.focus()
    page.evaluate(OBSERVE)
    found = []
    for _ in range(count):
        before = drawing.get_attribute("data-frame")
        page.evaluate("window.steps.length = 0")
        page.keyboard.press("ArrowRight")
        page.wait_for_timeout(250)  # so that no step waits for the one before
        durations: list[float] = page.evaluate("window.steps")
        if drawing.get_attribute("data-frame") != before:
            found.append(durations[0] if durations else 16.0)
    return sorted(found)


def main() -> None:
    """Measure every case."""
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as place, sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=find("chromium"), args=["--no-sandbox"])
        for number, (name, recipe) in enumerate(CASES.items()):
            run = read_run(made_up_run(Path(place) / f"run{number}", *recipe))
            written = write_page([run], Path(place) / f"page{number}")
            page = browser.new_page(viewport={"width": 1240, "height": 900})
            page.goto(written.as_uri())
            steps = slider_steps(page)
            found[name] = {
                "connections": len(run.wires.edges),
                "page_bytes": written.stat().st_size,
                "median_ms": statistics.median(steps),
                "longest_ms": steps[-1],
                "steps": len(steps),
            }
            print(f"{name:28} {found[name]}")
            page.close()
        version = browser.version
        browser.close()
    report = {"browser": f"Chromium {version}, headless, no GPU", "cases": found}
    (ROOT / "benchmarks" / "page_speed.json").write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
