"""Figures of a step's strips, which ranks add to each other's."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from trainer_service.divergence import Divergence, divergence
from trainer_service.objectives import PackedLogprobs
from trainer_service.strip import Strip


@dataclass(slots=True, kw_only=True)
class StripFigures:
    """Sums over strips, each objective's mean weighted by its actions."""

    version: int
    """Policy version that the step starts from."""
    num_tokens: int = 0
    """Packed."""
    num_flat: int = 0
    """If each path were computed alone."""
    num_actions: int = 0
    """Tokens with a log-probability, demonstrations included."""
    seconds: float = 0.0
    """Of computing, without waiting for other ranks."""
    pack_seconds: float = 0.0
    """Of packing the records before it."""
    _objective: dict[str, float] = field(default_factory=dict[str, float])
    _all: list[Divergence] = field(default_factory=list[Divergence])
    _current: list[Divergence] = field(default_factory=list[Divergence])

    def add(self, logprobs: PackedLogprobs, strip: Strip, objective: dict[str, float]) -> None:
        """Count one strip, before the update."""
        num_actions = strip.action_source.shape[0]
        self.num_tokens += strip.num_tokens
        self.num_flat += strip.tokens_flat
        self.num_actions += num_actions
        for name, value in objective.items():
            self._objective[name] = self._objective.get(name, 0.0) + value * num_actions
        self._all.append(divergence(logprobs, strip))
        self._current.append(divergence(logprobs, strip, policy_version=self.version))

    def merge(self, other: StripFigures) -> None:
        """Add another rank's, whose seconds ran beside these."""
        self.num_tokens += other.num_tokens
        self.num_flat += other.num_flat
        self.num_actions += other.num_actions
        for name, value in other._objective.items():
            self._objective[name] = self._objective.get(name, 0.0) + value
        self._all += other._all
        self._current += other._current

    def metrics(self) -> dict[str, float]:
        """`objective/*`, `divergence/*`, and `divergence_current/*` of the newest version."""
        total = max(self.num_actions, 1)
        found = {name: value / total for name, value in self._objective.items()}
        found |= _divergence_metrics("divergence", self._all)
        found |= _divergence_metrics("divergence_current", self._current)
        return found


def _divergence_metrics(area: str, parts: Sequence[Divergence]) -> dict[str, float]:
    count = sum(part.num_actions for part in parts)
    over = max(count, 1)
    return {
        f"{area}/kl_mean": sum(part.kl * part.num_actions for part in parts) / over,
        f"{area}/kl_max": max(part.kl_max for part in parts),
        f"{area}/dlogp_mean": sum(p.mean_abs_difference * p.num_actions for p in parts) / over,
        f"{area}/dlogp_max": max(part.max_abs_difference for part in parts),
        f"{area}/num_tokens": float(count),
    }
