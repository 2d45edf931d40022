"""Helpers for the torch.fx graphs of pruned networks, and properties of the modules in them."""

from __future__ import annotations

from typing import Any, cast

from torch import fx, nn

from maskconnect.core.residual import Residual

CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
ACTIVATIONS = (nn.ReLU, nn.ReLU6, nn.LeakyReLU, nn.ELU, nn.GELU, nn.SiLU, nn.Tanh, nn.Sigmoid, nn.Hardswish)

NEVER_IN_PLACE = (nn.Linear, *CONVOLUTIONS, *NORMS, nn.LayerNorm, nn.GroupNorm)
"""Modules that neither change nor return their input."""

NOTES = "maskconnect"
"""The name under which the graphs of a pruned network note how they were built."""


def graph_module(root: nn.Module, graph: fx.Graph) -> fx.GraphModule:
    """Return the graph with the modules of `root` that it calls; modules keep their modes."""
    for node in graph.nodes:
        node.type = None  # may be a string, which cannot be pickled
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
    """Add to the notes of a graph, in two places: copying keeps `meta`, pickling keeps the attribute."""
    graph.meta[NOTES] = {**notes_of(graph), **notes}
    graph.maskconnect = graph.meta[NOTES]


def notes_of(module: nn.Module) -> dict[str, Any]:
    """Return the notes of a graph or list from pruning; an empty dict for other modules."""
    found = vars(module).get(NOTES) or (module.meta.get(NOTES) if isinstance(module, fx.GraphModule) else None)
    return dict(found) if isinstance(found, dict) else {}


def is_pruned_graph(module: nn.Module) -> bool:
    """Return whether a graph comes from pruning; users may have other graphs."""
    return isinstance(module, fx.GraphModule) and bool(notes_of(module))


def is_own_module(module: nn.Module) -> bool:
    """Return whether a module belongs to maskconnect and can be traced; not `mc.Residual`, whose body is the user's."""
    own = type(module).__module__.partition(".")[0] == "maskconnect"
    return own and type(module) is not Residual and not getattr(module, "never_traced", False)


def calls_of(network: fx.GraphModule) -> dict[str, list[fx.Node]]:
    """Return the nodes that call each module, in order."""
    calls: dict[str, list[fx.Node]] = {}
    for node in network.graph.nodes:
        if node.op == "call_module":
            calls.setdefault(str(node.target), []).append(node)
    return calls


def is_plain(module: nn.Module, kinds: tuple[type[nn.Module], ...]) -> bool:
    """Return whether a module is exactly of one of these classes, without hooks and without another forward."""
    return type(module) in kinds and not (
        "forward" in module.__dict__
        or module._forward_hooks
        or module._forward_pre_hooks
        or module._backward_hooks
        or module._backward_pre_hooks
    )


def is_simple_sequence(module: nn.Module) -> bool:
    """Return whether a module only calls its parts in order."""
    return is_plain(module, (nn.Sequential,)) and len(cast(nn.Sequential, module)) > 0
