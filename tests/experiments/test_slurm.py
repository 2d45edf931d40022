"""`--engine slurm`, with a real SLURM on this machine; and what needs none."""

import json
import os
import signal
import stat
import time

import cluster
import programs
import pytest
import runs

from maskconnect.errors import ConfigError
from maskconnect.experiments import slurm as engine
from maskconnect.experiments.grid import Grid
from maskconnect.experiments.slurm import Queue, SlurmJob, settings_of

SHORT = [f"--set=phase.{name}.epochs=1" for name in ("learn", "freeze", "fine", "finer")]
LONG = ["--set=phase.learn.epochs=80", *SHORT[1:], "--threads=1", "--checkpoint-every=1"]


@pytest.fixture(scope="module")
def environment(tmp_path_factory):
    """Where the commands of SLURM find it."""
    programs.needed("slurm")
    with cluster.running(tmp_path_factory.mktemp("slurm")) as found:
        yield found | {"OMP_NUM_THREADS": "1"}


@pytest.fixture
def begin(environment, tmp_path, monkeypatch, type_in):
    """Start a sweep of the tests' recipe as a process; the same words may be typed in."""
    runs.tiny(tmp_path)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)

    def begin(*words):
        return runs.command("sweep", "tiny.toml", "--engine=slurm", "--out=grid", *words, cwd=tmp_path)

    yield begin
    cluster.ask(environment, "scancel", "--user", str(os.getuid()))


def until(is_so, seconds=120.0):
    deadline = time.monotonic() + seconds
    while not (found := is_so()):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    return found


def learning(folder):
    """Whether a run has saved something, and continues."""
    return any((folder / "checkpoints").glob("step-*"))


@pytest.mark.slow
def test_four_cells_of_which_one_is_cancelled_and_one_is_killed_and_both_continue(
    begin, environment, type_in, tmp_path
):
    grid = tmp_path / "grid"
    words = ["--seeds=4", *LONG]
    process = begin(*words)
    until(lambda: learning(grid / "seed=0") and learning(grid / "seed=1"))
    numbers = json.loads((grid / "slurm/jobs.json").read_text())
    assert {number.partition("_")[0] for number in numbers.values()} == {numbers["seed=0"].partition("_")[0]}, (
        "one array"
    )
    cluster.ask(environment, "scancel", numbers["seed=0"])
    cluster.kill(environment, numbers["seed=1"])
    said, errors = process.communicate(timeout=300)
    assert (process.returncode, errors) == (1, "")
    lines = said.splitlines()
    assert lines[0] == "4 runs in grid, through SLURM"
    assert any("seed=0 FAILED: stopped by SIGTERM; progress is saved." in line for line in lines)
    assert any(f"seed=1 FAILED: ended by SLURM: job {numbers['seed=1']} is FAILED; see" in line for line in lines), said
    assert sum("test accuracy" in line for line in lines) >= 2, "the others continue"
    code, said, errors = type_in("sweep", "tiny.toml", "--engine=slurm", "--out=grid", *words)
    assert (code, errors) == (0, "")
    assert "2 already finished" in said
    for seed in (0, 1):
        assert "resuming from step" in (grid / f"logs/seed={seed}.log").read_text()
    assert type_in("train", "tiny.toml", "--seed=1", *LONG, "--out=alone")[0] == 0
    assert runs.results(grid / "seed=1") == runs.results(tmp_path / "alone"), "as if nothing had happened"


@pytest.mark.slow
def test_jobs_outlive_the_command_which_finds_them_again_and_control_c_ends_them(begin, environment, tmp_path):
    words = ["--seeds=3", *LONG, "--set=phase.freeze.epochs=2000"]
    first = begin(*words)
    grid = tmp_path / "grid"
    until(lambda: learning(grid / "seed=0"))
    first.kill()
    first.communicate()
    numbers = (grid / "slurm/jobs.json").read_text()
    second = begin(*words)
    assert second.stdout.readline() == "3 runs in grid, through SLURM\n"
    assert second.stdout.readline() == "3 of them are already in the queue\n"
    second.send_signal(signal.SIGINT)
    said, errors = second.communicate(timeout=120)
    assert (second.returncode, errors) == (130, "")
    assert said.splitlines() == [
        "stopping 3 runs; a second signal stops at once",
        "stopped by SIGINT; progress is saved. Run the same command again to resume.",
    ]
    assert (grid / "slurm/jobs.json").read_text() == numbers, "nothing was queued twice"
    assert cluster.ask(environment, "squeue", "--noheader") == ""
    assert "stopped by SIGTERM; progress is saved" in (grid / "logs/seed=0.log").read_text()


