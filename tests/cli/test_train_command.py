"""`maskconnect train`, `evaluate` and `demo`, as they are typed."""

import json
import re
import resource
import shlex
import signal
from dataclasses import fields

import pytest
import runs
import torch

from maskconnect.cli.hints import FIELDS
from maskconnect.data.augment import Augmentation
from maskconnect.recipes import load
from maskconnect.recipes.schema import Data, LearningTable, Network, Phase, Training


@pytest.fixture
def type_in(type_in, tmp_path):
    """Type a command in an empty folder that has a tiny recipe; returns exit code, output and errors."""
    runs.tiny(tmp_path)
    return type_in


SHORT = ("train", "tiny.toml", "--threads", "1", "--set", "phase.freeze.epochs=1")


def test_a_run_shows_its_phases_a_table_and_its_folder(type_in, tmp_path):
    code, said, errors = type_in(*SHORT)
    assert (code, errors) == (0, "")
    lines = [line for line in said.splitlines() if "images/s" not in line]  # which a busy machine shows, too
    assert lines[0] == "tiny, seed 0, in runs/tiny-seed0"
    assert lines[1].startswith("phase 1/4, learning: 2 epochs at rate 0.1")
    assert re.match(r"freeze: test accuracy \d+\.\d\d % with drawn masks, \d+\.\d\d % with their top-K$", lines[2])
    summary = json.loads((tmp_path / "runs/tiny-seed0/summary.json").read_text())
    assert re.search(rf"^test accuracy, last epoch +{summary['test']['top1']:.2f} %", said, re.MULTILINE)
    assert "best epoch (chosen on test)" in said
    assert f"{summary['parameters']['weights']:,}" in said
    assert "over a fixed one" not in said, "that is wall-clock noise; maskconnect bench measures it"
    assert lines[-1] == "run folder: runs/tiny-seed0"


def test_a_blended_run_does_not_speak_of_draws(type_in):
    code, said, errors = type_in(*SHORT, "--set", "learning.way=blend")
    assert (code, errors) == (0, "")
    assert re.search(r"^freeze: test accuracy \d+\.\d\d % with blended masks, ", said, re.MULTILINE)
    assert "at the freeze: blended masks, top-K" in said
    assert "drawn" not in said


def test_the_same_command_again_shows_the_run_that_has_ended(type_in, tmp_path):
    _, first, _ = type_in(*SHORT)
    before = (tmp_path / "runs/tiny-seed0/environment.json").read_bytes()
    code, second, _ = type_in(*SHORT)
    assert code == 0
    assert second.splitlines()[0] == "tiny, seed 0: this run has already finished; it is in runs/tiny-seed0"
    assert second.splitlines()[1:] == first[first.index("\n\n") :].splitlines()[1:]
    assert (tmp_path / "runs/tiny-seed0/environment.json").read_bytes() == before


def test_another_recipe_in_the_same_folder_is_an_error_and_fresh_makes_a_new_one(type_in, tmp_path):
    type_in(*SHORT)
    other = (*SHORT, "--set", "model.fan_in=1")
    code, _, errors = type_in(*other)
    assert code == 2
    assert errors.count("\n") == 1
    assert "model.fan_in is 2 there and 1 here" in errors
    assert type_in(*other, "--fresh")[0] == 0
    assert type_in(*other, "--fresh")[0] == 0
    assert sorted(path.name for path in (tmp_path / "runs").iterdir()) == [
        "tiny-seed0",
        "tiny-seed0-2",
        "tiny-seed0-3",
    ]
    assert load("runs/tiny-seed0-2/recipe.toml").model.fan_in == 1


def test_a_run_that_never_began_does_not_keep_its_folder(type_in, tmp_path):
    assert type_in(*SHORT, "--device", "cuda:99")[0] == 2
    assert type_in(*SHORT, "--set", "model.fan_in=1")[0] == 0


