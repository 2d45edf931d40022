"""A whole run: its phases, its folder, its metrics."""

import json
import math
import signal
from dataclasses import replace

import pytest
import runs
import torch
from torch import nn

import maskconnect as mc
from maskconnect.core.masks import ConnectivityMasks
from maskconnect.errors import CheckpointError, ConfigError
from maskconnect.recipes import load
from maskconnect.training.files import load_tensors
from maskconnect.training.loading import evaluate_run, load_run
from maskconnect.training.options import Options
from maskconnect.training.stop import Stopped


def test_four_phases_have_their_epochs_and_rates(learned):
    found = [
        (line["phase"], line["epoch"], line["step"], line["lr"], line["mask_lr"]) for line in runs.epochs_of(learned)
    ]
    assert found == [
        ("learn", 1, 5, 0.1, 0.3),
        ("learn", 2, 10, 0.1, 0.3),
        ("freeze", 3, 15, 0.1, 0.0),
        ("freeze", 4, 20, 0.1, 0.0),
        ("fine", 5, 25, 0.01, 0.0),
        ("finer", 6, 30, 0.001, 0.0),
    ]


def test_metrics_have_a_line_some_steps_an_epoch_and_one_of_the_freeze(learned):
    lines = runs.metrics(learned)
    assert [line["step"] for line in lines if line["kind"] == "step"][:6] == [2, 4, 5, 7, 9, 10]
    (frozen,) = (line for line in lines if line["kind"] == "freeze")
    assert frozen["step"] == 10
    assert 0 <= frozen["drawn"]["top1"] <= 100
    assert frozen["frozen"] == runs.epochs_of(learned)[1]["test"]  # nothing but the masks' freedom has changed
    first = runs.epochs_of(learned)[0]
    assert {"loss", "accuracy", "test", "mask_entropy", "top_changes", "activation_scales"} <= first.keys()
    assert first["test"].keys() == {"loss", "top1", "top5"}
    assert 0.9 < first["mask_entropy"] < 1
    assert len(first["activation_scales"]) == 7  # what each of 6 blocks reads, and the output
    assert "mask_entropy" not in runs.epochs_of(learned)[2]


def test_the_loss_of_an_epoch_is_the_mean_over_its_images(learned):
    steps = [line for line in runs.metrics(learned) if line["kind"] == "step" and line["epoch"] == 1]
    mean = (64 * steps[0]["loss"] + 64 * steps[1]["loss"] + 32 * steps[2]["loss"]) / 160
    assert math.isclose(mean, runs.epochs_of(learned)[0]["loss"])


def test_masks_are_kept_from_the_start_to_the_freeze_and_only_then_change(learned):
    kept = sorted((learned / "masks").iterdir())
    assert [path.name for path in kept] == [f"epoch-000{k}.safetensors" for k in range(3)]
    real = [load_tensors(path)["stack0.real"] for path in kept]
    assert torch.equal(real[0][4], torch.full((5,), 0.2))
    assert not torch.equal(real[0], real[1])
    final = load_tensors(learned / "final/model.safetensors")
    assert torch.equal(final["stack.masks.real"], real[2])


def test_the_wiring_is_the_top_k_of_the_last_masks(learned):
    wiring = json.loads((learned / "wiring.json").read_text())
    real = load_tensors(learned / "masks/epoch-0002.safetensors")["stack0.real"]
    for block in range(2, 6):
        assert wiring[block] == sorted(real[block - 1, :block].topk(min(2, block)).indices.tolist())


def test_the_network_that_was_saved_is_the_one_that_was_judged(learned):
    summary = json.loads((learned / "summary.json").read_text())
    found, images = evaluate_run(learned, Options(threads=1))
    assert images == 60
    assert found == summary["test"] == runs.epochs_of(learned)[-1]["test"]


