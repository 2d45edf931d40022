"""A run: its phases, and the freeze after the phase that learns masks (appendix, implementation details).

    for each phase: freeze masks, if the phase does not learn them
        for each epoch: train, evaluate, record
    save the final network

Everything that changes is in `State`. A stopped run resumes from its last checkpoint and ends with the same weights,
masks, draws and metrics as an uninterrupted one.
"""

from __future__ import annotations

import os
import time
from contextlib import ExitStack, nullcontext
from pathlib import Path
from typing import Any, cast

from maskconnect.core.lookup import freeze, masks_of, wiring_of
from maskconnect.core.metrics import changes, connections, mask_entropy
from maskconnect.errors import LostRankError, LostWorkerError, MaskConnectError
from maskconnect.recipes.schema import Recipe
from maskconnect.training import images, options
from maskconnect.training.agreement import check_agreement
from maskconnect.training.evaluation import Evaluation
from maskconnect.training.folder import RunFolder
from maskconnect.training.metrics import Tally
from maskconnect.training.network import is_synced, make_network
from maskconnect.training.options import Options
from maskconnect.training.predictions import drawing
from maskconnect.training.progress import Silent
from maskconnect.training.ranks import (
    ALONE,
    Ranks,
    join,
    leave,
    lost,
    reason,
)
from maskconnect.training.saving import Saving
from maskconnect.training.schedule import Schedule
from maskconnect.training.state import new_state
from maskconnect.training.step import compiler_errors_explained
from maskconnect.training.stop import Stopped, StopRequests
from maskconnect.training.summary import finish
from maskconnect.training.tensorboard import Board
from maskconnect.training.update import Updates


def train(recipe: Recipe, out: Path, how: Options | None = None, show: Silent | None = None) -> dict[str, Any]:
    """Train a recipe in the folder `out`, or resume it; return its summary.

    Raises `Stopped` after SIGTERM or Ctrl-C, and `LostWorkerError` if a process that loads images dies. In both cases
    the state is saved first.
    """
    how, display, requests = how or Options(), show or Silent(), StopRequests()
    # torchrun sends signals again that its workers already got, and kills them later.
    requests.patient = "TORCHELASTIC_RUN_ID" in os.environ
    ranks = join(how.device)
    folder = RunFolder(out, writes=ranks.first)
    try:
        with ExitStack() as stack:
            if ranks.count > 1:  # all stop together: the others would wait for a rank that ended alone
                stack.enter_context(requests)
            check_agreement(recipe, how, ranks)
            ended: dict[str, Any] | None = ranks.on_first(lambda: folder.claim(recipe))
            if ended is not None:
                return ended
            run = ranks.together(lambda: Run(recipe, folder, how, display, requests, ranks))
            if ranks.count == 1:
                stack.enter_context(requests)
            stack.enter_context(display)
            summary: dict[str, Any] = run.run()
            ranks.check(requests)  # the run has finished, but its caller may have more runs to stop
            return summary
    except RuntimeError as error:
        if ranks.count == 1 or not lost(error):
            raise
        raise LostRankError(
            f"another rank has stopped ({reason(error)}); start again to resume from the last checkpoint."
        ) from None
    finally:
        folder.close()
        leave(ranks)


