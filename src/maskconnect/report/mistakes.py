"""Mistakes of the final network: the confusion matrix, the accuracy of every class, its most confident mistakes.

Shape letters: T true classes, P predicted ones.
"""

from __future__ import annotations

import html
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from maskconnect.report.history import Tested
from maskconnect.report.png import data_address

LEVELS = 8
FEW = 20
"""The largest number of classes for which the matrix shows names and numbers."""

READABLE = 0.8
"""The part of its size to which a matrix with numbers may shrink; on a narrower screen it scrolls sideways."""


@dataclass(frozen=True)
class Confusion:
    """The number of images of each true class that were predicted as each class."""

    classes: tuple[str, ...]
    count_TP: Tensor

    @cached_property
    def accuracies(self) -> list[float | None]:
        """The accuracy of each class in %; None for a class without images."""
        totals = self.count_TP.sum(dim=1).tolist()
        right = self.count_TP.diagonal().tolist()
        return [100 * hits / total if total else None for hits, total in zip(right, totals, strict=True)]

    @cached_property
    def shares(self) -> Tensor:
        """The share of every cell in its true class."""
        return self.count_TP / self.count_TP.sum(dim=1, keepdim=True).clamp(min=1)

    @cached_property
    def levels(self) -> Tensor:
        """The shade of every cell, from 0 to LEVELS, by its share of the true class."""
        return (self.shares.sqrt() * LEVELS).ceil().long()

    def worst(self, most: int) -> list[tuple[int, int, int]]:
        """The most common confusions: true class, predicted class, number of images."""
        wrong_TP = self.count_TP.clone().fill_diagonal_(0)
        found = [(t, p, int(wrong_TP[t, p])) for t, p in wrong_TP.nonzero().tolist()]
        return sorted(found, key=lambda item: -item[2])[:most]


def confusion_of(tested: Tested, classes: tuple[str, ...]) -> Confusion:
    """Count the predictions of each class."""
    size = len(classes)
    flat = torch.bincount(tested.label_N * size + tested.class_N, minlength=size * size)
    return Confusion(classes, flat.reshape(size, size))


def matrix(confusion: Confusion) -> str:
    """The confusion matrix as SVG: one row per true class, one column per predicted class, darker where more are."""
    size, few = len(confusion.classes), len(confusion.classes) <= FEW
    cell = max(26, 8 * len(str(int(confusion.count_TP.max()))) + 8) if few else max(1, 620 // size)
    names = [short(name) for name in confusion.classes]
    margin = 26 + (7 * max(map(len, names)) + 10 if few else 0)
    total = margin + cell * size + 2
    shades = _levels(confusion, cell, margin)
    parts = [f'<path class="cell l{level}" stroke-width="{cell}" d="{path}"/>' for level, path in shades]
    parts.append(f'<path class=grid d="M{margin} {margin}h{cell * size}v{cell * size}h-{cell * size}z"/>')
    if few:
        parts += _names_and_numbers(confusion, names, cell, margin)
    middle = margin + cell * size / 2
    parts.append(f'<text class=x x="{middle}" y="13">predicted</text>')
    parts.append(f'<text class=x transform="translate(12 {middle}) rotate(-90)">true</text>')
    places = confusion.count_TP.nonzero().tolist()
    cells = [number for t, p in places for number in (t, p, int(confusion.count_TP[t, p]))]
    data = {"margin": margin, "cell": cell, "names": confusion.classes, "cells": cells}
    words = html.escape(json.dumps(data, separators=(",", ":"), allow_nan=False), quote=True)
    least = round(READABLE * total) if few else 0
    fits = f"max-width:{total}px;min-width:{least}px"
    box = f'viewBox="0 0 {total} {total}" style="{fits}" role="img" aria-label="confusion matrix"'
    return f'<div class=wide><svg class=matrix {box} data-matrix="{words}">{"".join(parts)}</svg></div>'


def _levels(confusion: Confusion, cell: int, margin: int) -> Iterator[tuple[int, str]]:
    """The cells of every shade, as one path each."""
    for level in range(1, LEVELS + 1):
        places = (confusion.levels == level).nonzero().tolist()
        if places:
            draw = (f"M{margin + cell * p} {margin + cell * t + cell / 2:g}h{cell}" for t, p in places)
            yield level, "".join(draw)


def _names_and_numbers(confusion: Confusion, names: list[str], cell: int, margin: int) -> Iterator[str]:
    for k, name in enumerate(names):
        at = margin + cell * k + cell // 2
        yield f'<text class=y x="{margin - 6}" y="{at + 4}">{html.escape(name)}</text>'
        yield f'<text transform="translate({at + 4} {margin - 6}) rotate(-90)">{html.escape(name)}</text>'
    for t, p in confusion.count_TP.nonzero().tolist():
        count, level = int(confusion.count_TP[t, p]), int(confusion.levels[t, p])
        at_x, at_y = margin + cell * p + cell // 2, margin + cell * t + cell // 2 + 4
        yield f'<text class="x on on{level}" x="{at_x}" y="{at_y}">{count}</text>'


def short(name: str, most: int = 14) -> str:
    """A name, shortened if it is long."""
    return name if len(name) <= most else name[: most - 1] + "…"


def breakable(name: str) -> str:
    """A name as HTML whose lines break after its separators before they break inside a word."""
    return re.sub(r"([_/.;-])(?=[^\W\d])", r"\1<wbr>", html.escape(name, quote=False))


def pictures(tested: Tested, classes: tuple[str, ...], most: int) -> str:
    """The most confident mistakes as pictures, for the page."""
    if tested.pictures_WCHW is None:
        return ""
    items = []
    for number, index in enumerate(tested.wrong[:most]):
        truth, said = (classes[int(part[index])] for part in (tested.label_N, tested.class_N))
        sure = f"{100 * float(tested.probability_N[index]):.0f}\u00a0%"
        address = data_address(tested.pictures_WCHW[number])
        words = f"said <b>{breakable(said)}</b> ({sure}),<br>is <b>{breakable(truth)}</b>"
        alt = html.escape(f"test image {index}", quote=True)
        items.append(f'<li><img src="{address}" alt="{alt}"><span>{words}</span></li>')
    return f"<ul class=pictures>{''.join(items)}</ul>"