def test_seed_wiring_and_weights_can_be_given(type_in, tmp_path):
    type_in(*SHORT, "--out", "first")
    code, said, _ = type_in(*SHORT, "--wiring", "first/wiring.json", "--init-from", "first", "--seed", "7")
    assert code == 0
    assert "starting from the weights in first/final/model.safetensors" in said
    recipe = load("runs/tiny-seed7/recipe.toml")
    assert recipe.seed == 7
    assert recipe.model.connectivity == json.loads((tmp_path / "first/wiring.json").read_text())
    assert recipe.init_from == "first"
    assert json.loads((tmp_path / "runs/tiny-seed7/wiring.json").read_text()) == recipe.model.connectivity


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("[[], [0]]", "2 rows; the stack has 6 modules"),
        ("[[], [0], [5], [0], [0], [0]]", "module 2 lists source 5"),
        ("{", "is not valid JSON"),
        ('"learned"', "does not hold a list"),
        ("[" * 100_000, "is not valid JSON"),
    ],
)
def test_a_wiring_that_does_not_fit_is_an_error(content, message, type_in, tmp_path):
    (tmp_path / "wiring.json").write_text(content)
    code, _, errors = type_in(*SHORT, "--wiring", "wiring.json")
    assert code == 2
    assert message in errors


def test_a_fresh_run_that_is_stopped_says_how_to_resume_that_run(type_in, tmp_path, monkeypatch):
    from maskconnect.training import evaluation

    type_in(*SHORT)
    before = evaluation.predict

    def stop(*arguments):
        signal.raise_signal(signal.SIGINT)
        return before(*arguments)

    monkeypatch.setattr(evaluation, "predict", stop)
    code, said, _ = type_in(*SHORT, "--fresh", "--data", "some where")
    monkeypatch.undo()
    monkeypatch.chdir(tmp_path)
    assert code == 130
    (command,) = re.findall(r"To resume: maskconnect (.*)\n", said)
    assert shlex.split(command)[-4:] == ["--data", "some where", "--threads", "1"]
    code, said, _ = type_in(*shlex.split(command))
    assert code == 0
    assert "resuming from step 5 of 25" in said
    assert (tmp_path / "runs/tiny-seed0-2/summary.json").exists()


def test_a_fresh_run_in_the_very_folder_one_stands_in_gets_a_new_one_beside_it(type_in, tmp_path, monkeypatch):
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    assert type_in("train", "../tiny.toml", *SHORT[2:], "--fresh", "--out", ".")[0] == 0
    assert (tmp_path / "here-2/summary.json").exists()
    code, _, errors = type_in("train", "../tiny.toml", *SHORT[2:], "--fresh", "--out", "/")
    assert (code, errors) == (2, "error: --out is /; name a folder inside it.\n")


def test_an_option_that_is_not_known_names_the_nearest(type_in):
    code, _, errors = type_in(*SHORT, "--sed", "1")
    assert code == 2
    assert "did you mean --seed?" in errors


@pytest.mark.parametrize(
    ("verb", "words", "typed"),
    [
        ("train", ["--fan-in", "4"], "--set model.fan_in=4"),
        ("train", ["--epochs=2"], "--set phase.learn.epochs=2"),
        ("train", ["--lr", "0.2"], "--set phase.learn.lr=0.2"),
        ("train", ["--learning-rate", "0.2"], "--set phase.learn.lr=0.2"),
        ("train", ["--batch-size", "64"], "--set training.batch_size=64"),
        ("train", ["--depth"], "--set model.depth=VALUE"),
        ("sweep", ["--depth", "14,20"], "--over model.depth=14,20"),
        ("evaluate", ["--batch-size", "64"], "maskconnect train RECIPE --set training.batch_size=64"),
        ("report", ["--fan-in", "4"], "maskconnect train RECIPE --set model.fan_in=4"),
    ],
)
def test_a_field_of_the_recipe_that_is_typed_as_an_option_says_what_to_type(type_in, verb, words, typed):
    code, _, errors = type_in(verb, "tiny.toml", *words)
    assert (code, errors) == (
        2,
        f"error: unknown option: {' '.join(words)}; it is a field of the recipe, so type: {typed}\n",
    )


def test_every_field_of_a_recipe_can_be_suggested():
    tables = {
        "data": Data,
        "augmentation": Augmentation,
        "model": Network,
        "training": Training,
        "learning": LearningTable,
    }
    known = {f"{name}.{field.name}" for name, kind in tables.items() for field in fields(kind)}
    known |= {f"phase.learn.{field.name}" for field in fields(Phase)}
    assert set(FIELDS.values()) == {path for path in known if not path.endswith(".name")}


def test_a_start_that_is_refused_leaves_nothing_behind(type_in, tmp_path):
    before = sorted(tmp_path.iterdir())
    assert type_in(*SHORT, "--device", "cuda:99")[0] == 2
    assert type_in(*SHORT, "--init-from", "nowhere")[0] == 2
    assert type_in(*SHORT, "--set", "data.name=cifar10", "--out", "some/where/else")[0] == 2
    assert sorted(tmp_path.iterdir()) == before
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/recipe.toml").write_text(runs.TINY)
    assert type_in("train", "mine/recipe.toml", "--out", "mine", "--device", "cuda:99")[0] == 2
    assert [path.name for path in (tmp_path / "mine").iterdir()] == ["recipe.toml"], "which its user has made"


