"""The epochs in metrics.jsonl, the metrics of a run."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from maskconnect.reading import parse_json, read_text
from maskconnect.report.history import Epoch
from maskconnect.training.run_files import LARGEST


def read_epochs(place: Path, *, whole: bool) -> Iterator[Epoch]:
    """The epochs of a run so far; unless it is `whole`, its last line may be incomplete."""
    lines = read_text(place).splitlines() if place.exists() else []
    for number, text in enumerate(lines, start=1):
        try:
            line = parse_json(text, finite=False)
        except ValueError:
            if number == len(lines) and not whole:
                return
            raise ValueError(f"line {number} of {place.name} is not valid JSON") from None
        if line["kind"] == "epoch":
            yield _epoch(line)


def _epoch(line: dict[str, Any]) -> Epoch:
    test, validation = line.get("test") or {}, line.get("validation") or {}
    return Epoch(
        epoch=int(line["epoch"]),
        step=int(line["step"]),
        lr=_number(line["lr"]),
        mask_lr=_number(line["mask_lr"]),
        mask_decay=_number(line.get("mask_decay")),
        loss=_number(line["loss"]),
        accuracy=_number(line["accuracy"]),
        test_loss=_number(test.get("loss")),
        test_top1=_number(test.get("top1")),
        validation_top1=_number(validation.get("top1")),
        entropy=_number(line.get("mask_entropy")),
        changes=None if line.get("top_changes") is None else int(line["top_changes"]),
        scales=tuple(map(_number, line.get("activation_scales", []))),
        freeze=None if line.get("freeze") is None else int(line["freeze"]),
        more={str(name): (_number(a), _number(b)) for name, (a, b) in line.get("more", {}).items()},
    )


def _number(value: Any) -> float | None:
    """A number that can be plotted; None for anything else."""
    return None if value is None or not abs(float(value)) < LARGEST else float(value)
