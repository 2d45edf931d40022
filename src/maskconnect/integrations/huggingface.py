"""A callback for the Trainer of Hugging Face transformers.

    callback = MaskConnectCallback(mask_lr=0.03, how=mc.Blend(steps=1000), draw="wiring.svg")
    Trainer(model=model, args=args, train_dataset=data, callbacks=[callback]).train()

The Trainer creates its optimizer, scheduler and checkpoints as usual. The masks stay in the parameter group where it
puts them, follow its schedule from `mask_lr`, and are in its checkpoints: `train(resume_from_checkpoint=True)` resumes.
"""

from __future__ import annotations

import os
import warnings
from typing import Any

from torch import nn
from torch.optim import Optimizer

from maskconnect.core.learning import Learning
from maskconnect.errors import need
from maskconnect.integrations.course import Course

TrainerCallback: Any = need("transformers", extra="integrations").TrainerCallback


class MaskConnectCallback(TrainerCallback):  # type: ignore[misc]
    """Learn the wiring of a model that a Trainer trains.

    Args:
        mask_lr: the learning rate of the masks. It follows the Trainer's schedule, and has no weight decay.
        how: `mc.Draw()`, the default, or `mc.Blend(steps=N)`.
        freeze_at: the optimizer step after which masks are frozen. By default, when `how` has taken its `steps`.
        freeze_at_epoch: the number of epochs after which masks are frozen, instead of `freeze_at`.
        draw: a file for the wiring at the end of training, .svg or .png.
    """

    def __init__(
        self,
        *,
        mask_lr: float,
        how: Learning | None = None,
        freeze_at: int | None = None,
        freeze_at_epoch: int | None = None,
        draw: str | os.PathLike[str] | None = None,
    ) -> None:
        self.course = Course(
            how=how, mask_lr=mask_lr, freeze_at=freeze_at, freeze_at_epoch=freeze_at_epoch, drawing=draw
        )
        self.is_first = False

    def add_to(self, trainer: Any) -> None:
        """Add this callback to a Trainer before its loggers, so that TensorBoard and others log the mask metrics.

        With `callbacks=[...]` it would come after them.
        """
        trainer.callback_handler.callbacks.insert(0, self)
        self.is_first = True

    def on_train_begin(
        self, args: Any, state: Any, control: Any, model: nn.Module, optimizer: Optimizer, **_: Any
    ) -> None:
        """Attach the masks."""
        if args.report_to and not self.is_first:
            warnings.warn(
                f"the metrics of the masks do not reach {', '.join(args.report_to)}, because the Trainer calls "
                "loggers before other callbacks; use callback.add_to(trainer) instead of callbacks=[callback].",
                stacklevel=2,
            )
        unwrapped = getattr(optimizer, "optimizer", optimizer)  # accelerate's wrapper does not run hooks
        self.course.begin(unwrapped, model, step=state.global_step, epoch=state.epoch or 0.0)

    def on_step_end(self, args: Any, state: Any, control: Any, model: nn.Module, **_: Any) -> None:
        """Freeze the masks if learning is over; the Trainer logs, evaluates and saves after this."""
        self.course.after_step(model, step=state.global_step, epoch=state.epoch)

    def on_log(
        self, args: Any, state: Any, control: Any, model: nn.Module, logs: dict[str, Any] | None = None, **_: Any
    ) -> None:
        """Add the metrics of the masks to what the Trainer logs in training."""
        if logs is not None and "loss" in logs:
            found = self.course.report(model)
            logs.update(found)
            state.log_history[-1].update(found)  # an earlier copy of `logs`

    def on_train_end(self, args: Any, state: Any, control: Any, model: nn.Module, **_: Any) -> None:
        """Draw the wiring."""
        if state.is_world_process_zero:
            self.course.end(model)
