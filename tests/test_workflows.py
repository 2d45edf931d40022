"""The files for GitHub are valid, and run the same commands as `.ci/run`."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
FILES = sorted((ROOT / ".github").rglob("*.yml"))
WORKFLOWS = [path for path in FILES if path.parent.name == "workflows"]
CALL = re.compile(r"\bmake ([\w-]+)")


def targets_of(makefile):
    return set(re.findall(r"^([\w-]+):(?!=)", makefile, re.MULTILINE))


def commands(workflow):
    """Every command of a workflow: those of its steps, and those that a matrix puts in."""
    for job in workflow["jobs"].values():
        yield from (row["run"] for row in job.get("strategy", {}).get("matrix", {}).get("include", []))
        yield from (step["run"] for step in job["steps"] if "run" in step)


def called(path):
    yaml = pytest.importorskip("yaml")
    return {target for command in commands(yaml.safe_load(path.read_text())) for target in CALL.findall(command)}


def test_all_files_are_there():
    names = {path.name for path in FILES}
    assert names == {"tests.yml", "docs.yml", "release.yml", "bug.yml", "feature.yml"}
    assert (ROOT / ".github/pull_request_template.md").is_file()


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_a_file_is_valid_yaml_with_what_github_needs(path):
    found = pytest.importorskip("yaml").safe_load(path.read_text())
    needed = {"name", "jobs", "permissions"} if path in WORKFLOWS else {"name", "description", "body"}
    assert needed <= found.keys()
    for job in found.get("jobs", {}).values():
        assert {"runs-on", "steps"} <= job.keys()


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.name)
def test_every_make_target_that_a_workflow_calls_exists(path):
    assert called(path) <= targets_of((ROOT / "Makefile").read_text())


def test_the_tests_of_a_pull_request_are_those_of_the_local_command():
    local = set(re.findall(r"^make ([\w-]+)$", (ROOT / ".ci/run").read_text(), re.MULTILINE))
    assert {"test", "test-docs", "test-slow", "test-integrations"} <= local
    both = called(ROOT / ".github/workflows/tests.yml") | called(ROOT / ".github/workflows/docs.yml")
    assert local <= both


def test_a_release_is_published_only_after_all_of_the_local_command():
    release = pytest.importorskip("yaml").safe_load((ROOT / ".github/workflows/release.yml").read_text())
    assert ".ci/run" in [step.get("run") for step in release["jobs"]["test"]["steps"]]
    assert release["jobs"]["build"]["needs"] == "test"
    assert release["jobs"]["publish"]["needs"] == "build"


def test_a_missing_target_would_be_found():
    assert CALL.findall("make test-docs && make tset") == ["test-docs", "tset"]
    assert "tset" not in targets_of("test: venv\n\trun\nBIN := x\n")
