"""A stack of any modules, in which each module reads the modules that its mask makes active (sections 3.1 and 3.2).

The input of the stack feeds the first module (layered: every branch of the first layer). The output of the stack is
that of the last module (layered: the aggregate of all branches of the last layer).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from typing import Any, cast

import torch
from torch import Size, Tensor, nn
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from maskconnect.core.aggregate import with_zero_gradient
from maskconnect.core.align import ALIGNS
from maskconnect.core.checks import (
    AGGREGATIONS,
    GrowthWatch,
    check_options,
    decay_of,
    fan_in_of_targets,
    fixed_sources,
    register,
    warn_of_fan_in,
)
from maskconnect.core.compiled import CompiledInputs, compiled_inputs, compiles_whole
from maskconnect.core.inputs import Inputs
from maskconnect.core.lifetimes import last_uses
from maskconnect.core.masks import ConnectivityMasks
from maskconnect.core.outputs import Outputs
from maskconnect.core.probing import KnownShapes, keep_shapes, key_of, without_trace
from maskconnect.core.replay import InFlight, backward_pass
from maskconnect.core.targets import Reading


class MaskedStack(nn.Module):
    """A stack of modules that learns which of them feed which others.

    Train it with `mc.param_groups` and `mc.attach`, fix the wiring with `mc.freeze`, and remove unused modules with
    `mc.prune`. In train mode masks are drawn or blended; in eval mode every target reads its top-K.

    Args:
        modules: a list of modules, in which each may read all earlier ones, as in ResNet; or a list of lists (layers of
            branches), in which each branch may read the branches of the layer before, as in ResNeXt.
        fan_in: K, the number of sources per target, or one number per target. Required for "learned" and "random"
            connectivity; otherwise the wiring determines it.
        wiring: the candidate sources of each module, such as `[[], [0], [0, 1]]`; layered, branches of the layer
            before, such as `[[[], []], [[0], [0, 1]]]`. None (default) allows every possible source.
        connectivity: "learned" (default), or a fixed wiring: "prev" (the module before), "full" (all candidates),
            "random" (K random candidates, depending on `seed`), or an explicit wiring in the form of `wiring`, such as
            `mc.wiring_of` returns.
        aggregation: how the sources of a target are joined.

            - "mean" (default) or "sum".
            - "residual": modules return a pair (residual, shortcut), as `mc.Residual` does. Residuals are summed,
              shortcuts are averaged, and a ReLU follows.
            - "stream": modules return what they add to a stream that starts with the input of the stack. A target reads
              that input plus what its sources added. The output is the input plus all additions. Not for layers.
            - "scaled": each connection has a learned factor, initially 1/K. The output of layers is a mean.
            - a callable `fn(sources, mask) -> x` that is differentiable in the mask, and to which a source with mask 0
              contributes nothing. While masks learn, it gets all candidates and a mask of zeros and ones (blended:
              shares). Otherwise it gets the active sources and a mask of ones.
        align: `fn(source, shape) -> tensor` that brings a source into the output shape of the module just before the
            target. None (default) subsamples positions and pads channels with zeros; "nhwc" does the same for outputs
            whose channels are the last axis.
        mask_init: the initial real masks: "uniform" (default), or a number in (0, 1] that says how likely each
            candidate is relative to the next nearer one. 0.1 means a tenth; with 0.01 almost only the nearest K sources
            are drawn. In layers, the nearest branch is the one with the same index, followed by the next indices.
        use_all: whether another module must read each module (layered: a branch of the next layer), in every draw, when
            masks are frozen, and with random connectivity. The least likely connections make room. False by default.
        seed: the seed of draws and of random connectivity, 0 by default. Stacks of the same size and seed draw the same
            masks, so give each stack its own seed.

    Raises:
        ConfigError: if an argument is invalid.
        ConnectivityError: if a wiring does not fit the modules.

    Example:
        ```python
        blocks = [nn.Sequential(nn.Linear(16, 16), nn.ReLU()) for _ in range(8)]
        model = nn.Sequential(mc.MaskedStack(blocks, fan_in=2), nn.Linear(16, 10))
        optimizer = torch.optim.SGD(mc.param_groups(model, lr=0.1, mask_lr=0.03))
        mc.attach(optimizer, model, mc.Blend(steps=1000))
        ```
    """

    runs_its_modules = True  # and can therefore skip some of them
    aggregations: Sequence[str] = AGGREGATIONS

    def __init__(
        self,
        modules: Iterable[nn.Module] | Iterable[Iterable[nn.Module]],
        fan_in: int | Sequence[int] | None = None,
        *,
        wiring: Sequence[Any] | None = None,
        connectivity: str | Sequence[Any] = "learned",
        aggregation: str | Callable[[Sequence[Any], Tensor], Any] = "mean",
        align: str | Callable[[Tensor, Size], Tensor | None] | None = None,
        mask_init: str | float = "uniform",
        use_all: bool = False,
        seed: int = 0,
    ) -> None:
        super().__init__()
        check_options(aggregation, align, use_all, seed, self.aggregations)
        self.blocks, self.layout = register(modules, aggregation)
        self.aggregation, self.align = aggregation, ALIGNS[align] if isinstance(align, str) else align
        every = self.layout.candidates()
        candidates = every if wiring is None else self.layout.from_plain(wiring, what="wiring")
        counts = fan_in_of_targets(fan_in, self.layout, candidates)
        fixed = fixed_sources(connectivity, self.layout, candidates, counts, int(seed), use_all=use_all)
        if connectivity in ("learned", "random"):
            warn_of_fan_in(fan_in, candidates)
        if fixed is not None:
            counts = [len(fixed[target]) for target in self.layout.targets]
        decay = decay_of(mask_init)
        self.scales: nn.Parameter | None = None
        self.masks = ConnectivityMasks(
            self.layout, candidates, counts or [], fixed=fixed, decay=decay, use_all=use_all, seed=int(seed)
        )
        if aggregation == "scaled":
            self.scales = nn.Parameter(self.masks.real.new_ones(self.masks.real.shape) / self.masks.fan_in[:, None])
        self._in_flight, self._growth = InFlight(), GrowthWatch()
        self._shapes: KnownShapes = {}

    @property
    def learning(self) -> bool:
        """Whether masks learn in a forward pass: in train mode, until they are frozen."""
        return self.training and not self.masks.is_frozen

    def wiring(self) -> list[Any]:
        """Return what every module reads now, as plain data: the frozen masks, or the top-K while masks are learned."""
        return self.layout.to_plain(self.masks.current_wiring().sources)

    def forward(self, x: Any, *args: Any, **kwargs: Any) -> Any:
        """Run the modules in order, each on the aggregate of its active sources.

        While masks are learned, every module runs, because the mask gradient needs the outputs of all candidates;
        modules that nothing reads run without a graph. Once masks are frozen, only modules that can reach the output
        run.

        Args:
            x: the input of the stack.
            args: further arguments, passed to every module.
            kwargs: further keyword arguments, passed to every module.

        Returns:
            The output of the last module; layered, the aggregate of all branches of the last layer.
        """
        inputs, modules = self.begin(), self.flat()
        alive = inputs.masks.alive
        if not args and not kwargs and (fast := inputs.at_once(modules, x)) is not None:
            output = fast if inputs.learning else self.reaching_idle_parameters(fast, alive)
            return self.end(inputs, output)
        key = None if inputs.learning else key_of(x, args, kwargs)
        known = self._shapes.get(key)
        outputs = inputs.outputs(x, self.align, known)
        last = {} if torch.compiler.is_compiling() else last_uses(inputs, outputs)
        for layer, members in enumerate(self.layout.layers):
            together = inputs.layer(layer, outputs)
            for number in members:
                module = modules[number]
                if not inputs.runs(number) and (inputs.by_layer or known is not None):  # otherwise its shape is needed
                    outputs.skip()
                    continue
                alone = not inputs.by_layer and number not in together
                probing = not (alive[number] or inputs.learning)  # it runs once, for its output shape
                with torch.no_grad() if probing else nullcontext():
                    found = outputs.apart() if probing else outputs
                    reading = inputs.sources(number, found) if alone else Reading()
                with nullcontext() if alive[number] else without_trace(module, probing=probing):
                    if layer == 0:
                        read = inputs.first(x, number)
                    else:
                        read = together[number] if number in together else inputs.one(number, reading)
                    reading = Reading()  # holds no sources while the module runs
                    for part in last.get(number, ()):
                        outputs.drop(*part)
                    if number == len(modules) - 1:
                        read = self.reaching_idle_parameters(read, alive)
                    outputs.append(module(read, *args, **kwargs))
        if key is not None and known is None and not all(alive):
            keep_shapes(self._shapes, key, outputs.sizes)
        return self.end(inputs, inputs.output(outputs), outputs)

    def begin(self) -> Inputs:
        """Begin a forward pass: draw masks, or take the current ones."""
        if compiles_whole(self):
            return compiled_inputs(self)
        learning = self.learning
        if not learning:
            masks = self.masks.current_wiring()
        else:
            masks = self.masks.draw() if backward_pass() is None else self._in_flight.recall()
        return Inputs(
            layout=self.layout,
            candidates=self.masks.candidates,
            masks=masks,
            real=self.masks.real,
            rows=self.masks.rows(masks) if learning else None,
            aggregation=self.aggregation,
            credit=self.masks.how.credit,
            images=self.masks.how.images,
            scales=self.scales,
        )

    def end(self, inputs: Inputs, output: Any, outputs: Outputs | None = None) -> Any:
        """End a forward pass: remember its masks, and check the growth of activations."""
        if isinstance(inputs, CompiledInputs):
            return output
        if inputs.learning and backward_pass() is None:
            tensors = [leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor)]
            self._in_flight.remember(inputs.masks, tensors)
        if self.training and outputs is not None:
            self._growth.look(outputs.found[0], output)
        return output

    def reaching_idle_parameters(self, x: Any, alive: Sequence[bool]) -> Any:
        """Return x with a link to unused parameters, so that their gradient is zero instead of None (D14).

        Unused are the weights of modules that nothing reads, and frozen masks. DistributedDataParallel waits for the
        gradients of all parameters.
        """
        if not torch.is_grad_enabled():
            return x
        idle = [p for module, on in zip(self.flat(), alive, strict=True) if not on for p in module.parameters()]
        parameters = [p for p in (*idle, *[self.masks.real] * self.masks.is_frozen) if p.requires_grad]
        leaves, tree = tree_flatten(x)
        for i, leaf in enumerate(leaves):
            if parameters and isinstance(leaf, Tensor) and leaf.is_floating_point():
                leaves[i] = with_zero_gradient(leaf, parameters)
                return tree_unflatten(leaves, tree)
        return x

    def described_aggregation(self) -> str:
        """Return the name of the aggregation; "own" for a callable of the user."""
        return self.aggregation if isinstance(self.aggregation, str) else "own"

    def unread_weights(self) -> int:
        """Return how many weights of used modules belong to unused connections, as in a dense block."""
        return 0

    def flat(self) -> list[nn.Module]:
        """Return all modules in the order in which they run."""
        if not self.layout.layered:
            return list(self.blocks)
        return [branch for layer in self.blocks for branch in cast(nn.ModuleList, layer)]

    def places(self) -> list[tuple[nn.Module, str]]:
        """Return the parent module and the name under which each module is registered."""
        lists = cast(list[nn.Module], list(self.blocks) if self.layout.layered else [self.blocks])
        return [(modules, name) for modules in lists for name in modules._modules]

    def extra_repr(self) -> str:
        """Return what `print(model)` shows about the stack."""
        return f"aggregation={getattr(self.aggregation, '__name__', self.aggregation)}"
