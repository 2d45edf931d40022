"""When each output of a forward pass is needed for the last time, so that memory is not held longer (section 3.2).

The masks of a pass are known before it, and so are the readers of each module. Pairs of a residual and a shortcut are
joined once for all readers with the same fan-in: the pair is needed until its last join is made, a join until its last
reader has run.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from maskconnect.core.outputs import Outputs
    from maskconnect.core.targets import Targets

Part = tuple[int, int | None]
"""The output of a module, or its pair joined for a fan-in."""


def last_uses(inputs: Targets, outputs: Outputs) -> Mapping[int, list[Part]]:
    """Return the parts that each target is the last to need; empty if nothing may be dropped."""
    if inputs.reads_candidates or callable(inputs.aggregation) or inputs.layout.layered or inputs.layout.all_out:
        return {}
    if outputs.user_align is not None or outputs.by_fan_in:
        return {}
    last: dict[Part, int] = {}
    sampled: set[Part] = set()
    for target in inputs.layout.targets:
        probing = not inputs.runs(target)  # it runs once, for its output shape, and its joins are forgotten
        if outputs.known is not None and probing:
            continue
        fan_in, active = inputs.masks.fan_in[target], inputs.masks.sources[target]
        in_sum = inputs.reads_all(target)
        if in_sum:
            last.update({(k, None): target for k in active})
        needed = set[Part]() if in_sum else {(k, fan_in) for k in active}
        if inputs.learning:
            seen = {(k, inputs.largest_fan_in if in_sum else fan_in) for k in inputs.candidates[target]}
            needed |= seen - sampled
            sampled |= seen if inputs.images is not None else set()
        for k, count in needed:
            if not outputs.pairs or probing or (k, count) not in outputs.shared or (k, count) not in last:
                last[k, None] = target
            if outputs.pairs and not probing:
                last[k, count] = target
    done: dict[int, list[Part]] = defaultdict(list)
    for (k, count), target in last.items():
        if k > 0:  # the output of the first module is compared with that of the stack
            done[target].append((k, count))
    return done
