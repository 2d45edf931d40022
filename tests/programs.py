"""Programs that some tests need, and that pip cannot bring."""

import os

import pytest
from get_packages import find


def needed(name):
    """The path of a program. Without it tests are skipped; where CI=true they fail."""
    found = find(name)
    if found is None:
        sentence = f"there is no {name}; see tools/get_packages.py"
        if os.environ.get("CI") == "true":
            pytest.fail(f"{sentence} (CI=true)")
        pytest.skip(sentence)
    return found