@pytest.mark.parametrize(
    "words", [("--device", "gpu"), ("--init-from", "nowhere"), ("--set", "data.name=cifar10"), ("--out", "tiny.toml")]
)
def test_a_start_that_is_refused_says_nothing_but_the_error(words, type_in):
    code, said, errors = type_in(*SHORT, *words)
    assert (code, said, errors.count("\n")) == (2, "", 1)


def test_another_seed_in_the_folder_of_a_run_is_one_line(type_in):
    type_in(*SHORT, "--out", "run")
    code, said, errors = type_in(*SHORT, "--out", "run", "--seed", "1")
    assert (code, said) == (2, "")
    assert errors.startswith("error: run holds a run of another recipe: seed is 0 there and 1 here.")


def test_evaluate_finds_the_accuracy_of_the_saved_network(type_in, tmp_path):
    type_in(*SHORT)
    summary = json.loads((tmp_path / "runs/tiny-seed0/summary.json").read_text())["test"]
    code, said, _ = type_in("evaluate", "runs/tiny-seed0", "--threads", "1")
    assert code == 0
    assert said == (
        f"top-1 {summary['top1']:.2f} %   top-5 {summary['top5']:.2f} %   loss {summary['loss']:.4f}   (60 images)\n"
    )
    _, said, _ = type_in("evaluate", "runs/tiny-seed0", "--threads", "1", "--json")
    assert json.loads(said) == {"run": "runs/tiny-seed0", "images": 60, **summary}


def test_evaluate_of_what_is_not_a_finished_run_is_an_error(type_in, tmp_path):
    assert type_in("evaluate", "nothing") == (2, "", "error: nothing does not exist; pass a run folder.\n")
    (tmp_path / "empty").mkdir()
    assert "is not a run folder: it has no recipe.toml" in type_in("evaluate", "empty")[2]
    type_in(*SHORT)
    (tmp_path / "runs/tiny-seed0/summary.json").unlink()
    code, _, errors = type_in("evaluate", "runs/tiny-seed0")
    assert code == 2
    assert (
        "has not finished; resume it with: maskconnect train runs/tiny-seed0/recipe.toml --out runs/tiny-seed0"
        in errors
    )


def test_a_flipped_bit_in_the_saved_network_is_noticed(type_in, tmp_path):
    type_in(*SHORT)
    place = tmp_path / "runs/tiny-seed0/final/model.safetensors"
    content = bytearray(place.read_bytes())
    content[len(content) // 2] ^= 1
    place.write_bytes(content)
    code, _, errors = type_in("evaluate", "runs/tiny-seed0")
    assert code == 2
    assert "model.safetensors" in errors


def test_a_full_disk_is_one_sentence_and_the_last_checkpoint_is_intact(type_in, tmp_path):
    """A limit on the size of files stands for the disk: what is larger cannot be written."""

    def limit():
        resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, 200_000))

    process = runs.command(*SHORT, "--out", tmp_path / "run", preexec_fn=limit)
    _, errors = process.communicate(timeout=120)
    assert process.returncode == 2
    assert errors.count("\n") == 1
    assert "cannot be written" in errors
    assert not list((tmp_path / "run/checkpoints").glob(".*"))
    assert type_in(*SHORT, "--out", "run")[0] == 0  # once there is room, it continues


@pytest.fixture
def small_demo(tmp_path, monkeypatch):
    """The demo with less of everything."""
    from maskconnect.cli import demo

    variants = {"learned": 'connectivity = "learned"', "prev": 'connectivity = "prev"'}
    recipe = [
        'base = "discover/digits"',
        "[data]\ntrain_images = 100",
        "[model]\nlayers = [1]\nfan_in = 2",
        *(f"[phase.{phase}]\nepochs = 1" for phase in ("learn", "freeze", "fine")),
        *(f"[variant.{name}]\nmodel = {{ {words} }}" for name, words in variants.items()),
    ]
    (tmp_path / "small.toml").write_text("\n".join(recipe))
    rows = {f"{tmp_path}/small.toml:{name}": title for name, title in (("learned", "Learned"), ("prev", "Fixed-Prev"))}
    monkeypatch.setattr(demo, "ROWS", rows)


