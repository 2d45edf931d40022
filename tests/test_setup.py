"""Which build of torch the set-up takes, without installing any."""

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
CUDA = {"version": "2.13.0", "requires_dist": ["filelock", "nvidia-cublas==13.0; platform_system == 'Linux'"]}
CPU = {"version": "2.13.0+cpu", "requires_dist": ["filelock", "numpy"]}


@pytest.fixture
def setup(monkeypatch):
    spec = importlib.util.spec_from_file_location("make_venv", ROOT / "tools" / "make_venv.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setattr(module.platform, "system", lambda: "Linux")
    monkeypatch.setattr(module, "has_accelerator", lambda: False)
    return module


def installed(setup, monkeypatch, *, pip_takes, choice="", uv_fails=False):
    """The commands that would have been run to install torch."""
    commands = []

    def run(command, **_):
        commands.append([Path(command[0]).name, *map(str, command[1:])])
        if uv_fails and "--torch-backend=cpu" in command:
            raise subprocess.CalledProcessError(1, command)

    monkeypatch.setattr(setup, "what_pip_takes", lambda: pip_takes)
    monkeypatch.setattr(setup.subprocess, "run", run)
    setup.install_torch(choice)
    return [
        "uv " + next(part for part in command if part.startswith("--torch-backend")) if command[0] == "uv" else "pip"
        for command in commands
        if command[-1] == "torch"
    ]


def test_a_cpu_build_is_taken_from_pip(setup, monkeypatch):
    assert installed(setup, monkeypatch, pip_takes=CPU) == ["pip"]


def test_cuda_without_an_accelerator_is_left_aside_for_the_cpu_build_through_uv(setup, monkeypatch):
    assert installed(setup, monkeypatch, pip_takes=CUDA) == ["uv --torch-backend=cpu"]


def test_where_uv_fails_pip_is_taken_after_all(setup, monkeypatch):
    assert installed(setup, monkeypatch, pip_takes=CUDA, uv_fails=True) == ["uv --torch-backend=cpu", "pip"]


def test_cuda_with_an_accelerator_is_taken_from_pip(setup, monkeypatch):
    monkeypatch.setattr(setup, "has_accelerator", lambda: True)
    assert installed(setup, monkeypatch, pip_takes=CUDA) == ["pip"]


def test_elsewhere_than_on_linux_pip_is_right(setup, monkeypatch):
    monkeypatch.setattr(setup.platform, "system", lambda: "Darwin")
    assert installed(setup, monkeypatch, pip_takes=CUDA) == ["pip"]


@pytest.mark.parametrize(("choice", "expected"), [("pip", ["pip"]), ("cu130", ["uv --torch-backend=cu130"])])
def test_the_environment_variable_overrides(setup, monkeypatch, choice, expected):
    assert installed(setup, monkeypatch, pip_takes=CUDA, choice=choice) == expected


def test_where_the_pinned_version_is_there_nothing_is_installed(setup, monkeypatch):
    assert installed(setup, monkeypatch, pip_takes=None) == []


def test_pip_is_really_asked_and_finds_the_pinned_version_here(setup):
    assert setup.what_pip_takes() is None


def test_constraints_pin_what_pyproject_gives_as_a_range():
    assert "torch==2.13.0" in (ROOT / "constraints.txt").read_text()
    assert '"torch>=' in (ROOT / "pyproject.toml").read_text()


@pytest.mark.parametrize("chosen", ["not slow and not docs and not integrations", "slow"])
def test_other_selections_do_not_read_the_tests_of_integrations(chosen):
    words = [sys.executable, "-m", "pytest", "-q", "--collect-only", "-p", "no:cacheprovider", "-m", chosen]
    done = subprocess.run([*words, "tests/integrations"], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == pytest.ExitCode.NO_TESTS_COLLECTED, done.stdout + done.stderr
    assert "deselected" not in done.stdout  # which would say that the files were imported
