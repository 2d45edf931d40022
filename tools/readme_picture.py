"""Draw the picture of the README: the wiring that examples/convnet.py learns, beside that of a plain ResNet.

    python tools/readme_picture.py        writes docs/images/wiring.svg

Everything shown is read from a network that this call trains.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

import maskconnect as mc

ROOT = Path(__file__).resolve().parent.parent
STEP, SIZE, LEFT = 72, 34, 32
STYLE = """
  text { font: 13px system-ui, sans-serif; fill: #333; text-anchor: middle }
  .title { font-size: 15px; font-weight: 600; text-anchor: start }
  .note { font-size: 12px; text-anchor: start; fill: #666 }
  .block { fill: #fff; stroke: #333; stroke-width: 1.5 }
  .unread { stroke-dasharray: 4 3; stroke: #999 }
  .wire { fill: none; stroke: #0072b2; stroke-linecap: round }
  @media (prefers-color-scheme: dark) {
    text { fill: #ddd } .note { fill: #999 } .block { fill: #222; stroke: #ddd } .wire { stroke: #56b4e9 }
  }
"""


def main() -> None:
    """Train, draw, write."""
    spec = importlib.util.spec_from_file_location("convnet", ROOT / "examples" / "convnet.py")
    assert spec is not None
    assert spec.loader is not None
    convnet: Any = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(convnet)
    torch.set_num_threads(1)
    model, accuracy = convnet.train()
    stack: mc.MaskedStack = model[2]
    fixed = mc.MaskedStack(stack.flat(), connectivity="prev")
    parts = [
        *row(fixed, 64, "Fixed-Prev: every block reads the block before it", above=34),
        *row(stack, 240, "Learned: every block reads 3, chosen by gradient descent", above=112),
        f'<text class="note" x="{LEFT - SIZE / 2}" y="284">9 residual blocks on handwritten digits, '
        f"{100 * accuracy:.1f} % on test images; wider wires have larger masks</text>",
    ]
    width = LEFT + STEP * len(stack.flat())
    box = f'viewBox="0 0 {width} 300" role="img" aria-label="fixed and learned wiring"'
    svg = f'<svg xmlns="http://www.w3.org/2000/svg" {box}>'
    path = ROOT / "docs" / "images" / "wiring.svg"
    path.write_text("\n".join([svg, f"<style>{STYLE}</style>", *parts, "</svg>", ""]))
    print(f"wrote {path.relative_to(ROOT)}")


def row(stack: mc.MaskedStack, y: float, title: str, above: float) -> Iterable[str]:
    """One network: its blocks from left to right, and an arc from each source to each target."""
    yield f'<text class="title" x="{LEFT - SIZE / 2}" y="{y - above}">{title}</text>'
    fixed = stack.masks.fixed
    assert fixed is not None
    first = stack.layout.targets.start
    for target, sources in enumerate(fixed.sources):
        for k in sources:
            value = float(stack.masks.real[target - first, k])
            x1, x2 = LEFT + STEP * k, LEFT + STEP * target
            if target - k == 1:
                path = f"M {x1 + SIZE / 2} {y} H {x2 - SIZE / 2}"
            else:
                top, lift = y - SIZE / 2, 16 * (target - k)
                path = f"M {x1} {top} C {x1 + 8} {top - lift}, {x2 - 8} {top - lift}, {x2} {top}"
            yield f'<path class="wire" d="{path}" stroke-width="{1.2 + 5 * value:.2f}"/>'
    for k, alive in enumerate(fixed.alive):
        x = LEFT + STEP * k
        kind = "block" if alive else "block unread"
        yield f'<rect class="{kind}" x="{x - SIZE / 2}" y="{y - SIZE / 2}" width="{SIZE}" height="{SIZE}" rx="6"/>'
        yield f'<text x="{x}" y="{y + 5}">{k}</text>'


if __name__ == "__main__":
    main()
