"""A run folder as a report reads it; a damaged one is one sentence."""

import json
import re
import shutil

import pytest
import torch
from made_up import CIFAR_RESNET, made_up_run

import maskconnect as mc
from maskconnect.models import build
from maskconnect.report.runs import read_run
from maskconnect.report.write import write_page
from maskconnect.training.files import load_tensors, save_tensors
from maskconnect.training.folder import find_runs


def test_frames_are_the_masks_of_every_epoch_and_end_in_the_wiring_of_the_run(folder):
    run = read_run(folder / "resnext")
    assert [frame.epoch for frame in run.frames] == [0, 1, 2, 2]
    last = load_tensors(folder / "resnext/masks/epoch-0002.safetensors")["stack0.real"].double()
    share_TS = last / last.sum(dim=1, keepdim=True)
    plain = json.loads((folder / "resnext/wiring.json").read_text())
    assert run.wires.layout.to_plain(run.wires.sources) == plain
    for edge in run.wires.edges:
        layer, _ = run.wires.layout.places[edge.target]
        at = edge.source - run.wires.layout.layers[layer - 1].start
        assert edge.value == pytest.approx(float(share_TS[edge.target - 4, at]), abs=1e-6)
        assert edge.strength == pytest.approx(1 - (1 - edge.value) ** 2)


def test_blocks_have_the_parameters_of_the_network(folder):
    for name in ("learned", "resnext", "prev"):
        run = read_run(folder / name)
        spec = run.recipe.model.spec(num_classes=10, in_channels=1, seed=0)
        stack = build(spec).stack
        assert list(run.block_parameters) == [sum(p.numel() for p in block.parameters()) for block in stack.flat()]


def test_a_folder_of_runs_is_every_run_in_it_and_none_is_taken_twice(folder):
    assert [path.name for path in find_runs([folder])] == ["learned", "learned-1", "prev", "resnext", "resnext-1"]
    assert find_runs([folder / "prev", folder]) == [
        folder / "prev",
        *[p for p in find_runs([folder]) if p.name != "prev"],
    ]


def test_how_long_steps_took_on_a_busy_machine_is_not_a_result(folder, tmp_path):
    """A summary of an older version has the ratio of two phases' times: it is read, and the ratio is not shown."""
    assert "learning_over_fixed" not in json.loads((folder / "learned/summary.json").read_text())
    shutil.copytree(folder / "learned", tmp_path / "old")
    change(tmp_path / "old/summary.json", "learning_over_fixed", 1.234)
    shown = write_page([read_run(tmp_path / "old")], tmp_path / "page").read_text()
    assert "fixed step" not in shown
    assert "over a fixed one" not in shown


def test_a_page_names_coarse_classes_and_small_images_in_title_facts_and_note(folder, tmp_path):
    """Of CIFAR-100 as quick recipes have it."""
    for name in ("learned", "prev"):
        shutil.copytree(folder / name, tmp_path / name)
        place = tmp_path / name / "recipe.toml"
        coarse = 'name = "cifar100"\nlabels = "coarse"'
        place.write_text(
            re.sub('name = "digits"\nlabels = "fine"', coarse, place.read_text()).replace("shrink = 1", "shrink = 4")
        )
    both = [read_run(tmp_path / name) for name in ("learned", "prev")]
    data = "CIFAR-100 (20 coarse classes, 8x8)"
    alone = write_page(both[:1], tmp_path / "alone").read_text()
    assert f"<title>Learned, K=2: ResNet-14 on {data}</title>" in alone
    assert f"<dt>data</dt><dd>{data}</dd>" in alone
    several = write_page(both, tmp_path / "several").read_text()
    assert f"<title>2 runs of ResNet-14 on {data}</title>" in several
    assert f"<p class=note>Accuracies are on {data}." in several


def test_random_and_given_wirings_are_read(tmp_path):
    import runs

    given = runs.tiny(tmp_path, "model.connectivity=[[],[0],[1],[1],[2],[4]]")
    runs.run(given, tmp_path / "given")
    run = read_run(tmp_path / "given")
    assert run.wiring == "Given wiring, K=1"
    assert run.wires.sources == ((), (0,), (1,), (1,), (2,), (4,))
    random = read_run_of(tmp_path, "model.connectivity=random")
    assert random.wiring == "Fixed-Random, K=2"
    full = read_run_of(tmp_path, "model.connectivity=full")
    assert full.wiring == "Fixed-Full"
    assert len(full.wires.edges) == 15