@pytest.mark.slow
def test_a_job_whose_time_is_nearly_up_saves_and_queues_itself_again(begin, environment, tmp_path):
    process = begin(*LONG)
    grid = tmp_path / "grid"
    until(lambda: learning(grid / "seed=0"))
    number = json.loads((grid / "slurm/jobs.json").read_text())["seed=0"]
    cluster.ask(environment, "scancel", "--signal=USR2", number)
    until(lambda: cluster.ask(environment, "squeue", "--noheader", "--format=%T %r") == "PENDING BeginTime")
    cluster.ask(environment, "scontrol", "update", f"JobId={number}", "StartTime=now")  # else SLURM waits two minutes
    said, errors = process.communicate(timeout=300)
    assert (process.returncode, errors) == (0, ""), said
    assert "[1/1] seed=0: test accuracy" in said
    log = (grid / "logs/seed=0.log").read_text()
    assert log.index("stopped by SIGUSR2; progress is saved") < log.index("resuming from step")


@pytest.mark.slow
def test_a_job_that_slurm_queues_again_by_itself_is_waited_for(begin, environment, tmp_path):
    """As it does with jobs of a machine that fails, or that must make room."""
    process = begin(*LONG)
    grid = tmp_path / "grid"
    until(lambda: learning(grid / "seed=0"))
    number = json.loads((grid / "slurm/jobs.json").read_text())["seed=0"]
    cluster.ask(environment, "scontrol", "requeue", number)
    until(lambda: cluster.ask(environment, "squeue", "--noheader", "--format=%T %r") == "PENDING BeginTime")
    cluster.ask(environment, "scontrol", "update", f"JobId={number}", "StartTime=now")
    said, errors = process.communicate(timeout=300)
    assert (process.returncode, errors) == (0, ""), said
    assert "FAILED" not in said


@pytest.mark.slow
@pytest.mark.parametrize("setting", ["partition=nowhere", "particion=main"])
def test_what_slurm_does_not_take_is_one_sentence(begin, type_in, setting):
    code, _, errors = type_in("sweep", "tiny.toml", "--engine=slurm", "--out=grid", "--slurm", setting)
    assert (code, errors.count("\n")) == (2, 1)
    assert setting.rpartition("=")[0 if "cion" in setting else 2] in errors


@pytest.fixture
def commands(tmp_path, monkeypatch):
    """A folder that is all there is on the path; a stand-in for a command may be put there."""
    place = tmp_path / "bin"
    place.mkdir()
    monkeypatch.setenv("PATH", str(place))

    def put(name, text):
        (place / name).write_text(f"#!/bin/sh\n{text}\n")
        (place / name).chmod(stat.S_IRWXU)

    return put


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--engine", "slrum"], "--engine is 'slrum'; it must be one of local, slurm. Did you mean 'slurm'?"),
        (["--engine", "slurm"], "sbatch is not installed"),
        (["--slurm", "time=5"], "--slurm needs --engine slurm"),
        (["--engine", "slurm", "--slurm", "=5"], "--slurm is '=5'; it must be an sbatch option"),
    ],
)
def test_a_mistake_is_one_sentence(commands, type_in, tmp_path, words, sentence):
    runs.tiny(tmp_path)
    code, said, errors = type_in("sweep", "tiny.toml", *words)
    assert (code, said, errors.count("\n")) == (2, "", 1)
    assert sentence in errors


def test_options_of_sbatch_are_written_as_there():
    assert settings_of(["partition=gpu", "--exclusive", "gpus_per_node=1"]) == {
        "partition": "gpu",
        "exclusive": True,
        "gpus-per-node": "1",
    }
    with pytest.raises(ConfigError, match="twice"):
        settings_of(["time=1", "--time=2"])


