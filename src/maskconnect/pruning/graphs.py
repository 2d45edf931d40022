"""Graphs of torch.fx as pruned networks need them, and what may be said of the modules in them."""

from __future__ import annotations

from typing import Any, cast

from torch import fx, nn

from maskconnect.core.residual import Residual

CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
ACTIVATIONS = (nn.ReLU, nn.ReLU6, nn.LeakyReLU, nn.ELU, nn.GELU, nn.SiLU, nn.Tanh, nn.Sigmoid, nn.Hardswish)

NEVER_IN_PLACE = (nn.Linear, *CONVOLUTIONS, *NORMS, nn.LayerNorm, nn.GroupNorm)
"""Modules that neither change what they read nor return it."""

NOTES = "maskconnect"
"""Under which name the graphs of a pruned network note how they were made."""


def graph_module(root: nn.Module, graph: fx.Graph) -> fx.GraphModule:
    """The graph with those modules of `root` that it calls, in the modes that they are in."""
    for node in graph.nodes:
        node.type = None  # a string, which cannot be pickled
        if node.op == "call_module" and is_plain(root.get_submodule(str(node.target)), (nn.Identity,)):
            node.replace_all_uses_with(node.args[0])
            graph.erase_node(node)
    made = fx.GraphModule(root, graph, class_name="Pruned")
    modes = {name: part.training for name, part in root.named_modules(remove_duplicate=False)}
    for name, part in made.named_modules():
        part.training = modes[name]
    note_(made, path="")
    return made


def note_(graph: fx.GraphModule, **notes: Any) -> None:
    """Add to the notes of a graph, twice: copying keeps `meta`, and pickling the attribute."""
    graph.meta[NOTES] = {**notes_of(graph), **notes}
    graph.maskconnect = graph.meta[NOTES]


def notes_of(module: nn.Module) -> dict[str, Any]:
    """How a graph or a list that pruning has made was made; of other modules nothing."""
    found = vars(module).get(NOTES) or (module.meta.get(NOTES) if isinstance(module, fx.GraphModule) else None)
    return dict(found) if isinstance(found, dict) else {}


def is_graph_of_ours(module: nn.Module) -> bool:
    """Whether pruning has made this graph; users may have graphs of their own."""
    return isinstance(module, fx.GraphModule) and bool(notes_of(module))


def is_ours(module: nn.Module) -> bool:
    """Whether a module is maskconnect's and can be traced; an `mc.Residual` is the user's, for its body is."""
    own = type(module).__module__.partition(".")[0] == "maskconnect"
    return own and type(module) is not Residual and not getattr(module, "runs_as_it_is", False)


def calls_of(network: fx.GraphModule) -> dict[str, list[fx.Node]]:
    """Where each module is called, in order."""
    calls: dict[str, list[fx.Node]] = {}
    for node in network.graph.nodes:
        if node.op == "call_module":
            calls.setdefault(str(node.target), []).append(node)
    return calls


def is_plain(module: nn.Module, kinds: tuple[type[nn.Module], ...]) -> bool:
    """Whether a module is of one of these kinds exactly, and nobody looks at or changes what it does."""
    return type(module) in kinds and not (
        "forward" in module.__dict__
        or module._forward_hooks
        or module._forward_pre_hooks
        or module._backward_hooks
        or module._backward_pre_hooks
    )


def is_simple_sequence(module: nn.Module) -> bool:
    """Whether a module does nothing but to call its parts one after the other."""
    return is_plain(module, (nn.Sequential,)) and len(cast(nn.Sequential, module)) > 0