def test_predictions_are_those_of_the_network_and_the_wrong_images_are_wrong(learned):
    kept = load_tensors(learned / "final/predictions.safetensors")
    network, images, _ = load_run(learned, Options(threads=1))
    x = torch.cat([x for x, _ in images.test.epoch(0)])
    with torch.no_grad():
        scores = network(x)
    assert torch.equal(scores.topk(5).indices, kept["class"])
    torch.testing.assert_close(scores.softmax(1).topk(5).values, kept["probability"])
    wrong = kept["wrong"]
    assert (kept["class"][wrong, 0] != kept["label"][wrong]).all()
    assert torch.equal(images.test.images.images[wrong], kept["wrong_images"])
    assert (kept["probability"][wrong, 0].diff() <= 0).all()


def test_the_same_seed_gives_the_same_run_and_another_another(tmp_path):
    short = ["phase.learn.epochs=1", "phase.freeze.epochs=1"]
    found = {}
    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        torch.manual_seed(len(found))  # what the process did before does not matter
        runs.run(runs.tiny(tmp_path, *short, seed=seed), tmp_path / name)
        found[name] = runs.results(tmp_path / name)
    assert found["a"][0] == found["b"][0]
    assert found["a"][1] == found["b"][1]
    assert found["a"][0]["final/model.safetensors"] != found["c"][0]["final/model.safetensors"]


@pytest.mark.parametrize("connectivity", ["prev", "full", "random"])
def test_fixed_wiring_goes_through_the_same_epochs_and_rates(connectivity, tmp_path, learned):
    out = tmp_path / "run"
    summary = runs.run(runs.tiny(tmp_path, f"model.connectivity={connectivity}"), out)
    rates = [(line["step"], line["lr"]) for line in runs.epochs_of(out)]
    assert rates == [(line["step"], line["lr"]) for line in runs.epochs_of(learned)]
    assert all(line["mask_lr"] == 0 for line in runs.epochs_of(out))
    assert not any(line["kind"] == "freeze" for line in runs.metrics(out))
    assert not (out / "masks").exists()
    assert summary["freeze"] == {}
    assert summary["parameters"]["mask_entries"] == 0


def test_fixed_prev_is_a_plain_network_trained_by_hand(tmp_path):
    """The whole run equals twenty lines of torch: order, augmentation, rates, momentum, decay."""
    recipe, out = runs.tiny(tmp_path, "model.connectivity=prev"), tmp_path / "run"
    runs.run(recipe, out)
    network, images, _ = load_run(out, Options(threads=1))
    torch.manual_seed(0)
    plain = mc.resnet(14, 10, connectivity="prev", in_channels=1)
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-4)
    for epoch, rate in enumerate([0.1, 0.1, 0.1, 0.1, 0.01, 0.001]):
        optimizer.param_groups[0]["lr"] = rate
        for x, y in images.train.epoch(epoch):
            optimizer.zero_grad()
            nn.functional.cross_entropy(plain(x), y).backward()
            optimizer.step()
    for name, value in plain.state_dict().items():
        if ".masks." not in name:
            torch.testing.assert_close(network.state_dict()[name], value, rtol=1e-4, atol=1e-5)


def test_the_wiring_of_a_run_can_be_trained_from_scratch(tmp_path, learned):
    wiring = json.loads((learned / "wiring.json").read_text())
    recipe = runs.tiny(tmp_path)
    again = replace(recipe, model=replace(recipe.model, connectivity=wiring))
    summary = runs.run(again, tmp_path / "run")
    assert json.loads((tmp_path / "run" / "wiring.json").read_text()) == wiring
    assert summary["connectivity"] == "explicit"
    assert load(str(tmp_path / "run" / "recipe.toml")) == again
    runs.run(again, tmp_path / "run")  # it is the same recipe


def test_a_run_can_start_from_the_weights_of_another(tmp_path, learned):
    recipe = runs.tiny(tmp_path, "phase.learn.lr=0", "phase.learn.mask_lr=1e-9", init_from=str(learned))
    recipe = replace(recipe, phase=recipe.phase[:1])
    runs.run(recipe, tmp_path / "run")
    before, after = (load_tensors(out / "final/model.safetensors") for out in (learned, tmp_path / "run"))
    assert all(torch.equal(before[name], after[name]) for name in before if name.endswith("weight"))
    real = after["stack.masks.real"][4]
    torch.testing.assert_close(real, torch.full_like(real, 0.2))  # masks start again


