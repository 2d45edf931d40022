"""A stack whose modules keep their names in the model, so that checkpoints of the model still load."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

from torch import nn

from maskconnect.core.stack import MaskedStack
from maskconnect.errors import ConfigError


class KeepsNames(MaskedStack):
    """A stack that also loads checkpoints from before the model was rewired; its masks then do not change."""

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        own = self.state_dict(prefix=prefix, keep_vars=True)
        ours = [name for name in own if name.startswith((f"{prefix}masks.", f"{prefix}scales"))]
        if not any(name in state_dict for name in ours):  # a checkpoint from before the model was rewired
            state_dict.update({name: own[name] for name in ours})
        super()._load_from_state_dict(state_dict, prefix, *args)


class NamedStack(KeepsNames):
    """A stack that registers each module under its own name.

    Args:
        named: the modules by name, in the order in which they run.
        args: see `MaskedStack`.
        kwargs: see `MaskedStack`.
    """

    def __init__(self, named: Mapping[str, nn.Module], *args: Any, **kwargs: Any) -> None:
        super().__init__(list(named.values()), *args, **kwargs)
        del self._modules["blocks"]
        for name, module in named.items():
            if hasattr(self, name):
                raise ConfigError(f"a block is called {name!r}, a name that the stack reserves; rename it.")
            self.add_module(name, module)
        self.names = tuple(named)

    def flat(self) -> list[nn.Module]:
        """Return all modules in the order in which they run."""
        return [cast(nn.Module, self._modules[name]) for name in self.names]

    def places(self) -> list[tuple[nn.Module, str]]:
        """Return the parent module and the name under which each module is registered."""
        return [(self, name) for name in self.names]
