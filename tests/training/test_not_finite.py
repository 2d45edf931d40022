"""Losses, gradients and weights that are no numbers."""

import math

import pytest
import runs

from maskconnect.errors import MaskConnectError
from maskconnect.training import run, update
from maskconnect.training.files import load_tensors


@pytest.mark.filterwarnings("ignore:activations grow")
def test_a_loss_that_is_not_finite_ends_the_run_and_says_where(tmp_path):
    recipe, out = runs.tiny(tmp_path, "phase.learn.lr=1e30"), tmp_path / "run"
    with pytest.raises(MaskConnectError, match=r"not finite|the loss is") as found:
        runs.run(recipe, out)
    said = str(found.value)
    assert "at step 1 (phase learn, epoch 1, lr 1e+30, mask_lr 0.3)" in said
    assert "The scales of activations, layer by layer:" in said
    assert "--skip-nonfinite" in said


def test_batches_whose_loss_is_not_finite_can_be_left_out(tmp_path, monkeypatch):

    before, calls = update.gradients, 0

    def poisoned(network, optimizer, x, y, **options):
        nonlocal calls
        calls += 1
        return before(network, optimizer, x * math.inf if calls in (3, 7) else x, y, **options)

    monkeypatch.setattr(update, "gradients", poisoned)
    summary = runs.run(runs.tiny(tmp_path), tmp_path / "run", skip_nonfinite=True)
    assert summary["skipped"] == 2
    assert summary["steps"] == 30
    final = load_tensors(tmp_path / "run" / "final/model.safetensors")
    assert all(value.isfinite().all() for value in final.values() if value.is_floating_point())
    assert runs.epochs_of(tmp_path / "run")[0]["skipped"] == 1


def test_weights_that_are_not_finite_are_never_saved(tmp_path, monkeypatch):

    before, out = run.Run.after_step, tmp_path / "run"

    def after_step(self):
        if self.state.position.step == 3:
            self.network.classifier.weight.data[0, 0] = math.inf
        before(self)

    monkeypatch.setattr(run.Run, "after_step", after_step)
    with pytest.raises(MaskConnectError, match=r"at step 3.*Restart with a lower phase.learn.lr"):
        runs.run(runs.tiny(tmp_path), out, checkpoint_every=0)
    assert sorted(path.name for path in out.glob("checkpoints/*")) == ["step-000000001", "step-000000002"]


@pytest.mark.filterwarnings("ignore:activations grow")
def test_an_epoch_of_which_every_batch_was_left_out_ends_the_run(tmp_path):
    with pytest.raises(MaskConnectError, match="every batch of epoch 2 was skipped"):
        runs.run(runs.tiny(tmp_path, "phase.learn.lr=1e38"), tmp_path / "run", skip_nonfinite=True)


def test_weights_ruined_by_the_very_last_step_are_an_error(tmp_path, monkeypatch):

    before, out = run.Run.after_step, tmp_path / "run"

    def after_step(self):
        before(self)
        if self.state.position.step == 30:
            self.network.classifier.weight.data[0, 0] = math.nan

    monkeypatch.setattr(run.Run, "after_step", after_step)
    with pytest.raises(MaskConnectError, match="not finite after the last step"):
        runs.run(runs.tiny(tmp_path), out)
    assert not (out / "summary.json").exists()