class Run:
    """One process's part of a run."""

    def __init__(
        self,
        recipe: Recipe,
        folder: RunFolder,
        how: Options,
        show: Silent,
        requests: StopRequests,
        ranks: Ranks = ALONE,
    ) -> None:
        self.recipe, self.folder, self.how, self.show, self.requests = recipe, folder, how, show, requests
        self.ranks, self.machine = ranks, options.prepare(how)
        synced = is_synced(recipe, ranks.count, how.norm)
        self.images = images.prepare(recipe, how, self.machine.device, rank=ranks.rank, ranks=ranks.count)
        self.network = make_network(recipe, len(self.images.classes), self.images.channels, self.machine, synced=synced)
        self.state = new_state(self.network, recipe, len(self.images.train), self.machine.precision.scaler())
        self.schedule = Schedule(recipe=recipe, batches=len(self.images.train), position=self.state.position)
        self.evaluation = Evaluation(
            network=self.network,
            images=self.images,
            machine=self.machine,
            reestimate=recipe.training.reestimate,
            check=self.check,
            ranks=ranks,
        )
        self.board = Board(folder.path / "tensorboard", writes=ranks.first)
        self.saving = Saving(
            recipe=recipe,
            folder=folder,
            how=how,
            show=show,
            requests=requests,
            ranks=ranks,
            images=self.images,
            network=self.network,
            state=self.state,
            schedule=self.schedule,
            board=self.board,
        )
        self.updates = Updates(
            recipe=recipe,
            how=how,
            machine=self.machine,
            network=self.network,
            state=self.state,
            schedule=self.schedule,
            show=show,
            ranks=ranks,
        )

    def run(self) -> dict[str, Any]:
        """Run the rest of the run, and return its summary."""
        self.saving.begin()
        try:
            while self.state.position.phase < len(self.recipe.phase):
                self.run_phase()
            self.fix_wiring()
            if not self.saving.finite:
                raise MaskConnectError(
                    "the weights are not finite after the last step; restart with lower learning rates."
                )
            predictions, validation = self.evaluation.predictions(), self.evaluation.validation()
        except (Stopped, LostWorkerError) as error:
            raise self.saving.save_and_stop(error) from None
        finally:
            self.board.close()
        self.saving.count_time()
        finished = self.ranks.on_first(
            lambda: finish(self.recipe, self.folder, self.state, self.images, predictions, validation)
        )
        return cast(dict[str, Any], finished)

    def check(self) -> None:
        """Raise `Stopped` if any rank was asked to stop."""
        self.ranks.check(self.requests)

    def run_phase(self) -> None:
        """Run the rest of a phase."""
        position, phase = self.state.position, self.schedule.phase
        if not (phase.mask_lr and self.recipe.learns):
            self.fix_wiring()
        for group, rate in zip(self.state.optimizer.param_groups, (phase.lr, phase.mask_lr), strict=False):
            group["lr"] = rate
        while position.epoch < phase.epochs:
            self.train_epoch()
            self.end_epoch()
            position.epoch, position.batch = position.epoch + 1, 0
            if position.epoch < phase.epochs:
                self.saving.save_if_old()
        position.phase, position.epoch = position.phase + 1, 0
        self.saving.save()

    def fix_wiring(self) -> None:
        """Freeze the masks, if they are not frozen yet, and write the wiring."""
        if self.evaluation.learning:
            self.saving.consistent = False  # the last checkpoint is from just before the freeze
            found = self.state.freeze = self.freeze()
            self.record({"kind": "freeze", **self.schedule.labels(), **found})
            drawn, frozen = (found[key]["top1"] for key in ("drawn", "frozen"))
            before, wiring = self.recipe.masks_in_training, "their top-K" if self.learns_masks else "a random wiring"
            self.show.line(f"freeze: test accuracy {drawn:.2f} % with {before}, {frozen:.2f} % with {wiring}")
            self.saving.consistent = True
        self.folder.write_json("wiring.json", wiring_of(self.network))

    @property
    def learns_masks(self) -> bool:
        """Whether masks learn; in a control they are only drawn from."""
        return self.recipe.learning.gradient != "none"

    def freeze(self) -> dict[str, Any]:
        """Fix the wiring, to the top-K or at random; return the scores before, with drawn masks, and after."""
        with drawing(self.network):
            drawn = self.evaluation.scores("test")
        if not self.learns_masks:
            for masks in masks_of(self.network):
                masks.fix_at_random(self.recipe.seed)
        freeze(self.network)
        if self.recipe.training.reestimate:
            self.evaluation.reestimate_()
        by = min(self.recipe.training.reestimate, len(self.images.train))
        return {"drawn": drawn, "frozen": self.evaluation.scores("test"), "reestimated_by": by}

    def train_epoch(self) -> None:
        """Train for the rest of an epoch."""
        state, position = self.state, self.state.position
        forward = self.updates.wrapped(learning=self.evaluation.learning)
        started = time.perf_counter()
        for x, y in self.images.train.epoch(self.schedule.epoch, first=position.batch):
            waited = time.perf_counter() - started
            self.check()
            with compiler_errors_explained() if self.how.compile else nullcontext():
                step = self.updates.step(forward, x, y, self.images.train.images_of(position.batch))
            position.batch, position.step = position.batch + 1, position.step + 1
            seconds = time.perf_counter() - started
            for tally in (state.interval, state.epoch, state.phases[position.phase]):
                tally.add(step, seconds, waited)
            self.after_step()
            started = time.perf_counter()

    def after_step(self) -> None:
        """Record metrics, show progress, and save a checkpoint if the last one is old."""
        state, last = self.state, self.state.position.batch == self.schedule.batches
        if last or state.interval.steps >= self.how.log_every:
            line = {"kind": "step", **self.schedule.labels(), **state.interval.means()}
            if self.ranks.count > 1:
                line["draws"] = self.ranks.check_draws(self.network, f"step {state.position.step}")
            self.record(line)
            state.interval = Tally()
        self.show.progress(self.schedule.progress(state.epoch.means()))
        if not last:
            self.saving.save_if_old()

    def end_epoch(self) -> None:
        """Evaluate and record."""
        state, schedule = self.state, self.schedule
        if not state.epoch.images:
            raise MaskConnectError(
                f"every batch of epoch {schedule.epoch + 1} was skipped, because its loss was not finite; restart with "
                f"a lower phase.{schedule.phase.name}.lr (--set, --fresh)."
            )
        line = {"kind": "epoch", **schedule.labels(), **state.epoch.means(), "seconds": round(state.epoch.seconds, 3)}
        if schedule.evaluated:
            line |= self.evaluation.epoch()
            state.note_best(line)
        if self.evaluation.learning:
            top = connections(self.network)
            line |= {"mask_entropy": mask_entropy(self.network), "top_changes": changes(state.top, top)}
            state.top = top
            self.saving.keep_masks(epoch=schedule.epoch + 1)
        self.record(line | {"activation_scales": self.evaluation.scales(), "skipped": state.skipped})
        if schedule.last_of_phase:
            found = "".join(f"  {part} {line[part]['top1']:.2f} %" for part in ("validation", "test") if part in line)
            count, rate = schedule.phase.epochs, schedule.phase.lr
            epochs = f"{count} epoch{'s' * (count > 1)} at rate {rate:g}"
            self.show.line(f"{schedule.title + ':':<20} {epochs:<23}  train {line['accuracy']:.2f} %{found}")
        state.epoch = Tally()

    def record(self, line: dict[str, Any]) -> None:
        """Write a line of metrics, to the run folder and for TensorBoard."""
        self.folder.record(line)
        self.board.add(line)
