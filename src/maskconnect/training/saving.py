"""Start, save, resume and stop a run, on all ranks together."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from pathlib import Path

from torch import nn

from maskconnect.core.lookup import masks_of
from maskconnect.core.metrics import connections
from maskconnect.errors import LostRankError, LostWorkerError
from maskconnect.recipes.schema import Recipe
from maskconnect.training.environment import differences, machine_of
from maskconnect.training.folder import DATA, RunFolder
from maskconnect.training.images import Prepared
from maskconnect.training.network import load_weights
from maskconnect.training.options import Options
from maskconnect.training.progress import Silent
from maskconnect.training.ranks import Ranks, digest_of_plain, digest_of_weights
from maskconnect.training.schedule import Schedule
from maskconnect.training.state import State
from maskconnect.training.stop import LOST_WORKER, Stopped, StopRequests
from maskconnect.training.tensorboard import Board


@dataclass(kw_only=True)
class Saving:
    """Saves and resumes the state of a run."""

    recipe: Recipe
    folder: RunFolder
    how: Options
    show: Silent
    requests: StopRequests
    ranks: Ranks
    images: Prepared
    network: nn.Module
    state: State
    schedule: Schedule
    board: Board
    consistent: bool = True  # whether the state in memory can be saved
    counted: float = field(default_factory=time.monotonic)  # when the time of the run was last updated
    saved: float = field(default_factory=time.monotonic)  # when the last checkpoint was written

    def begin(self) -> None:
        """Resume from the last checkpoint, or start; when all checks have passed, show what was done."""
        lines = [f"{self.recipe.name}, seed {self.recipe.seed}, in {self.folder.path}"]
        found = self.ranks.on_first(lambda: self.folder.checkpoints.latest(self.show.line))
        self.ranks.check_same(
            digest_of_plain(self.images.fingerprint()),
            "rank {} has different images than rank 0",
            "Give all ranks the same data.",
        )
        if found is None:
            if self.recipe.init_from is not None:
                place = Path(self.recipe.init_from)
                lines.append(self.ranks.together(lambda: load_weights(self.network, place)))
                self.ranks.check_same(
                    digest_of_weights(self.network),
                    "--init-from: rank {} has different weights than rank 0",
                    "Give all ranks the same files.",
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
            lines.append(f"resuming from step {step:,} of {self.schedule.steps:,}")
            for difference in differences(saved["machine"], machine_of(self.how)):
                lines.append(f"note: {difference}, so the result will not be bitwise identical")
        for line in lines:
            self.show.line(line)
        self.folder.note_start(self.how, self.state.position.step)
        self.network.train()

    def save_if_old(self) -> None:
        """Save a checkpoint, if the last one is old."""
        if time.monotonic() - self.saved >= self.how.checkpoint_every:
            self.save()

    def save(self) -> None:
        """Save a checkpoint, unless the weights are not finite; the next step reports that."""
        self.count_time()
        self.saved = time.monotonic()
        if not (self.finite and self.ranks.first):
            return
        more = {"metrics_size": self.folder.metrics_size(), "machine": machine_of(self.how)}
        self.folder.checkpoints.save(self.state.position.step, self.state.to_dict() | more)
        self.board.flush()

    @property
    def finite(self) -> bool:
        """Whether all weights are finite."""
        return all(bool(p.isfinite().all()) for p in self.network.parameters())

    def count_time(self) -> None:
        """Add the time since the last call to the time of the run."""
        now = time.monotonic()
        self.state.seconds += now - self.counted
        self.counted = now

    def keep_masks(self, epoch: int) -> None:
        """Write the real masks of every stack, and the source of each entry."""
        if self.recipe.learns:
            kept = {
                f"stack{i}.{name}": getattr(masks, name).detach().cpu()
                for i, masks in enumerate(masks_of(self.network))
                for name in ("real", "source")
            }
            self.folder.write_tensors(f"masks/epoch-{epoch:04d}.safetensors", kept)

    def save_and_stop(self, error: Stopped | LostWorkerError) -> Exception:
        """Save the state, with all ranks at the same step; return the error that this rank ends with."""
        stopped = error if isinstance(error, Stopped) else self.agreed()
        if self.consistent:
            self.save()
        self.ranks.wait()  # until rank 0 has saved
        if stopped.number != LOST_WORKER:  # a signal may reach the workers of a loader before the run
            return stopped
        place = f"step {self.state.position.step:,}" if self.consistent else "the last checkpoint"
        if isinstance(error, Stopped):
            return LostRankError(f"another rank lost a process that loads images; start again to resume from {place}.")
        return LostWorkerError(f"{str(error).rstrip('.')} to resume from {place}.")

    def agreed(self) -> Stopped:
        """Return how all ranks stop; the others wait at their next check."""
        self.requests.asked = self.requests.asked or LOST_WORKER
        try:
            self.ranks.check(self.requests)
        except Stopped as stopped:
            return stopped
        raise AssertionError("a reason to stop was given")
