"""A whole run: four phases, with the freeze after the one that learns (appendix, implementation details).

    for each phase: freeze, if its masks are not to be learned
        for each epoch: train, evaluate, record
    save the final network

Everything that changes is in `State`. A run that is stopped anywhere goes on from its last checkpoint and ends with the
same weights, masks, draws and metrics as one that never was.
"""

from __future__ import annotations

import math
import os
import time
from contextlib import ExitStack, nullcontext
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from maskconnect.core.lookup import freeze, masks_of, wiring_of
from maskconnect.core.metrics import changes, connections, mask_entropy
from maskconnect.core.optim import advance
from maskconnect.errors import LostRankError, LostWorkerError, MaskConnectError, ToldElsewhereError
from maskconnect.recipes.schema import Recipe
from maskconnect.training import images, options
from maskconnect.training.agreement import check_agreement
from maskconnect.training.diagnostics import scales_in_words
from maskconnect.training.environment import differences, machine_of
from maskconnect.training.evaluation import Evaluation
from maskconnect.training.folder import DATA, RunFolder
from maskconnect.training.metrics import Tally
from maskconnect.training.network import is_synced, load_weights, make_network
from maskconnect.training.norms import average_statistics_, statistics
from maskconnect.training.options import Options
from maskconnect.training.predictions import drawing
from maskconnect.training.progress import Silent
from maskconnect.training.ranks import (
    ALONE,
    Ranks,
    averaged,
    digest_of_plain,
    digest_of_weights,
    join,
    leave,
    lost,
    reason,
)
from maskconnect.training.schedule import Schedule, nonfinite
from maskconnect.training.state import new_state
from maskconnect.training.step import Step, compiler_errors_in_a_sentence, gradients
from maskconnect.training.stop import LOST_WORKER, Stopped, StopRequests
from maskconnect.training.summary import finish
from maskconnect.training.tensorboard import Board

SMALLEST_SCALE = 1e-4
"""Down to which scale fp16 may go on without a usable gradient; it starts at 65536, and halves each time."""


