"""Write the final files of a run: the network, its predictions and the summary."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from maskconnect.core.count import count_parameters
from maskconnect.data.batches import Pictures
from maskconnect.data.sets import Arrays, Images
from maskconnect.pruning.prune import pruned_parameters
from maskconnect.recipes.naming import fan_in_of
from maskconnect.recipes.schema import Recipe
from maskconnect.training.folder import CLASSES, INPUT, MODEL, PREDICTIONS, RunFolder
from maskconnect.training.images import Prepared
from maskconnect.training.predictions import Predictions
from maskconnect.training.state import State

WRONG = 32
"""The number of misclassified images to keep."""

SIDE = 64
"""The largest side of these images, in pixels."""


def finish(
    recipe: Recipe,
    folder: RunFolder,
    state: State,
    images: Prepared,
    predictions: Predictions,
    validation: dict[str, Any] | None,
) -> dict[str, Any]:
    """Write the final files, the summary last, and return it."""
    network = state.network
    folder.write_tensors(MODEL, {name: value.cpu() for name, value in network.state_dict().items()})
    folder.write_tensors(INPUT, {"mean": images.mean.cpu()})
    folder.write_tensors(PREDICTIONS, _predictions(predictions, images.test.images))
    folder.write_json(CLASSES, list(images.classes))
    summary = summarize(recipe, state, predictions, validation)
    folder.write_json("summary.json", summary)
    return summary


def summarize(
    recipe: Recipe, state: State, predictions: Predictions, validation: dict[str, Any] | None
) -> dict[str, Any]:
    """Return the summary: results of the last epoch, and the best epoch with the set that chose it (D12)."""
    counts, pruned = count_parameters(state.network), pruned_parameters(state.network)
    return {
        "recipe": recipe.name,
        "seed": recipe.seed,
        "connectivity": recipe.model.connectivity if isinstance(recipe.model.connectivity, str) else "explicit",
        "fan_in": fan_in_of(recipe.model) if recipe.model.fan_in is not None else None,
        "test": asdict(predictions.scores()),
        "validation": validation,
        "best": state.best,
        "freeze": state.freeze,
        "parameters": {
            "weights": counts.weights,
            "mask_entries": counts.mask_entries,
            "pruned_one_step": pruned.one_step,
            "pruned": pruned.transitive,
        },
        "epochs": recipe.epochs,
        "steps": state.position.step,
        "skipped": state.skipped,
        "seconds": round(state.seconds, 2),
        "step_seconds": {phase.name: _per_step(t) for phase, t in zip(recipe.phase, state.phases, strict=True)},
    }


def _per_step(tally: Any) -> float | None:
    return round(tally.seconds / tally.steps, 5) if tally.steps else None


def _predictions(predictions: Predictions, images: Images) -> dict[str, Tensor]:
    """Return the predictions, and small images of the most confident mistakes."""
    wrong = (predictions.class_NR[:, 0] != predictions.label_N).nonzero()[:, 0]
    most_confident = predictions.probability_NR[wrong, 0].argsort(descending=True, stable=True)
    wrong = wrong[most_confident][:WRONG]
    found = {
        "label": predictions.label_N,
        "class": predictions.class_NR,
        "probability": predictions.probability_NR,
        "wrong": wrong,
    }
    if len(wrong):
        found["wrong_images"] = torch.stack([small(images, int(index)) for index in wrong])
    return found


def small(images: Images, index: int) -> Tensor:
    """Return an image as bytes, C x H x W, with sides up to 64 pixels; images in files become square."""
    if isinstance(images, Arrays):
        picture = images.images[index].cpu()
        size = [min(SIDE, length) for length in picture.shape[1:]]
    else:
        picture, size = Pictures(images)[index][0], [SIDE, SIDE]
    if list(picture.shape[1:]) == size:
        return picture
    return F.interpolate(picture[None].float(), size, mode="area")[0].round().byte()
