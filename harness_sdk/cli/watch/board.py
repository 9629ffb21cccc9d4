"""What is known of a run, in bounded memory, and who waits for news of it.

Kept: figures of the newest 1,000 steps, rows of the newest `max_episodes` episodes and their
records up to 64 MiB, the retained state and the last Status of each replica.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Generator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from harness_sdk.cli.watch.episodes import Episodes

if TYPE_CHECKING:
    from rollout_service.bus import BusState
    from rollout_service.redis_state import StreamState

MAX_STEPS = 1000
REDIS, BROKER, REPLICAS = "Redis", "MQTT broker", "replicas"
"""Names of the sources."""


@dataclass(slots=True, kw_only=True)
class Source:
    """One connection of the page."""

    name: str
    address: str
    """Without its password; empty where none was given."""
    heard_s: float | None = None
    """When it last answered, by this machine's clock; None before it ever did."""
    error: str = ""
    """Why it is away; empty while it answers."""


@dataclass(slots=True, kw_only=True)
class Replica:
    """What `octopus status` shows of a replica, and its speed between two looks."""

    shown: Mapping[str, Any]
    at_s: float
    """When it was asked, by the monotonic clock."""
    sampled_per_s: float | None = None


@dataclass(slots=True, kw_only=True)
class Board:
    """Everything that the panes are made of; changed by the followers of `sources.py` alone."""

    run: str
    episodes: Episodes
    sources: dict[str, Source] = field(default_factory=dict[str, "Source"])
    steps: list[Mapping[str, Any]] = field(default_factory=list[Mapping[str, Any]])
    """Lines of the trainer's metrics, step numbers rising."""
    bus: BusState | None = None
    replicas: dict[str, Replica] = field(default_factory=dict[str, "Replica"])
    """By id, once asked."""
    permits: Mapping[str, int] = field(default_factory=dict[str, int])
    """`granted`, `taken`, `group_size`, `refills`, as far as the trainer has said so."""
    stream: StreamState | None = None
    num_watchers: int = 0
    """Pages that are open."""
    watched: asyncio.Event = field(default_factory=asyncio.Event)
    """Set while one is."""
    num_changes: int = 0
    _changed: asyncio.Event = field(default_factory=asyncio.Event)

    def touch(self) -> None:
        """Wake whoever waits: something changed."""
        self.num_changes += 1
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    async def changed(self, since: int, timeout_s: float) -> None:
        """Return once `num_changes` is no longer `since`, or after `timeout_s` seconds."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                while self.num_changes == since:
                    await self._changed.wait()

    def heard(self, name: str) -> None:
        """The source `name` answered."""
        source = self.sources[name]
        recovered = source.error or source.heard_s is None
        source.heard_s, source.error = time.time(), ""
        if recovered:
            self.touch()

    def lost(self, name: str, error: object) -> None:
        """The source `name` is away."""
        self.sources[name].error = str(error)
        self.touch()

    def add_step(self, figures: Mapping[str, Any]) -> None:
        """Take a line of the metrics; what a trainer did after the checkpoint that it resumed from
        is forgotten when it does it again.

        Raises:
            KeyError, TypeError, ValueError: It is no line of metrics.
        """
        number = int(figures["step"])
        while self.steps and self.steps[-1]["step"] >= number:
            self.steps.pop()
        self.steps.append({**figures, "step": number})
        del self.steps[:-MAX_STEPS]
        self.touch()

    @contextlib.contextmanager
    def open_page(self) -> Generator[None]:
        """A page is open while the block runs."""
        self.num_watchers += 1
        self.watched.set()
        try:
            yield
        finally:
            self.num_watchers -= 1
            if not self.num_watchers:
                self.watched.clear()
