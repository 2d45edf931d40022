"""The callback in the real Trainer of Lightning."""

import csv

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from small import Regression, copied, differences, samples
from torch.utils.data import DataLoader

import maskconnect as mc
from maskconnect.integrations.lightning import MaskConnectCallback

EPOCHS, BATCHES = 6, 5
HOWS = {"draw": mc.Draw(), "blend": mc.Blend(steps=15)}
pytestmark = pytest.mark.filterwarnings(
    "ignore:.*LeafSpec.* is deprecated",  # lightning 2.5 beside torch 2.13
    "ignore:.*does not have many workers",
    "ignore:The .srun. command is available",
    "ignore:The dirpath has changed from",
    "ignore:Checkpoint directory .* exists and is not empty",
)


class Module(LightningModule):
    """With `grouped`, the optimizer is made with `mc.param_groups`."""

    def __init__(self, seed=0, grouped=True):
        super().__init__()
        self.model, self.grouped = Regression(seed), grouped

    def training_step(self, batch, _):
        return self.model(**batch)["loss"]

    def configure_optimizers(self):
        if self.grouped:
            return torch.optim.AdamW(mc.param_groups(self, lr=0.01, mask_lr=0.1), weight_decay=0.0)
        return torch.optim.AdamW(self.parameters(), lr=0.01, weight_decay=0.0)


def fit(folder, module, *callbacks, checkpoint=None, **options):
    trainer = Trainer(
        max_epochs=EPOCHS,
        accelerator="cpu",
        logger=CSVLogger(folder, name="", version=""),
        log_every_n_steps=BATCHES,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[ModelCheckpoint(folder, filename="{epoch}", save_top_k=-1), *callbacks],
        **options,
    )
    trainer.fit(module, DataLoader(samples(8 * BATCHES), 8), ckpt_path=checkpoint)
    return trainer


def lines(folder):
    with (folder / "metrics.csv").open() as file:
        return list(csv.DictReader(file))


@pytest.fixture(scope="module", params=HOWS)
def whole(request, tmp_path_factory):
    """A run that was not interrupted, frozen after 3 of 6 epochs; and how to start it again from another seed."""

    def start(folder, seed, checkpoint=None):
        module = Module(seed)
        fit(folder, module, MaskConnectCallback(how=HOWS[request.param], freeze_at=15), checkpoint=checkpoint)
        return module

    folder = tmp_path_factory.mktemp("whole")
    return start, start(folder, seed=0), folder


@pytest.mark.parametrize("epoch", [1, 2, 4], ids=["before the freeze", "at the freeze", "after the freeze"])
def test_a_resumed_run_is_equal_bitwise(whole, epoch, tmp_path):
    start, module, folder = whole
    resumed = start(tmp_path, seed=5, checkpoint=folder / f"epoch={epoch}.ckpt")
    assert differences(resumed.state_dict(), module.state_dict()) == []
    changed = differences(copied(Module()), module.state_dict())
    for part in ("masks.real", "masks.binary", "masks.frozen", "masks.progress", "weight"):
        assert any(name.endswith(part) for name in changed), part
    assert lines(tmp_path) == lines(folder)[epoch + 1 :]


def test_a_checkpoint_needs_no_code_to_be_read(whole):
    _, module, folder = whole
    saved = torch.load(folder / f"epoch={EPOCHS - 1}.ckpt", weights_only=True)
    assert differences(saved["state_dict"], module.state_dict()) == []


def test_the_log_has_the_metrics_of_the_masks_and_the_wiring_is_drawn(tmp_path):
    fit(tmp_path, Module(), MaskConnectCallback(how=mc.Blend(steps=15), draw=tmp_path / "new" / "wiring.svg"))
    found = lines(tmp_path)
    assert [float(line["masks/progress"]) for line in found] == [5, 10, 15, 15, 15, 15]
    assert [float(line["masks/frozen"]) for line in found] == [0, 0, 1, 1, 1, 1]
    for name in ("entropy", "moved", "changes", "alive", "temperature", "parameters"):
        assert all(line[f"masks/{name}"] for line in found), name
    assert "learned, K=2" in (tmp_path / "new" / "wiring.svg").read_text()


def test_an_optimizer_without_groups_takes_the_rate_of_the_callback(tmp_path):
    grouped, alone = Module(), Module(grouped=False)
    fit(tmp_path / "grouped", grouped, MaskConnectCallback(how=mc.Blend(steps=15)))
    fit(tmp_path / "alone", alone, MaskConnectCallback(how=mc.Blend(steps=15), mask_lr=0.1))
    for name, value in grouped.state_dict().items():
        torch.testing.assert_close(alone.state_dict()[name], value, msg=lambda m, name=name: f"{name}: {m}")
    assert not torch.equal(grouped.model.stack.masks.real, Module().model.stack.masks.real)


def test_masks_are_frozen_after_an_epoch_and_steps_count_whole_batches(tmp_path):
    module = Module()
    fit(tmp_path, module, MaskConnectCallback(freeze_at_epoch=2), accumulate_grad_batches=BATCHES)
    assert module.model.stack.masks.steps_taken == 2
    assert module.model.stack.masks.is_frozen
    assert [float(line["masks/frozen"]) for line in lines(tmp_path)] == [1]  # the fifth step is the first that is told


def test_an_optimizer_that_does_not_hold_the_masks_is_an_error(tmp_path):
    module = Module()
    module.configure_optimizers = lambda: torch.optim.SGD(module.model.stack.blocks.parameters(), lr=0.1)
    with pytest.raises(mc.ConfigError, match="does not hold the masks"):
        fit(tmp_path, module, MaskConnectCallback())
