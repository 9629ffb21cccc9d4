"""What a runner counts while it runs."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Generator
from dataclasses import dataclass


@dataclass(slots=True)
class Tally:
    """Counts since the run began; those of episodes include ones that others stand in for."""

    num_running: int = 0
    num_scored: int = 0
    num_failed: int = 0
    """Episodes without a score, by the infrastructure's fault."""
    num_groups: int = 0
    """Whose last episode has ended."""
    rewards: float = 0.0
    """Sum over the scored ones."""
    waits_s: float = 0.0
    """For permits of the trainer."""

    @contextlib.contextmanager
    def running(self) -> Generator[None]:
        """An episode runs in the block."""
        self.num_running += 1
        try:
            yield
        finally:
            self.num_running -= 1

    @contextlib.contextmanager
    def waiting(self) -> Generator[None]:
        """A group waits for its permit in the block."""
        started_s = time.monotonic()
        try:
            yield
        finally:
            self.waits_s += time.monotonic() - started_s

    def count(self, reward: float | None) -> None:
        """An episode has ended."""
        if reward is None:
            self.num_failed += 1
        else:
            self.num_scored += 1
            self.rewards += reward

    def figures(self) -> dict[str, float]:
        """By name, as the other processes tell theirs."""
        return {
            "episodes/running": float(self.num_running),
            "episodes/ended_scored": float(self.num_scored),
            "episodes/ended_failed": float(self.num_failed),
            "groups/ended": float(self.num_groups),
            "reward/sum": self.rewards,
            "permits/wait_s": self.waits_s,
        }
