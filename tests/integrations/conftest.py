"""Tests against the real libraries; run by `make test-integrations`.

Every test in this folder has the marker `integrations`. Other selections (`-m "not slow"`, `-m docs`) do not read the
files, which import libraries at their top that the rest of the tests does not need.
"""

from pathlib import Path

import pytest
import torchvision_operators  # noqa: F401  before any library that imports torchvision

HERE = Path(__file__).parent


def pytest_ignore_collect(collection_path, config):
    chosen = config.getoption("markexpr")
    return True if chosen and "integrations" not in chosen.replace("not integrations", "") else None


def pytest_collection_modifyitems(items):
    for item in items:
        if item.path.is_relative_to(HERE):
            item.add_marker(pytest.mark.integrations)
