"""A callback for the Trainer of Lightning.

    def configure_optimizers(self):
        return torch.optim.AdamW(mc.param_groups(self, lr=1e-3, mask_lr=0.03))

    callback = MaskConnectCallback(how=mc.Blend(steps=1000), draw="wiring.svg")
    Trainer(max_epochs=10, callbacks=[callback]).fit(module, loader)

The masks are in Lightning's checkpoints: `fit(module, loader, ckpt_path=...)` resumes.
"""

from __future__ import annotations

import os
from typing import Any

from torch.optim import Optimizer

from maskconnect.core.learning import Learning
from maskconnect.core.lookup import masks_of
from maskconnect.errors import need
from maskconnect.integrations.course import Course

Callback: Any = need("lightning.pytorch", extra="integrations").Callback


class MaskConnectCallback(Callback):  # type: ignore[misc]
    """Learn the wiring of a LightningModule.

    Args:
        how: `mc.Draw()`, the default, or `mc.Blend(steps=N)`.
        mask_lr: the learning rate of the masks, if `configure_optimizers` does not use `mc.param_groups`.
        freeze_at: the optimizer step after which masks are frozen. By default, when `how` has taken its `steps`.
        freeze_at_epoch: the number of epochs after which masks are frozen, instead of `freeze_at`.
        draw: a file for the wiring at the end of training, .svg or .png.
    """

    def __init__(
        self,
        *,
        how: Learning | None = None,
        mask_lr: float | None = None,
        freeze_at: int | None = None,
        freeze_at_epoch: int | None = None,
        draw: str | os.PathLike[str] | None = None,
    ) -> None:
        self.course = Course(
            how=how, mask_lr=mask_lr, freeze_at=freeze_at, freeze_at_epoch=freeze_at_epoch, drawing=draw
        )

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Attach the masks, after model and optimizer have been restored."""
        optimizer = _optimizer(trainer, pl_module)
        self.course.begin(optimizer, pl_module, step=trainer.global_step, epoch=trainer.current_epoch)

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        """Freeze the masks if learning is over, and log; Lightning evaluates and saves after this."""
        epoch = trainer.current_epoch + trainer.is_last_batch
        self.course.after_step(pl_module, step=trainer.global_step, epoch=epoch)
        if trainer._logger_connector.should_update_logs:  # the condition of Lightning's own monitors
            pl_module.log_dict(self.course.report(pl_module))

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """Draw the wiring."""
        if trainer.is_global_zero:
            self.course.end(pl_module)


def _optimizer(trainer: Any, pl_module: Any) -> Optimizer:
    """Return the optimizer that holds the masks; if none does, `mc.attach` says what to do."""
    optimizers: list[Optimizer] = trainer.optimizers
    real = {id(masks.real) for masks in masks_of(pl_module)}
    holds = [o for o in optimizers if any(id(p) in real for group in o.param_groups for p in group["params"])]
    return (holds or optimizers)[0]
