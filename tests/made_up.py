"""Run folders that no training made: of networks too large to train in a test, and with hostile words in them."""

import json
from pathlib import Path

import torch

from maskconnect.core.checks import fan_in_of_targets
from maskconnect.core.masks import ConnectivityMasks
from maskconnect.recipes import load, write
from maskconnect.training.files import save_tensors

CIFAR_RESNET = "paper/cifar100-resnet38-learned"
CIFAR_RESNEXT = "quick/cifar100-resnext"


def made_up_run(folder: Path, recipe: str, *settings: str, seed: int = 0) -> Path:
    """The folder of an unfinished run whose masks change at random, epoch by epoch, and less and less."""
    wanted = load(recipe, settings)
    layout = wanted.model.layout()
    candidates = layout.candidates()
    masks = ConnectivityMasks(layout, candidates, fan_in_of_targets(wanted.model.fan_in, layout, candidates) or [])
    chance = torch.Generator().manual_seed(seed)

    def some_masks():
        noise_TS = torch.rand(masks.real.shape, generator=chance) ** 6 * (masks.source >= 0)
        return noise_TS / noise_TS.sum(dim=1, keepdim=True)

    end_TS = some_masks()
    (folder / "masks").mkdir(parents=True)
    (folder / "recipe.toml").write_text(write(wanted))
    lines, epoch = [], 0
    for phase in wanted.phase:
        for _ in range(phase.epochs):
            if phase.mask_lr:
                _keep(folder, masks, epoch, torch.lerp(some_masks(), end_TS, epoch / phase.epochs))
            epoch += 1
            numbers = {
                "loss": 4 / epoch,
                "accuracy": 100 - 90 / epoch,
                "test": {"loss": 5 / epoch, "top1": 99 - 90 / epoch},
            }
            rates = {"lr": phase.lr, "mask_lr": phase.mask_lr}
            lines.append({"kind": "epoch", "phase": phase.name, "epoch": epoch, "step": epoch, **rates, **numbers})
        if phase.mask_lr:
            _keep(folder, masks, epoch, end_TS)
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (folder / "wiring.json").write_text(json.dumps(layout.to_plain(masks.top().sources)))
    return folder


def _keep(folder, masks, epoch, real_TS):
    masks.real.data.copy_(real_TS.clamp(0, 1))
    place = folder / f"masks/epoch-{epoch:04d}.safetensors"
    save_tensors(place, {"stack0.real": masks.real.detach(), "stack0.source": masks.source})
