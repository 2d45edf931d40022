"""Means of the values that a training loop gives to `mc.Recorder`."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from maskconnect.errors import ConfigError, number

Value = float | Tensor
"""A number, or a tensor with one element, on any device."""


class Means:
    """The means of values over some steps."""

    def __init__(self) -> None:
        self.count = 0
        self._sums: dict[str, tuple[Value, int]] = {}

    def add(self, values: Mapping[str, Value]) -> None:
        """Count one more step. Tensors are added on their device, so nothing waits for it."""
        for name, value in values.items():
            if isinstance(value, Tensor) and value.numel() != 1:
                raise ConfigError(f"{name} has {value.numel()} elements; pass a single number, such as {name}.mean().")
            new = value.detach().float() if isinstance(value, Tensor) else number(name, value)
            total, count = self._sums.get(name, (0.0, 0))
            self._sums[name] = total + new, count + 1
        self.count += 1

    def take(self) -> dict[str, float]:
        """Return the means, accuracy in percent, and start again from nothing."""
        found = {name: float(total) / count for name, (total, count) in self._sums.items()}
        self.count, self._sums = 0, {}
        accuracy = found.get("accuracy", 0.0)
        if accuracy < 0 or accuracy > 1 + 1e-6:
            raise ConfigError(f"accuracy is {accuracy:.6g}; it must be between 0 and 1. Divide a percentage by 100.")
        percent = round(100 * min(accuracy, 1.0), 10)  # 100 * 0.55 is 55.00000000000001
        return found | ({"accuracy": percent} if "accuracy" in found else {})