def test_our_own_options_of_sbatch_are_not_the_users(commands):
    for name in ("sbatch", "squeue", "scancel", "srun"):
        commands(name, "exit 0")
    with pytest.raises(ConfigError, match="--slurm array: maskconnect sets this option itself"):
        engine.Slurm(None, [], {"array": "1-3"})


@pytest.fixture
def job(tmp_path, monkeypatch):
    """A job that was queued as number 7."""
    monkeypatch.setattr(engine, "ASK_EVERY", 0.0)
    monkeypatch.setattr(engine, "LATE", 0.0)
    runs.tiny(tmp_path)
    (cell,) = Grid(recipe=str(tmp_path / "tiny.toml")).cells()
    (tmp_path / "slurm").mkdir()
    return SlurmJob(cell, tmp_path, "7", Queue([]))


def test_a_job_has_ended_when_slurm_says_so_and_not_because_it_does_not_answer(commands, job, tmp_path):
    commands("squeue", "exit 1")
    assert job.end() is None, "nobody has said anything of it"
    commands("squeue", "echo '8 RUNNING'")
    assert job.end() == "SLURM: job 7 is unknown to SLURM"
    commands("squeue", "echo '7 TIMEOUT'")
    assert job.end() == "SLURM: job 7 is TIMEOUT"
    commands("squeue", "echo '7 PENDING'")
    assert job.waiting
    assert job.end() is None


def test_the_exit_code_of_a_job_that_was_queued_again_holds_no_more(commands, job, tmp_path):
    code = tmp_path / "slurm" / f"{job.cell.name}.code"
    code.write_text("143\n")
    for state in ("PENDING", "RUNNING", "COMPLETING"):
        commands("squeue", f"echo '7 {state}'")
        assert job.end() is None
    commands("squeue", "echo '7 CANCELLED'")
    assert job.end() == 143
    code.write_text("0\n")
    commands("squeue", "echo '7 RUNNING'")
    assert job.end() == 0, "which needs no confirmation"


def test_a_machine_does_not_start_what_a_cluster_has_begun(commands, type_in, tmp_path):
    runs.tiny(tmp_path)
    (tmp_path / "grid/slurm").mkdir(parents=True)
    (tmp_path / "grid/slurm/jobs.json").write_text('{"seed=0": "7_0", "seed=1": "7_1"}')
    recipe = str(tmp_path / "tiny.toml")
    (tmp_path / "grid/sweep.json").write_text(json.dumps({"recipe": recipe, "settings": [], "over": []}))
    commands("squeue", "echo '7_0 RUNNING'; echo '7_1 COMPLETED'")
    code, _, errors = type_in("sweep", "tiny.toml", "--out", "grid")
    assert code == 2
    assert "a job of this sweep is in the SLURM queue; add --engine slurm to resume" in errors


def test_what_means_something_to_slurm_is_not_a_name(commands, type_in, tmp_path):
    runs.tiny(tmp_path)
    for name in ("sbatch", "squeue", "scancel", "srun"):
        commands(name, "exit 0")
    code, _, errors = type_in("sweep", "tiny.toml", "--engine", "slurm", "--out", "grid%j")
    assert (code, errors.count("\n")) == (2, 1)
    assert "has a % in its name" in errors


def test_a_queue_that_does_not_answer_is_not_an_empty_one(commands, monkeypatch):
    monkeypatch.setattr(engine, "ASK_EVERY", 0.0)
    news = []
    queue = Queue(news)
    commands("squeue", "echo '7_0 RUNNING'; echo '7_1 PENDING'")
    assert queue.states() == {"7_0": "RUNNING", "7_1": "PENDING"}
    commands("squeue", "echo 'slurm_load_jobs error: Unable to contact slurm controller' >&2; exit 1")
    for _ in range(3):
        assert queue.states() == {"7_0": "RUNNING", "7_1": "PENDING"}, "what was known last"
    assert len(news) == 1, "it is said once"
    assert "Unable to contact slurm controller" in news[0]
    commands("squeue", "echo '7_1 COMPLETING'")
    assert queue.states() == {"7_1": "COMPLETING"}
