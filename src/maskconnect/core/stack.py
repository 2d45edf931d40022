"""A stack of any modules, each reading the modules that its mask makes active (sections 3.1 and 3.2).

The input of the stack feeds the first module (layered: every branch of the first layer); its output is the
last module's (layered: the aggregate of all branches of the last layer).
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
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
from maskconnect.core.masks import ConnectivityMasks
from maskconnect.core.outputs import Outputs, Shapes
from maskconnect.core.replay import InFlight, backward_pass
from maskconnect.core.targets import Reading

MOST_SHAPES = 64
"""For how many shapes of its input a stack remembers the output shapes of its modules."""


class MaskedStack(nn.Module):
    """Learn which of `modules` feed which others.

    Args:
        modules: a list (each module may read every earlier one, as in ResNet) or a list of lists (each branch
            may read the branches of the layer before, as in ResNeXt).
        fan_in: K, the number of sources of each target, or one number a target. Not needed where `connectivity`
            says it: prev, full, an explicit wiring.
        wiring: the candidate sources of each module, where not all may be read: `[[], [0], [0, 1]]`; layered,
            branches of the layer before: `[[[], []], [[0], [0, 1]]]`.
        connectivity: "learned", or fixed: "prev" (the module before), "full" (all candidates), "random"
            (K of them, seeded), or an explicit wiring in the form of `wiring`, such as `mc.wiring_of` returns.
        aggregation: how the sources of a target are joined:
            "mean", or "sum";
            "residual": modules return a pair (residual, shortcut), as `mc.Residual` does; residuals are summed,
            shortcuts averaged, and a ReLU follows;
            "stream": modules return what they add to a stream that starts as the input of the stack. A target reads
            that input and what its sources added; the output is the input and all that was added (lists only);
            "scaled": a learned factor per connection, first 1/K (the output of layers is a mean);
            or a callable `fn(sources, mask) -> x`, differentiable in the mask, in which a source of mask 0 adds
            nothing. While learning it gets all candidates and a mask of zeros and ones (blended: of shares); otherwise
            only the active ones and a mask of ones.
        align: `fn(source, shape) -> tensor`, where outputs differ in shape in a way that subsampling and
            zero-padded channels do not handle. `shape` is the output shape of the module just before the target.
            "nhwc" does the same for outputs whose channels are the last axis.
        mask_init: where the real masks start: "uniform", or how much less likely each candidate is than the next nearer
            one (layered: than the branch before it, counted from the own index): 0.1 is a tenth, and 0.01 draws almost
            nothing but the nearest K.
        use_all: whether every module is to be read by another (layered: by one of the next layer), in every draw, at
            the freeze, and with random connectivity. Where draws leave one out, the connections that are least likely
            make room.
        seed: of the draws and of random connectivity. Stacks of one size and one seed draw alike: give each its own.
    """

    runs_its_modules = True  # and so can leave some out
    aggregations: Sequence[str] = AGGREGATIONS  # by name

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
        self._shapes: dict[Any, Shapes] = {}  # the output shapes of all modules, by those of the stack's input

    @property
    def learning(self) -> bool:
        """Whether masks learn in a forward pass: in train mode, until they are frozen."""
        return self.training and not self.masks.is_frozen

    def wiring(self) -> list[Any]:
        """What every module reads now, as plain data: the frozen masks, or the top-K while they are learned."""
        return self.layout.to_plain(self.masks.settled().sources)

    def forward(self, x: Any, *args: Any, **kwargs: Any) -> Any:
        """Run the modules in order, each on the aggregate of its active sources; extra arguments go to all.

        While masks are learned every module runs, because the gradient of the masks needs the output of every
        candidate; one that nothing reads runs without a graph. Afterwards only modules that can reach the output run.
        """
        inputs, modules = self.begin(), self.flat()
        alive = inputs.masks.alive
        if not args and not kwargs and (fast := inputs.at_once(modules, x)) is not None:
            output = fast if inputs.learning else self.reaching_idle_parameters(fast, alive)
            return self.end(inputs, output)
        key = self.shape_key(inputs, (x, args, kwargs))
        known = self._shapes.get(key)
        outputs = inputs.outputs(x, self.align, known)
        for layer, members in enumerate(self.layout.layers):
            together = inputs.layer(layer, outputs)
            for number in members:
                module = modules[number]
                if not inputs.runs(number) and (inputs.by_layer or known is not None):  # else its shape is needed
                    outputs.skip()
                    continue
                alone = not inputs.by_layer and number not in together
                reading = inputs.sources(number, outputs) if alone else Reading()
                with nullcontext() if alive[number] else without_trace(module, probing=not inputs.learning):
                    if layer == 0:
                        read = inputs.first(x, number)
                    else:
                        read = together[number] if number in together else inputs.one(number, reading)
                    if number == len(modules) - 1:
                        read = self.reaching_idle_parameters(read, alive)
                    outputs.append(module(read, *args, **kwargs))
        if key is not None and known is None and not all(alive):
            if len(self._shapes) >= MOST_SHAPES:
                self._shapes.clear()
            self._shapes[key] = outputs.shapes()
        return self.end(inputs, inputs.output(outputs), outputs)

    def begin(self) -> Inputs:
        """Begin a forward pass: draw masks, or take those that hold."""
        if compiles_whole(self):
            return compiled_inputs(self)
        learning = self.learning
        if not learning:
            masks = self.masks.settled()
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
        """End a forward pass: remember its masks, and check that activations do not grow without bound."""
        if isinstance(inputs, CompiledInputs):
            return output
        if inputs.learning and backward_pass() is None:
            tensors = [leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor)]
            self._in_flight.remember(inputs.masks, tensors)
        if self.training and outputs is not None:
            self._growth.look(outputs.found[0], output)
        return output

    def shape_key(self, inputs: Inputs, given: Any) -> tuple[Any, ...] | None:
        """What the output shapes depend on, where they can be looked up: not while learning, when every module runs."""
        leaves = tree_leaves(given)
        nested = any(isinstance(leaf, Tensor) and leaf.is_nested for leaf in leaves)
        if inputs.learning or nested or torch.compiler.is_compiling():
            return None
        key = tuple(leaf.shape if isinstance(leaf, Tensor) else leaf for leaf in leaves)
        return key if all(isinstance(leaf, Hashable) for leaf in key) else None

    def reaching_idle_parameters(self, x: Any, alive: Sequence[bool]) -> Any:
        """x, through which parameters that do not matter in this pass get a gradient of zero, not None (D14).

        Those are the weights of modules that nothing reads, and frozen masks: who waits for all gradients, as
        DistributedDataParallel does, need not know.
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
        """Its name, or "own" where it is the user's."""
        return self.aggregation if isinstance(self.aggregation, str) else "own"

    def unread_weights(self) -> int:
        """How many weights of modules that stay belong to connections that are left out, as in a dense block."""
        return 0

    def flat(self) -> list[nn.Module]:
        """All modules, in the order in which they run."""
        if not self.layout.layered:
            return list(self.blocks)
        return [branch for layer in self.blocks for branch in cast(nn.ModuleList, layer)]

    def places(self) -> list[tuple[nn.Module, str]]:
        """Where each module is registered: in which other module, under which name."""
        lists = cast(list[nn.Module], list(self.blocks) if self.layout.layered else [self.blocks])
        return [(modules, name) for modules in lists for name in modules._modules]

    def extra_repr(self) -> str:
        """What `print(model)` says of the stack."""
        return f"aggregation={getattr(self.aggregation, '__name__', self.aggregation)}"


@contextmanager
def without_trace(module: nn.Module, *, probing: bool) -> Iterator[None]:
    """Run a module that nothing reads: without a graph and, where only its shape is asked for, in eval mode."""
    training = [part for part in module.modules() if part.training] if probing else []
    devices = [p.device for p in module.parameters() if p.is_cuda][:1]
    fork = torch.random.fork_rng(devices) if probing and not torch.compiler.is_compiling() else nullcontext()
    try:
        for part in training:
            part.training = False  # no dropout is drawn, no statistics move
        with torch.no_grad(), fork:
            yield
    finally:
        for part in training:
            part.training = True
