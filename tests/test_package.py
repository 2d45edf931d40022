"""What a person gets who installs the package."""

import importlib
import os
import re
import subprocess
import sys
import sysconfig
import tarfile
import textwrap
import tomllib
import venv
import zipfile
from pathlib import Path

import pytest

import maskconnect as mc
from maskconnect.errors import need

ROOT = Path(__file__).parent.parent


def run(*command, cwd=None):
    """Run a command; one of another environment does not see a checkout in PYTHONPATH."""
    alone = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    env = None if command[0] == sys.executable else alone
    words = [str(part) for part in command]
    return subprocess.run(words, cwd=cwd, env=env, capture_output=True, text=True, check=False)


def python(code, executable=sys.executable, cwd=None):
    result = run(executable, "-c", textwrap.dedent(code), cwd=cwd)
    assert result.returncode == 0, result.stderr
    return result.stdout


def test_at_most_25_public_names_all_of_them_there():
    assert len(mc.__all__) <= 25
    assert all(hasattr(mc, name) for name in mc.__all__)


def test_import_costs_at_most_a_fifth_of_a_second_over_torch():
    code = "import time, torch; start = time.perf_counter(); import maskconnect; print(time.perf_counter() - start)"
    assert min(float(python(code)) for _ in range(3)) < 0.2


def test_import_brings_nothing_heavy():
    code = "import sys, torch; before = set(sys.modules); import maskconnect; print(*set(sys.modules) - before)"
    brought = {name.split(".")[0] for name in python(code).split()} - set(sys.stdlib_module_names)
    assert brought == {"maskconnect"}


def test_a_missing_extra_is_one_sentence_that_names_it():
    with pytest.raises(
        mc.MaskConnectError, match=r"^no_such_thing is not installed; run: pip install 'maskconnect\[data\]'$"
    ):
        need("no_such_thing.inside", extra="data")
    assert need("json.decoder", extra="data").JSONDecoder


@pytest.mark.parametrize(("library", "module"), [("transformers", "huggingface"), ("lightning", "lightning")])
def test_a_callback_without_its_library_is_one_sentence_that_names_the_extra(library, module, monkeypatch):
    monkeypatch.setitem(sys.modules, library, None)
    said = rf"^{library} is not installed; run: pip install 'maskconnect\[integrations\]'$"
    with pytest.raises(mc.MaskConnectError, match=said):
        importlib.import_module(f"maskconnect.integrations.{module}")


USE = """
    import pathlib, sys, torch
    import maskconnect as mc
    assert pathlib.Path(mc.__file__).is_relative_to(sys.prefix), mc.__file__
    stack = mc.MaskedStack([torch.nn.Linear(4, 4) for _ in range(5)], fan_in=2)
    optimizer = torch.optim.SGD(mc.param_groups(stack, lr=0.1, mask_lr=0.3))
    mc.attach(optimizer, stack)
    stack(torch.randn(3, 4)).sum().backward()
    optimizer.step()
    mc.freeze(stack)
    print(mc.__version__, len(mc.wiring_of(stack)))
"""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    folder = tmp_path_factory.mktemp("wheel")
    built = run(sys.executable, "-m", "pip", "wheel", "-qq", "--no-deps", "--wheel-dir", folder, ROOT)
    assert built.returncode == 0, built.stderr
    (path,) = folder.glob("maskconnect-*.whl")
    return path


def test_the_wheel_works_in_another_environment_outside_the_checkout(wheel, tmp_path):
    """The other environment sees this one's torch, but not its maskconnect: path files do not nest."""
    venv.create(tmp_path / "env", with_pip=True)
    executable = tmp_path / "env" / "bin" / "python"
    installed = run(executable, "-m", "pip", "install", "-qq", "--no-deps", "--no-index", wheel)
    assert installed.returncode == 0, installed.stderr
    (site,) = (tmp_path / "env" / "lib").glob("python*/site-packages")
    (site / "borrowed.pth").write_text(sysconfig.get_path("purelib"))
    assert python(USE, executable, cwd=tmp_path).split() == [mc.__version__, "5"]
    files = run(executable, "-m", "pip", "show", "-f", "maskconnect").stdout
    assert "maskconnect/py.typed" in files
    assert "LICENSE" in files


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_the_wheel_brings_all_that_it_needs(wheel, tmp_path):
    venv.create(tmp_path / "env", with_pip=True)
    executable = tmp_path / "env" / "bin" / "python"
    installed = run(executable, "-m", "pip", "install", "-qq", "-c", ROOT / "constraints.txt", wheel)
    assert installed.returncode == 0, installed.stderr
    assert python(USE, executable, cwd=tmp_path).split() == [mc.__version__, "5"]