def test_weights_of_another_network_are_refused(tmp_path, learned):
    with pytest.raises(CheckpointError, match="belongs to another network"):
        runs.run(runs.tiny(tmp_path, "model.depth=8", init_from=str(learned)), tmp_path / "run")
    with pytest.raises(ConfigError, match=r"which has no final/model.safetensors"):
        runs.run(runs.tiny(tmp_path, init_from=str(tmp_path)), tmp_path / "other")


def test_with_a_validation_set_the_best_epoch_is_chosen_there(tmp_path):
    summary = runs.run(runs.tiny(tmp_path, "data.validation=100"), tmp_path / "run")
    lines = runs.epochs_of(tmp_path / "run")
    best = max(lines, key=lambda line: line["validation"]["top1"])
    assert summary["best"]["chosen_on"] == "validation"
    assert summary["best"]["test"] == best["test"]
    assert summary["test"] == lines[-1]["test"]
    assert summary["validation"] == lines[-1]["validation"]


def test_batch_norm_statistics_can_be_reestimated(tmp_path):
    summary = runs.run(runs.tiny(tmp_path, "training.reestimate=3"), tmp_path / "run")
    assert summary["freeze"]["reestimated_by"] == 3
    assert summary["freeze"]["frozen"] == runs.epochs_of(tmp_path / "run")[1]["test"]


def test_epochs_are_evaluated_as_often_as_the_recipe_says(tmp_path):
    runs.run(runs.tiny(tmp_path, "training.evaluate_every=4"), tmp_path / "run")
    assert [line["epoch"] for line in runs.epochs_of(tmp_path / "run") if "test" in line] == [2, 4, 5, 6]


def test_a_run_may_be_evaluated_at_its_end_only(tmp_path):
    summary = runs.run(runs.tiny(tmp_path, "training.evaluate_every=0"), tmp_path / "run")
    assert [line["epoch"] for line in runs.epochs_of(tmp_path / "run") if "test" in line] == [6]
    assert summary["best"]["test"] == summary["test"]
    assert summary["validation"] is None


def test_draws_cool_down_step_by_step(tmp_path, monkeypatch):
    seen, draw = [], ConnectivityMasks.draw

    def noted(masks):
        seen.append(masks.how.temperature_after(masks.steps_taken))
        return draw(masks)

    monkeypatch.setattr(ConnectivityMasks, "draw", noted)
    recipe = runs.tiny(tmp_path, "learning.cool=true", "training.evaluate_every=0")
    runs.run(recipe, tmp_path / "run")
    found = list(dict.fromkeys(seen))  # those of evaluations are as in the last step
    assert len(found) > 2
    assert found == pytest.approx([1 - step / (len(found) - 1) for step in range(len(found))])


def test_a_run_may_blend_and_is_at_its_top_k_when_it_freezes(tmp_path, monkeypatch):
    seen, draw = [], ConnectivityMasks.draw

    def noted(masks):
        drawn = draw(masks)
        seen.append((drawn.mask_TS.double().max(dim=1).values.min().item(), masks.how.uniform_floor))
        return drawn

    monkeypatch.setattr(ConnectivityMasks, "draw", noted)
    recipe = runs.tiny(tmp_path, "learning.way=blend", "model.fan_in=1")
    summary = runs.run(recipe, tmp_path / "run")
    assert seen[0][0] < 1  # some target reads no source as a whole
    assert seen[-1][0] == 1
    assert {floor for _, floor in seen} == {0.1}
    assert summary["freeze"]["drawn"] == summary["freeze"]["frozen"]