def train(recipe: Recipe, out: Path, how: Options | None = None, show: Silent | None = None) -> dict[str, Any]:
    """Train a recipe in the folder `out`, or go on with it; returns its summary.

    Raises `Stopped` after SIGTERM or Ctrl-C, and `LostWorkerError` after the death of a process that loads images, when
    all is saved.
    """
    how, display, requests = how or Options(), show or Silent(), StopRequests()
    requests.patient = (
        "TORCHELASTIC_RUN_ID" in os.environ
    )  # torchrun passes on what its workers have got, and kills later
    ranks = join(how.device)
    folder = RunFolder(out, writes=ranks.first)
    try:
        with ExitStack() as stack:
            if ranks.count > 1:  # all stop together: one that ended by itself would leave the others waiting
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
            ranks.check(requests)  # the run has ended, but whoever asked to stop may have further ones in mind
            return summary
    except RuntimeError as error:
        if ranks.count == 1 or not lost(error):
            raise
        raise LostRankError(
            f"another rank has gone ({reason(error)}); a new start goes on from the last checkpoint."
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
        self.forward, self.forward_learns = self.network, False  # the network, as it is called in training
        self.whole = True  # whether what is in memory is worth a checkpoint
        self.counted = self.saved = time.monotonic()

    def run(self) -> dict[str, Any]:
        """All that is left of the run."""
        self.begin()
        try:
            while self.state.position.phase < len(self.recipe.phase):
                self.run_phase()
            self.fix_wiring()
            if not self.finite:
                raise MaskConnectError("the weights are not finite after the last step; begin anew with lower rates.")
            predictions, validation = self.evaluation.predictions(), self.evaluation.validation()
        except (Stopped, LostWorkerError) as error:
            raise self.saved_before(error) from None
        finally:
            self.board.close()
        self.count_time()
        finished = self.ranks.on_first(
            lambda: finish(self.recipe, self.folder, self.state, self.images, predictions, validation)
        )
        return cast(dict[str, Any], finished)

    def check(self) -> None:
        """Stop here if asked to."""
        self.ranks.check(self.requests)

    def saved_before(self, error: Stopped | LostWorkerError) -> Exception:
        """Save, all ranks at one step; returns what this one then ends with."""
        stopped = error if isinstance(error, Stopped) else self.agreed()
        if self.whole:
            self.save()
        self.ranks.wait()  # until it is saved
        if stopped.number != LOST_WORKER:  # a loader's workers may have been told to end before the run was
            return stopped
        place = f"step {self.state.position.step:,}" if self.whole else "the last checkpoint"
        if isinstance(error, Stopped):
            return LostRankError(
                f"another rank has lost a process that loads images; a new start goes on from {place}."
            )
        return LostWorkerError(f"{str(error).rstrip('.')}: the run goes on from {place}.")

    def agreed(self) -> Stopped:
        """How all ranks stop, of which the others have got to their next check."""
        self.requests.asked = self.requests.asked or LOST_WORKER
        try:
            self.check()
        except Stopped as stopped:
            return stopped
        raise AssertionError("a reason to stop was given")

    def begin(self) -> None:
        """Go on from the last checkpoint, or begin."""
        found = self.ranks.on_first(lambda: self.folder.checkpoints.latest(self.show.line))
        self.ranks.check_same(digest_of_plain(self.images.fingerprint()), "rank {} has other images than rank 0")
        if found is None:
            if self.recipe.init_from is not None:
                place = Path(self.recipe.init_from)
                self.show.line(self.ranks.together(lambda: load_weights(self.network, place)))
                self.ranks.check_same(
                    digest_of_weights(self.network), "--init-from: rank {} has other weights than rank 0"
                )
            self.ranks.on_first(lambda: self.folder.open_metrics(0))
            self.ranks.on_first(lambda: self.folder.write_json(DATA, self.images.fingerprint()))
            self.state.top = connections(self.network)
            self.keep_masks(epoch=0)
        else:
            step, saved = found
            self.ranks.on_first(lambda: self.images.compare(self.folder.data()))
            self.state.load(saved)
            self.ranks.on_first(lambda: self.folder.open_metrics(saved["metrics_size"]))
            self.board.first = step + 1
            self.show.line(f"going on from step {step:,} of {self.schedule.steps:,}")
            for difference in differences(saved["machine"], machine_of(self.how)):
                self.show.line(f"note: {difference}, so the result will not be the same to the bit")
        self.folder.note_start(self.how, self.state.position.step)
        self.network.train()

    def run_phase(self) -> None:
        """The rest of a phase."""
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
                self.save_now_and_then()
        position.phase, position.epoch = position.phase + 1, 0
        self.save()

    def fix_wiring(self) -> None:
        """Freeze, if that has not been done, and write the wiring down."""
        if self.evaluation.learning:
            self.whole = False  # the last checkpoint is from just before
            found = self.state.freeze = self.freeze()
            self.record({"kind": "freeze", **self.schedule.labels(), **found})
            drawn, frozen = (found[key]["top1"] for key in ("drawn", "frozen"))
            wiring = "their top-K" if self.learns_masks else "a random wiring"
            self.show.line(f"freeze: test accuracy {drawn:.2f} % with drawn masks, {frozen:.2f} % with {wiring}")
            self.whole = True
        self.folder.write_json("wiring.json", wiring_of(self.network))

    @property
    def learns_masks(self) -> bool:
        """Whether masks learn; a control only draws from them."""
        return self.recipe.learning.gradient != "none"

    def freeze(self) -> dict[str, Any]:
        """Fix the wiring, to the top-K or at random; accuracy before, with drawn masks, and after."""
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
        """The rest of an epoch."""
        state, position = self.state, self.state.position
        forward = self.wrapped()
        started = time.perf_counter()
        for x, y in self.images.train.epoch(self.schedule.epoch, first=position.batch):
            waited = time.perf_counter() - started
            self.check()
            with compiler_errors_in_a_sentence() if self.how.compile else nullcontext():
                step = self.step(forward, x, y)
            position.batch, position.step = position.batch + 1, position.step + 1
            seconds = time.perf_counter() - started
            for tally in (state.interval, state.epoch, state.phases[position.phase]):
                tally.add(step, seconds, waited)
            self.after_step()
            started = time.perf_counter()

    def step(self, forward: nn.Module, x: Tensor, y: Tensor) -> Step:
        """Algorithm 1 for one batch; `mc.attach` clips the masks after the optimizer's step."""
        optimizer, scaler, parts = self.state.optimizer, self.state.scaler, self.recipe.training.accumulate
        before = [buffer.clone() for buffer in statistics(self.network)] if self.how.skip_nonfinite else []
        count = self.images.train.images_of(self.state.position.batch)
        step = gradients(
            forward, optimizer, x, y, parts=parts, machine=self.machine, scaler=scaler, ranks=self.ranks, images=count
        )
        average_statistics_(self.network, self.ranks)
        scaling = scaler is not None and scaler.get_scale() > SMALLEST_SCALE  # and finds a scale that fits by itself
        if not math.isfinite(step.loss) or not (scaling or math.isfinite(step.gradient)):
            self.complain(step, x)
            for buffer, value in zip(statistics(self.network), before, strict=True):
                buffer.copy_(value)
            self.state.skipped += 1
            advance(self.network)
            return Step(loss=0.0, correct=0, images=0, gradient=0.0)
        if scaler is None:
            optimizer.step()
        else:  # which skips the step where gradients have overflowed
            scale = scaler.get_scale()
            scaler.step(optimizer)
            scaler.update()
            if scaler.get_scale() < scale:
                advance(self.network)
        return step

    def complain(self, step: Step, x: Tensor) -> None:
        """Say where the loss was not finite; an error, unless such batches are to be left out."""
        what, phase = nonfinite(step, self.schedule), self.schedule.phase
        if self.how.skip_nonfinite:
            self.show.line(f"{what}; this batch is left out")
            return
        scales = scales_in_words(self.network, self.machine.ready(x))
        kind = MaskConnectError if self.ranks.first else ToldElsewhereError
        raise kind(
            f"{what}. The scales of activations, module by module: {scales}. Begin anew with a lower "
            f"phase.{phase.name}.lr (--set, --fresh), or leave such batches out by --skip-nonfinite."
        )

    def after_step(self) -> None:
        """Metrics, progress, and a checkpoint if the last is old."""
        state, last = self.state, self.state.position.batch == self.schedule.batches
        if last or state.interval.steps >= self.how.log_every:
            line = {"kind": "step", **self.schedule.labels(), **state.interval.means()}
            if self.ranks.count > 1:
                line["draws"] = self.ranks.check_draws(self.network, f"step {state.position.step}")
            self.record(line)
            state.interval = Tally()
        self.show.progress(self.schedule.progress(state.epoch.means()))
        if not last:
            self.save_now_and_then()

    def end_epoch(self) -> None:
        """Evaluate and record."""
        state, schedule = self.state, self.schedule
        if not state.epoch.images:
            raise MaskConnectError(
                f"every batch of epoch {schedule.epoch + 1} was left out, because its loss was not finite; begin anew "
                f"with a lower phase.{schedule.phase.name}.lr (--set, --fresh)."
            )
        line = {"kind": "epoch", **schedule.labels(), **state.epoch.means(), "seconds": round(state.epoch.seconds, 3)}
        if schedule.evaluated:
            line |= self.evaluation.epoch()
            state.note_best(line)
        if self.evaluation.learning:
            top = connections(self.network)
            line |= {"mask_entropy": mask_entropy(self.network), "top_changes": changes(state.top, top)}
            state.top = top
            self.keep_masks(epoch=schedule.epoch + 1)
        self.record(line | {"activation_scales": self.evaluation.scales(), "skipped": state.skipped})
        if schedule.last_of_phase:
            found = "".join(f"  {part} {line[part]['top1']:.2f} %" for part in ("validation", "test") if part in line)
            count, rate = schedule.phase.epochs, schedule.phase.lr
            epochs = f"{count} epoch{'s' * (count > 1)} at rate {rate:g}"
            self.show.line(f"{schedule.title + ':':<20} {epochs:<23}  train {line['accuracy']:.2f} %{found}")
        state.epoch = Tally()

    def keep_masks(self, epoch: int) -> None:
        """Keep the real masks of every stack, and what candidate each entry is of."""
        if self.recipe.learns:
            kept = {
                f"stack{i}.{name}": getattr(masks, name).detach().cpu()
                for i, masks in enumerate(masks_of(self.network))
                for name in ("real", "source")
            }
            self.folder.write_tensors(f"masks/epoch-{epoch:04d}.safetensors", kept)

    def record(self, line: dict[str, Any]) -> None:
        """A line of metrics, for those who read files and for those who look at TensorBoard."""
        self.folder.record(line)
        self.board.add(line)

    def wrapped(self) -> nn.Module:
        """The network, whose gradients ranks average; compiled, if that was asked for and its wiring is fixed."""
        learning = self.evaluation.learning
        if self.forward is self.network or learning != self.forward_learns:  # the masks have a gradient no more
            forward = averaged(self.network) if self.ranks.count > 1 else self.network
            if self.how.compile and not learning:  # were it dynamic, it would matter which batch size comes first
                forward = cast(nn.Module, torch.compile(forward, dynamic=False))
            self.forward, self.forward_learns = forward, learning
        return self.forward

    def save_now_and_then(self) -> None:
        """A checkpoint, if the last one is old."""
        if time.monotonic() - self.saved >= self.how.checkpoint_every:
            self.save()

    def save(self) -> None:
        """Write a checkpoint, unless the last step has ruined the weights: the next one will say so."""
        self.count_time()
        self.saved = time.monotonic()
        if not (self.finite and self.ranks.first):
            return
        more = {"metrics_size": self.folder.metrics_size(), "machine": machine_of(self.how)}
        self.folder.checkpoints.save(self.state.position.step, self.state.to_dict() | more)
        self.board.flush()

    @property
    def finite(self) -> bool:
        """Whether the weights are numbers."""
        return all(bool(p.isfinite().all()) for p in self.network.parameters())

    def count_time(self) -> None:
        """Add the time since the last call to that of the run."""
        now = time.monotonic()
        self.state.seconds += now - self.counted
        self.counted = now