def read_run_of(place, setting):
    """A run that has just begun."""
    import runs

    from maskconnect.recipes import write

    folder = place / setting.replace(".", "-")
    folder.mkdir()
    (folder / "recipe.toml").write_text(write(runs.tiny(place, setting)))
    return read_run(folder)


def cut(path):
    path.write_bytes(path.read_bytes()[:-40])


def change(path, key, value):
    found = json.loads(path.read_text())
    found[key] = value
    path.write_text(json.dumps(found))


def retensor(path, **tensors):
    save_tensors(path, load_tensors(path) | tensors)


DAMAGE = {
    "a summary that is cut": lambda run: cut(run / "summary.json"),
    "a summary of words": lambda run: change(run / "summary.json", "test", {"top1": "good", "top5": "better"}),
    "a summary without a part": lambda run: change(run / "summary.json", "parameters", {}),
    "a summary without what chose": lambda run: change(run / "summary.json", "best", {"epoch": 1, "test": {"top1": 1}}),
    "a summary that is a list": lambda run: (run / "summary.json").write_text("[]"),
    "metrics that are cut": lambda run: cut(run / "metrics.jsonl"),
    "metrics of another kind": lambda run: (run / "metrics.jsonl").write_text("[1, 2]\n"),
    "a wiring of another network": lambda run: (run / "wiring.json").write_text("[[], [0]]"),
    "a wiring that is not JSON": lambda run: (run / "wiring.json").write_text("[[], ["),
    "masks that are cut": lambda run: cut(run / "masks/epoch-0001.safetensors"),
    "masks of another network": lambda run: retensor(
        run / "masks/epoch-0001.safetensors", **{"stack0.real": torch.ones(2, 2)}
    ),
    "masks out of range": lambda run: retensor(
        run / "masks/epoch-0001.safetensors", **{"stack0.real": torch.full((5, 5), -1.0)}
    ),
    "fewer classes than predicted": lambda run: (run / "final/classes.json").write_text('["a"]'),
    "no classes": lambda run: (run / "final/classes.json").unlink(),
    "predictions that are cut": lambda run: cut(run / "final/predictions.safetensors"),
    "mistakes in images that are not there": lambda run: retensor(
        run / "final/predictions.safetensors", wrong=torch.full((32,), 1000)
    ),
    "a recipe that is cut": lambda run: cut(run / "recipe.toml"),
}


@pytest.mark.parametrize("how", DAMAGE, ids=str)
def test_a_damaged_run_is_one_sentence(folder, tmp_path, type_in, how):
    place = tmp_path / "run"
    shutil.copytree(folder / "learned", place)
    DAMAGE[how](place)
    code, _, errors = type_in("report", place, "--out", tmp_path / "out", "--no-figures")
    assert code == 2
    assert errors.splitlines()[-1].startswith("error: ")
    assert "Traceback" not in errors
    assert str(place) in errors
    assert not (tmp_path / "out").exists()


def test_masks_of_epochs_that_a_run_will_see_again_are_not_shown(folder, tmp_path):
    place = tmp_path / "run"
    shutil.copytree(folder / "learned", place)
    for name in ("summary.json", "wiring.json", "metrics.jsonl"):
        (place / name).unlink()
    assert [frame.epoch for frame in read_run(place).frames] == [0]


def test_numbers_that_are_none_are_left_out(folder, tmp_path):
    place = tmp_path / "run"
    shutil.copytree(folder / "learned", place)
    lines = [json.loads(line) for line in (place / "metrics.jsonl").read_text().splitlines()]
    for line in lines:
        line["loss"] = {1: float("nan"), 2: None, 3: 1e300}.get(line["epoch"], 1.0)
    (place / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert [e.loss for e in read_run(place).epochs] == [None, None, None, 1.0, 1.0, 1.0]


def test_an_environment_that_cannot_be_read_is_not_a_reason_to_show_nothing(folder, tmp_path):
    place = tmp_path / "run"
    shutil.copytree(folder / "learned", place)
    (place / "environment.json").write_text("{")
    assert read_run(place).starts == ()


def test_large_masks_are_read(tmp_path):
    run = read_run(made_up_run(tmp_path / "deep", CIFAR_RESNET, "model.depth=110", "model.fan_in=20"))
    assert len(run.wires.edges) == sum(min(20, k) for k in range(54))
    with pytest.raises(mc.MaskConnectError):
        read_run(tmp_path / "nowhere")