def test_the_demo_compares_wirings_and_prunes_the_learned_one(type_in, tmp_path, small_demo):
    code, said, errors = type_in("demo", "--seeds", "2")
    assert (code, errors) == (0, "")
    assert re.search(r"^Learned +[\d.]+ ± [\d.]+ +[\d,]+ parameters *$", said, flags=re.MULTILINE)
    first, second = (
        [json.loads((tmp_path / f"runs/demo/small.toml-{name}-seed{seed}/summary.json").read_text()) for seed in (0, 1)]
        for name in ("learned", "prev")
    )
    apart = sum(a["test"]["top1"] - b["test"]["top1"] for a, b in zip(first, second, strict=True)) / 2
    assert re.search(rf"^Fixed-Prev .* {re.escape(f'{apart:+.2f}')}( |$)", said, flags=re.MULTILINE)
    weights, pruned = (first[0]["parameters"][key] for key in ("weights", "pruned"))
    assert f"{weights:,} parameters -> {pruned:,}." in said
    assert (tmp_path / "runs/demo/small.toml-learned-seed0/wiring.svg").exists()
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("summary.json")}
    assert type_in("demo", "--seeds", "2")[0] == 0
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("summary.json")} == before  # nothing ran again


def test_the_demo_says_what_learned_wiring_beats_and_what_beats_it():
    from maskconnect.cli.demo import ROWS, conclusion
    from maskconnect.training.statistics import paired_difference, statistic

    scores = dict(zip(ROWS, ([90, 91, 92], [80, 82, 81], [95, 96, 98], [91, 90, 92]), strict=True))
    learned, *fixed = scores.values()
    over = dict(zip(list(ROWS)[1:], (paired_difference(learned, row) for row in fixed), strict=True))
    assert conclusion(over, {name: statistic(row) for name, row in scores.items()}) == (
        "With these seeds, learned wiring is better than Fixed-Prev; worse than Fixed-Random; not significantly "
        "different from Fixed-Full. The highest mean: Fixed-Random."
    )


@pytest.mark.parametrize("words", [("--seeds", "0"), ("--jobs", "0")])
def test_a_demo_of_nothing_is_refused(words, type_in):
    code, _, errors = type_in("demo", *words)
    assert code == 2
    assert f"{words[0]} is 0; it must be 1 or more." in errors


def test_an_error_in_a_run_is_one_line(type_in):
    code, _, errors = type_in(*SHORT, "--set", "phase.learn.lr=1e30")
    assert code == 2
    assert errors.count("\n") == 1
    assert "at step 1 (phase learn" in errors


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_a_compiled_network_learns_the_same(tmp_path):
    plain, compiled = (
        runs.run(runs.tiny(tmp_path), tmp_path / str(how), compile=how)["test"]["loss"] for how in (False, True)
    )
    assert compiled == pytest.approx(plain, rel=1e-3)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_a_compiled_run_that_was_stopped_ends_as_one_that_was_not(tmp_path):
    """Its last batches are smaller than the others, and a process that resumes may see them first."""

    class Stop(runs.Silent):
        def progress(self, now):
            if now.step == 14:
                raise KeyboardInterrupt

    found = []
    for name, stops in (("whole", False), ("stopped", True)):
        recipe = runs.tiny(tmp_path, "data.train_images=150")
        if stops:
            with pytest.raises(KeyboardInterrupt):
                runs.run(recipe, tmp_path / name, Stop(), compile=True, checkpoint_every=0)
        torch.compiler.reset()
        runs.run(recipe, tmp_path / name, compile=True)
        found.append(runs.results(tmp_path / name))
        torch.compiler.reset()
    assert found[0][0] == found[1][0]


@pytest.mark.slow
def test_without_a_compiler_compile_is_a_sentence(tmp_path):
    runs.tiny(tmp_path)
    nowhere = {"PATH": "/nonexistent", "CXX": "/nonexistent", "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "cache")}
    process = runs.command("train", tmp_path / "tiny.toml", "--out", tmp_path / "run", "--compile", environment=nowhere)
    _, errors = process.communicate(timeout=300)
    assert process.returncode == 2
    assert errors.splitlines()[-1].startswith("error: the network cannot be compiled here")


def test_an_unknown_option_is_told_before_what_is_missing(type_in):
    code, _, errors = type_in("train", "--dat", "here")
    assert (code, errors) == (2, "error: unknown option: --dat; did you mean --data?\n")
