"""Counters of the rollout service: `area/name` -> number, through one function."""

from __future__ import annotations


class Metrics:
    """Sums since the service started."""

    def __init__(self) -> None:
        self._values: dict[str, float] = {}

    def add(self, name: str, value: float = 1.0) -> None:
        """Add `value` to `name`."""
        self._values[name] = self._values.get(name, 0.0) + value

    def snapshot(self) -> dict[str, float]:
        """A copy of every sum."""
        return dict(self._values)
