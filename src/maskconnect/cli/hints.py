"""Suggestions for unknown options: the nearest option, or --set for a field of a recipe."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Sequence

_TABLES = {
    "data": "labels validation train_images test_images shrink",
    "augmentation": "size pad flip mean std area shorter test_shorter jitter lighting components",
    "model": "architecture depth layers width cardinality kinds fan_in connectivity aggregation norm stem mask_init "
    "use_all",
    "training": "batch_size weight_decay momentum nesterov norm_group accumulate reestimate evaluate_every",
    "learning": "way gradient credit images temperature cool uniform_floor decay keep",
    "phase.learn": "epochs lr mask_lr",
}
"""The fields of recipes, repeated here because reading them from the schema would import torch, which takes seconds."""

FIELDS = {name: f"{table}.{name}" for table, names in _TABLES.items() for name in names.split()}
"""The full name of each field, as --set takes it."""

ALSO = {"learning_rate": "lr", "batchsize": "batch_size"}


def hint(words: Sequence[str], options: Collection[str]) -> str:
    """Return what to type instead of the first word, which is not a valid option; "" if nothing is close."""
    flag, equals, value = words[0].partition("=")
    if not equals:
        value = words[1] if len(words) > 1 and not words[1].startswith("--") else "VALUE"
    name = flag.lstrip("-").replace("-", "_")
    field = FIELDS.get(ALSO.get(name, name))
    if field is not None:
        return f"it is a field of the recipe, so type: {_setting(field, value, options)}"
    near = difflib.get_close_matches(flag, options, n=1)
    return f"did you mean {near[0]}?" if near else ""


def _setting(field: str, value: str, options: Collection[str]) -> str:
    """Return the words that set a field, for a command with these options."""
    if "--over" in options and ("," in value or ".." in value):
        return f"--over {field}={value}"
    return f"{'' if '--set' in options else 'maskconnect train RECIPE '}--set {field}={value}"
