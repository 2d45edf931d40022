"""`mc.Recorder`: a run folder for your own training loop, which `maskconnect report` shows.

recording.json       the stacks of the model: layout, candidates, fan-in, and the kinds and sizes of blocks
environment.json     versions and machine of every start
metrics.jsonl        a line per `every` steps, and a line per epoch
masks/               the masks at the start, and at the end of every epoch in which they learn
wiring.json          which modules feed which, once the run is closed
summary.json         the last and the best result, once the run is closed
"""

from __future__ import annotations

import math
import os
import time
from pathlib import Path
from types import TracebackType
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from maskconnect.core.count import count_parameters, pruned_parameters
from maskconnect.core.lookup import masks_of, wiring_of
from maskconnect.core.metrics import mask_entropy
from maskconnect.errors import ConfigError, integer
from maskconnect.report.means import Means, Value
from maskconnect.report.recording import Recording, describe, learning_rates, new_connections, used
from maskconnect.training.folder import SUMMARY, WIRING

OWN = {"kind", "epoch", "step", "lr", "mask_lr", "mask_decay", "mask_entropy"}
"""The values in a line of metrics that are not the user's."""


class Recorder:
    """Record your own training loop in a folder that `maskconnect report` shows.

    The page shows the wiring after every epoch, a curve of every value, and the phases: masks learn until you call
    `mc.freeze(model)`. If the process dies, only the current epoch is lost. In distributed training, rank 0 writes.

    Args:
        model: a model with at least one `mc.MaskedStack`, learned or fixed; `mc.rewire` makes one too.
        folder: where to write. It must be new or empty, unless `resume` is given.
        optimizer: records the learning rates of this optimizer; that of the masks, if they have their own group, as
            `mc.param_groups` makes it.
        resume: True continues after the last complete epoch in `folder`, and starts a new recording if there is none.
            A number keeps that many epochs and discards later ones, for an older checkpoint. Load the checkpoint
            before the first step.
        every: the number of steps per line of metrics.

    Example:
        ```python
        with mc.Recorder(model, "runs/mine", optimizer=optimizer) as recorder:
            for epoch in range(10):
                for x, y in loader:
                    ...
                    recorder.step(loss=loss)
                recorder.epoch(accuracy=accuracy)
        ```
    """

    def __init__(
        self,
        model: nn.Module,
        folder: str | os.PathLike[str],
        *,
        optimizer: Optimizer | None = None,
        resume: bool | int = False,
        every: int = 50,
    ) -> None:
        if integer("every", every) < 1:
            raise ConfigError(f"every is {every}; it must be 1 or more.")
        if not isinstance(resume, bool) and (resume := integer("resume", resume)) < 0:
            raise ConfigError(f"resume is {resume}; it must be True, False, or the number of epochs to keep.")
        self.model, self.optimizer, self.every = model, optimizer, every
        described, self._masks = describe(model), masks_of(model)
        self._learned = any(masks.learned for masks in self._masks)
        self._steps, self._epochs, self._seconds = 0, 0, 0.0
        self._freeze: int | None = None
        self._test: dict[str, float] = {}
        self._best: dict[str, Any] | None = None
        self._interval, self._epoch = Means(), Means()
        self._recording: Recording | None = None
        self._closed = self._resumed = False
        self._used = used(model)
        if not dist.is_initialized() or dist.get_rank() == 0:
            self._recording = Recording(Path(folder), described, resume)
            try:
                self._begin(self._recording)
            except BaseException:
                self._release()
                raise
        self._since = time.monotonic()

    def _begin(self, recording: Recording) -> None:
        """Continue after the epochs that the folder holds. The model may get its weights and masks only later."""
        for line in recording.epochs:
            self._epochs, self._steps, self._seconds = line["epoch"], line["step"], line["seconds"]
            self._freeze, self._test = line["freeze"], dict(line["test"])
            self._note_best()
        self._resumed = bool(recording.epochs)
        recording.note_start(self.model, self._steps)
        if self._resumed:
            self._used = recording.used
        else:
            recording.keep_masks(self.model, 0)

    def step(self, **values: Value) -> None:
        """Record one optimizer step, after it was taken.

        Args:
            values: numbers, or tensors with one element, such as the loss. The page shows their mean over each epoch
                as "train". `accuracy` must be between 0 and 1. A tensor on a GPU is read only every few steps.
        """
        self._check_open()
        if taken := OWN & values.keys():
            raise ConfigError(f"{min(taken)} is recorded by mc.Recorder itself; choose another name.")
        self._note_freeze(self._epochs + bool(self._epoch.count))
        self._steps += 1
        self._interval.add(values)
        self._epoch.add(values)
        if self._interval.count == self.every:
            line = {"kind": "step", **self._place(self._epochs + 1), **self._interval.take()}
            self._write(line | {"mask_entropy": mask_entropy(self.model)})

    def epoch(self, **values: Value) -> None:
        """Record the end of an epoch: the masks, the means of its steps, and your results.

        Args:
            values: results such as the test accuracy and loss, which the page shows as "test". `accuracy` must be
                between 0 and 1.
        """
        self._check_open()
        results = Means()
        results.add(values)
        test, train = results.take(), self._epoch.take()
        self._note_freeze(self._epochs + 1)
        self._epochs, self._interval = self._epochs + 1, Means()
        self._test = {key: test[name] for name, key in (("loss", "loss"), ("accuracy", "top1")) if name in test}
        self._note_best()
        names = sorted({*train, *test} - {"loss", "accuracy"})
        line = {"kind": "epoch", **self._place(self._epochs), "seconds": self._time(), "freeze": self._freeze}
        line |= {name: train.get(name) for name in ("loss", "accuracy")} | {"test": self._test}
        line |= {"more": {name: [train.get(name), test.get(name)] for name in names}}
        if self._learns():
            before, self._used = self._used, used(self.model)
            line |= {"mask_entropy": mask_entropy(self.model), "top_changes": new_connections(before, self._used)}
            self._keep_masks()
        self._write(line)
        if self._recording is not None:
            self._recording.folder.metrics_size()  # which waits until the line is on the disk

    def close(self) -> None:
        """End the recording: write wiring.json and summary.json. A second call does nothing.

        Steps after the last call of `epoch` are recorded as one more epoch.
        """
        if self._closed:
            return
        try:
            self._end()
        finally:
            self._release()

    def _end(self) -> None:
        if self._epoch.count:
            self.epoch()
        idle = self._resumed  # nothing was recorded, so perhaps no checkpoint was loaded
        self._note_freeze(self._epochs)
        if self._learns() and not idle:  # the model may hold an earlier checkpoint by now
            self._keep_masks()
        if self._recording is not None:
            counts, pruned = count_parameters(self.model), pruned_parameters(self.model)
            summary: dict[str, Any] = {"epochs": self._epochs, "steps": self._steps, "freeze": self._freeze}
            summary |= {"seconds": self._time(), "test": self._test, "best": self._best}
            summary |= {"parameters": counts._asdict() | {"pruned": pruned.transitive}}
            self._recording.folder.write_json(WIRING, wiring_of(self.model))
            self._recording.folder.write_json(SUMMARY, summary)

    def __enter__(self) -> Recorder:
        return self

    def __exit__(self, kind: type[BaseException] | None, _: BaseException | None, __: TracebackType | None) -> None:
        if kind is None:
            self.close()
        else:  # the run has not ended: `resume=True` continues it
            self._release()

    def _release(self) -> None:
        self._closed = True
        if self._recording is not None:
            self._recording.close()

    def _check_open(self) -> None:
        if self._closed:
            raise ConfigError("this recorder is closed; open another with resume=True.")

    def _write(self, line: dict[str, Any]) -> None:
        if self._recording is not None:
            self._recording.folder.record(line)

    def _time(self) -> float:
        """The seconds of the whole run so far."""
        return round(self._seconds + time.monotonic() - self._since, 3)

    def _note_freeze(self, epoch: int) -> None:
        frozen = all(masks.is_frozen for masks in self._masks)
        if self._resumed and not frozen:
            self._freeze = None  # the masks of the checkpoint that was loaded still learn
        self._resumed = False
        if self._freeze is None and self._learned and frozen:
            self._freeze = epoch
            if epoch == self._epochs:  # they may have changed since its end, as by loading a checkpoint
                self._keep_masks()

    def _learns(self) -> bool:
        """Whether masks learned in the current epoch, so its wiring is kept."""
        return self._learned and (self._freeze is None or self._freeze >= self._epochs)

    def _keep_masks(self) -> None:
        if self._recording is not None:
            self._recording.keep_masks(self.model, self._epochs)

    def _note_best(self) -> None:
        top1 = self._test.get("top1")
        if top1 is None or not math.isfinite(top1):
            return
        if self._best is None or top1 > self._best["test"]["top1"]:
            self._best = {"epoch": self._epochs, "chosen_on": "test", "test": {"top1": top1}}

    def _place(self, epoch: int) -> dict[str, Any]:
        """The first values of every line of metrics: epoch, step and learning rates."""
        return {"epoch": epoch, "step": self._steps, **learning_rates(self.optimizer, self._masks)}
