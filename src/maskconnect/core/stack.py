"""A stack of any modules, each reading the modules that its mask makes active (sections 3.1 and 3.2).

The input of the stack feeds the first module (layered: every branch of the first layer); its output is the
last module's (layered: the aggregate of all branches of the last layer).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, cast

from torch import Size, Tensor, nn
from torch.utils._pytree import tree_leaves

from maskconnect.core.arguments import (
    check_credit,
    check_options,
    decay_of,
    fan_in_of_targets,
    fixed_sources,
    register,
)
from maskconnect.core.forward import ForwardPass
from maskconnect.core.growth import GrowthWatch
from maskconnect.core.inflight import InFlight, backward_pass
from maskconnect.core.inputs import Inputs
from maskconnect.core.masks import ConnectivityMasks
from maskconnect.core.outputs import Shapes


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
            "mean", "sum", "root" (the sum over the root of K);
            "residual": modules return a pair (residual, shortcut), as `mc.Residual` does; residuals are summed,
            shortcuts averaged, and a ReLU follows;
            "stream": modules return what they add to a stream that starts as the input of the stack. A target reads
            that input and what its sources added; the output is the input and all that was added (lists only);
            "scaled": a learned factor per connection, first 1/K (lists only);
            or a callable `fn(sources, mask) -> x`, differentiable in the mask, in which a source of mask 0 adds
            nothing. While learning it gets all candidates and a mask of zeros and ones (blended: of shares); otherwise
            only the active ones and a mask of ones.
        align: `fn(source, shape) -> tensor`, where outputs differ in shape in a way that subsampling and
            zero-padded channels do not handle. `shape` is the output shape of the module just before the target.
        mask_credit: what of a source counts for its mask: the "whole" of it, as in the paper, or what is "new" in it,
            without its part along the join of the target; with "mean", "residual", "sum" and "root" only.
        mask_init: where the real masks start: "uniform", or how much less likely each candidate is than the next nearer
            one (layered: than the branch before it, counted from the own index): 0.1 is a tenth, and 0.01 draws almost
            nothing but the nearest K.
        use_all: whether every module is to be read by another (layered: by one of the next layer), in every draw, at
            the freeze, and with random connectivity. Where draws leave one out, the connections that are least likely
            make room.
        seed: of the draws and of random connectivity. Stacks of one size and one seed draw alike: give each its own.
    """

    def __init__(
        self,
        modules: Iterable[nn.Module] | Iterable[Iterable[nn.Module]],
        fan_in: int | Sequence[int] | None = None,
        *,
        wiring: Sequence[Any] | None = None,
        connectivity: str | Sequence[Any] = "learned",
        aggregation: str | Callable[[Sequence[Any], Tensor], Any] = "mean",
        align: Callable[[Tensor, Size], Tensor] | None = None,
        mask_init: str | float = "uniform",
        mask_credit: str = "whole",
        use_all: bool = False,
        seed: int = 0,
    ) -> None:
        super().__init__()
        check_options(aggregation, align, use_all, seed)
        check_credit(mask_credit, aggregation)
        self.blocks, self.layout = register(modules, aggregation)
        self.aggregation, self.align, self.mask_credit = aggregation, align, mask_credit
        every = self.layout.candidates()
        candidates = every if wiring is None else self.layout.from_plain(wiring, what="wiring")
        counts = fan_in_of_targets(fan_in, self.layout, candidates)
        fixed = fixed_sources(connectivity, self.layout, candidates, counts, int(seed), use_all=use_all)
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
        """Whether a forward pass draws: in train mode, until the masks are frozen."""
        return self.training and not self.masks.is_frozen

    def wiring(self) -> list[Any]:
        """What every module reads now, as plain data: the frozen masks, or the top-K while they are learned."""
        return self.layout.to_plain(self.masks.settled().sources)

    def forward(self, x: Any, *args: Any, **kwargs: Any) -> Any:
        """Run the modules in order, each on the aggregate of its active sources; extra arguments go to all."""
        inputs = self.begin()
        run = ForwardPass(modules=self.flat(), inputs=inputs, align=self.align, shapes=self._shapes)
        output = run(x, *args, **kwargs)
        self.end(inputs, run.second, output)
        return output

    def begin(self) -> Inputs:
        """Begin a forward pass: draw masks, or take those that hold."""
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
            credit=self.mask_credit,
            scales=self.scales,
        )

    def end(self, inputs: Inputs, second: Any, output: Any) -> None:
        """End a forward pass: remember its masks, and look at how activations grow from the second layer's input on."""
        if inputs.rows is not None and backward_pass() is None:
            tensors = [leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor)]
            self._in_flight.remember(inputs.masks, tensors)
        if self.training:
            self._growth.look(second, output)

    def described_aggregation(self) -> str:
        """Its name, or "own" where it is the user's."""
        return self.aggregation if isinstance(self.aggregation, str) else "own"

    def flat(self) -> list[nn.Module]:
        """All modules, in the order in which they run."""
        if not self.layout.layered:
            return list(self.blocks)
        return [branch for layer in self.blocks for branch in cast(nn.ModuleList, layer)]

    def extra_repr(self) -> str:
        """What `print(model)` says of the stack."""
        return f"aggregation={getattr(self.aggregation, '__name__', self.aggregation)}"
