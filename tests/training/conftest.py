import pytest
import runs


@pytest.fixture(scope="module")
def learned(tmp_path_factory):
    """A finished run of the tiny recipe."""
    folder = tmp_path_factory.mktemp("learned")
    runs.run(runs.tiny(folder), folder / "run", log_every=2)
    return folder / "run"
