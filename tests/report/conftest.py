"""Small runs, what a report makes of them, and a real browser to look at it."""

import programs
import pytest
import runs
import torch
from recordings import TwoStacks, optimizer_of, train

import maskconnect as mc
from maskconnect.report.runs import read_run
from maskconnect.report.write import write_page

RESNEXT = ("model.architecture=resnext", "model.depth=11", "model.width=4", "model.cardinality=4")


@pytest.fixture(scope="session")
def folder(tmp_path_factory):
    """A folder of runs: a learned ResNet and ResNeXt, each with two seeds, and a fixed ResNet."""
    place = tmp_path_factory.mktemp("reports")
    runs.run(runs.tiny(place), place / "runs/learned")
    runs.run(runs.tiny(place, seed=1), place / "runs/learned-1")
    runs.run(runs.tiny(place, "model.connectivity=prev"), place / "runs/prev")
    runs.run(runs.tiny(place, *RESNEXT), place / "runs/resnext")
    runs.run(runs.tiny(place, *RESNEXT, "model.fan_in=1", seed=1), place / "runs/resnext-1")
    return place / "runs"


@pytest.fixture(scope="session")
def chain(folder):
    """A learned ResNet."""
    return read_run(folder / "learned")


@pytest.fixture(scope="session")
def layered(folder):
    """A learned ResNeXt."""
    return read_run(folder / "resnext")


@pytest.fixture(scope="session")
def mixed(tmp_path_factory):
    """A learned network of unlike branches."""
    place = tmp_path_factory.mktemp("mixed")
    runs.run(runs.tiny(place, *runs.MIXED), place / "run")
    return read_run(place / "run")


@pytest.fixture
def recorded(tmp_path):
    """A recording of two epochs of learning and one of fine-tuning, and its model."""
    torch.manual_seed(0)
    model = TwoStacks()
    optimizer = optimizer_of(model, steps=6, decay=True)
    with mc.Recorder(model, tmp_path / "mine", optimizer=optimizer, every=2) as recorder:
        train(model, optimizer, recorder, epochs=2)
        mc.freeze(model)
        train(model, optimizer, recorder, epochs=1, accuracy=0.75)
    return tmp_path / "mine", model


@pytest.fixture(scope="session")
def browser():
    """Chromium."""
    found = programs.needed("chromium")
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=found, args=["--no-sandbox"])
        yield chromium
        chromium.close()


class Visit:
    """A page in the browser, and what must not happen while it is looked at."""

    def __init__(self, browser, address, **options):
        self.complaints, self.requests = [], []
        self.page = browser.new_page(**options)
        self.page.on("console", lambda message: self.complaints.append(f"{message.type}: {message.text}"))
        self.page.on("pageerror", lambda error: self.complaints.append(str(error)))
        self.page.on("dialog", lambda dialog: self.complaints.append(f"dialog: {dialog.message}"))
        self.page.on("request", lambda request: self.requests.append(request.url))
        self.page.goto(address)


@pytest.fixture
def visit(browser, tmp_path):
    """Write the page of some runs and open it; at the end there was no error, and no request except the page."""
    visits = []

    def visit(*found, **options):
        page = write_page(found, tmp_path / f"page{len(visits)}")
        size = {"viewport": {"width": 1240, "height": 900}}
        visits.append((page.as_uri(), Visit(browser, page.as_uri(), **(size | options))))
        return visits[-1][1].page

    yield visit
    for address, made in visits:
        made.page.close()
        assert made.complaints == []
        assert [url for url in made.requests if not url.startswith("data:")] == [address]