def names_in(path):
    """The files of an sdist (without its top folder) or a wheel."""
    if path.suffix == ".whl":
        return set(zipfile.ZipFile(path).namelist())
    with tarfile.open(path) as archive:
        return {member.name.partition("/")[2] for member in archive if member.isfile()}


@pytest.mark.slow
def test_what_is_published_is_complete_and_brings_no_tests(tmp_path):
    """Build as a release does, an sdist and from it a wheel, and install the wheel in a clean environment."""
    venv.create(tmp_path / "env", with_pip=True)
    executable = tmp_path / "env" / "bin" / "python"
    for command in (["pip", "install", "-qq", "build"], ["build", "--outdir", tmp_path / "dist", ROOT]):
        done = run(executable, "-m", *command, cwd=tmp_path)
        assert done.returncode == 0, done.stderr
    (sdist,), (wheel,) = (tmp_path / "dist").glob("*.tar.gz"), (tmp_path / "dist").glob("*.whl")
    source, shipped = names_in(sdist), names_in(wheel)
    package = ROOT / "src" / "maskconnect"
    expected = {f"maskconnect/{path.relative_to(package)}" for path in package.rglob("*") if path.is_file()}
    expected = {name for name in expected if "__pycache__" not in name}
    assert {name for name in shipped if ".dist-info/" not in name} == expected
    assert {
        "maskconnect/recipes/quick/digits.toml",
        "maskconnect/report/page.js",
        "maskconnect/report/page.css",
    } <= shipped
    assert {"LICENSE", "README.md", "CHANGELOG.md", "CONTRIBUTING.md", "Makefile", "examples/mlp.py"} <= source
    assert {"tests/test_package.py", "docs/notebooks/own_modules.ipynb", "tools/make_venv.py"} <= source
    assert not any(name.startswith("research/evidence/") for name in source)
    assert sdist.stat().st_size < 2_000_000
    assert wheel.stat().st_size < 1_000_000
    installed = run(executable, "-m", "pip", "install", "-qq", "--no-deps", "--no-index", wheel)
    assert installed.returncode == 0, installed.stderr
    (site,) = (tmp_path / "env" / "lib").glob("python*/site-packages")
    (site / "borrowed.pth").write_text(sysconfig.get_path("purelib"))
    assert python(USE, executable, cwd=tmp_path).split() == [mc.__version__, "5"]
    command = tmp_path / "env" / "bin" / "maskconnect"
    for words, said in (
        (["--help"], "usage: maskconnect"),
        (["recipes"], "quick/digits"),
        (["--version"], mc.__version__),
    ):
        done = run(command, *words, cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        assert said in done.stdout


def test_the_extra_all_has_every_extra_that_a_user_of_the_command_line_needs():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    (everything,) = extras["all"]
    named = set(everything.removeprefix("maskconnect[").removesuffix("]").split(","))
    assert named == extras.keys() - {"all", "dev", "docs", "integrations"}  # integrations: libraries that users have
    code = "\n".join(path.read_text() for path in (ROOT / "src").rglob("*.py"))
    assert set(re.findall(r'extra="(\w+)"', code)) <= extras.keys()


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_make_run_works_in_a_fresh_clone_and_reuses_what_is_there(tmp_path):
    cloned = run("git", "clone", "-q", ROOT, tmp_path / "clone")
    assert cloned.returncode == 0, cloned.stderr
    first = run("make", "run", cwd=tmp_path / "clone")
    assert first.returncode == 0, first.stderr
    assert "setting up .venv" in first.stdout
    assert "Learned, K=2" in first.stdout
    second = run("make", "run", cwd=tmp_path / "clone")
    assert second.returncode == 0, second.stderr
    assert "setting up" not in second.stdout
    assert "24 already finished" in second.stdout + second.stderr
    table = first.stdout[first.stdout.index("wiring  ") :]
    assert second.stdout.endswith(table)  # all that comes after the runs is the same


def test_integrations_are_found_without_importing_them_first():
    code = "import maskconnect as mc; print(mc.integrations.fsdp.shard.__name__)"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout == "shard\n"
    with pytest.raises(AttributeError, match="has no attribute 'keras'"):
        _ = mc.integrations.keras