@pytest.mark.parametrize(
    "options", [{"channels_last": True}, {"deterministic": True}, {"precision": "bf16"}, {"precision": "fp16"}], ids=str
)
def test_options_of_how_to_run_still_learn(options, tmp_path):
    try:
        summary = runs.run(runs.tiny(tmp_path, "training.norm_group=16"), tmp_path / "run", **options)
    finally:
        torch.use_deterministic_algorithms(False)
    assert summary["test"]["top1"] > 15
    if "channels_last" in options:
        assert evaluate_run(tmp_path / "run", Options(threads=1))[0]["top1"] == summary["test"]["top1"]


def test_options_that_cannot_be_meant_are_errors():
    for wrong in ({"threads": 0}, {"precision": "fp8"}, {"workers": -1}, {"checkpoint_every": -1.0}, {"log_every": 0}):
        with pytest.raises(ConfigError, match=next(iter(wrong))):
            Options(**wrong)


def test_a_device_that_is_not_there_is_an_error(tmp_path):
    for device, complaint in (("cuda:7", ".*Try --device cpu"), ("gpu", "; use cpu, cuda or cuda:1.$")):
        with pytest.raises(ConfigError, match=f"^device is '{device}'{complaint}"):
            runs.run(runs.tiny(tmp_path), tmp_path / device, device=device)


def test_a_run_whose_phases_all_learn_is_frozen_at_its_end(tmp_path):
    recipe = runs.tiny(tmp_path, "training.reestimate=2")
    summary = runs.run(replace(recipe, phase=recipe.phase[:1]), tmp_path / "run")
    lines = runs.metrics(tmp_path / "run")
    assert [line["kind"] for line in lines][-2:] == ["epoch", "freeze"]
    assert lines[-1]["epoch"] == lines[-2]["epoch"] == 2
    assert summary["test"] == lines[-1]["frozen"] == lines[-2]["test"]
    assert load_tensors(tmp_path / "run" / "final/model.safetensors")["stack.masks.frozen"]
    assert evaluate_run(tmp_path / "run", Options(threads=1))[0] == summary["test"]


def test_a_last_batch_smaller_than_its_parts_is_trained_on(tmp_path):
    settings = ("data.train_images=65", "training.accumulate=4")
    summary = runs.run(runs.tiny(tmp_path, *settings), tmp_path / "run")
    assert math.isfinite(summary["test"]["loss"])


def test_one_value_for_a_batch_norm_is_said_plainly(tmp_path):
    settings = ("data.train_images=65", "data.shrink=2", "augmentation.size=4")
    with pytest.raises(
        ConfigError, match=r"single value per channel in a batch of 1; it needs at least 2. Change training.batch_size"
    ):
        runs.run(runs.tiny(tmp_path, *settings), tmp_path / "run")


def test_a_stop_in_the_very_last_moment_is_a_stop_of_what_comes_after(tmp_path, monkeypatch):
    from maskconnect.training import run

    before = run.finish

    def finish(*arguments):
        signal.raise_signal(signal.SIGTERM)
        return before(*arguments)

    monkeypatch.setattr(run, "finish", finish)
    with pytest.raises(Stopped):
        runs.run(runs.tiny(tmp_path), tmp_path / "run")
    assert (tmp_path / "run" / "summary.json").exists()


def test_draws_without_learning_leave_masks_uniform_and_freeze_a_random_wiring(tmp_path):
    lines = []
    show = runs.Silent()
    show.line = lines.append
    recipe = runs.tiny(tmp_path, "learning.gradient=none", seed=4)
    runs.run(recipe, tmp_path / "run", show)
    wiring = json.loads((tmp_path / "run/wiring.json").read_text())
    assert wiring == mc.wiring_of(mc.resnet(14, 10, 2, connectivity="random", seed=4))
    assert wiring != mc.wiring_of(mc.resnet(14, 10, 2))  # the nearest K, which equal masks would give
    real = load_tensors(tmp_path / "run/masks/epoch-0002.safetensors")["stack0.real"]
    for row in real:
        assert (row[row > 0] - row[0]).abs().max() < 1e-6
    assert any("a random wiring" in line for line in lines)
