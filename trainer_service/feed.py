"""What the loop trains on next: groups or demonstrations from the stream, or a file of records."""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from harness_sdk.errors import ConfigError
from harness_sdk.fingerprints import file_sha256
from harness_sdk.record import EpisodeRecord
from harness_sdk.records_file import read_records
from harness_sdk.types import StopReason
from trainer_service.groups import Group, Scored, outcome
from trainer_service.origin import Origin
from trainer_service.sections import BatchOptions
from trainer_service.stream import EpisodeStream

READ_BLOCK_S = 0.5
"""Longest wait for Redis between two looks at deadlines and at the stop signal."""

NUM_READ = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """The episodes of one optimiser step."""

    groups: tuple[Group, ...]
    """Of one episode each where the objective compares none."""

    @property
    def episodes(self) -> list[Scored]:
        """All of them, group by group."""
        return [episode for group in self.groups for episode in group.episodes]


class Feed(Protocol):
    """A source of batches whose position a checkpoint can hold."""

    async def next(self, version: int, stopped: Callable[[], bool]) -> Batch | None:
        """The next batch for a step from policy `version`; None at the end or when stopped."""
        ...

    def state(self) -> dict[str, Any]:
        """Position and counters once the batches so far have been used, as plain data."""
        ...

    async def settle(self) -> None:
        """The checkpoint that holds `state()` is durable."""
        ...

    def dropped(self) -> Counter[str]:
        """Episodes left out since the start of the run, by cause."""
        ...


class Collector(Protocol):
    """Turns deliveries into groups: `GroupAssembler` or `Demonstrations`."""

    dropped_episodes: Counter[str]
    dropped_groups: Counter[str]

    def add(self, entry_id: str, record: EpisodeRecord, now_s: float) -> None: ...
    def overdue(self, now_s: float) -> list[str]: ...
    def expire(self, now_s: float) -> None: ...
    def take(self, num_groups: int, version: int) -> list[Group] | None: ...
    def pop_finished_entries(self) -> list[str]: ...
    @property
    def closed(self) -> tuple[str, ...]: ...
    @property
    def num_waiting(self) -> int: ...
    @property
    def num_ready(self) -> int: ...


class StreamFeed:
    """Batches from Redis.

    Args:
        stream: Not opened yet.
        collector: Groups or single demonstrations.
        num_groups: Groups of one batch.
        state: What `state()` returned for the checkpoint that this run resumes from.
        on_dropped: Awaited when groups were dropped.
        idle_s: Seconds without an episode after which `on_idle` is awaited.
        on_idle: Given the number of groups that wait here.
        on_wait: Awaited while a batch is not whole yet, at least every `READ_BLOCK_S`.
    """

    def __init__(
        self,
        stream: EpisodeStream,
        collector: Collector,
        *,
        num_groups: int,
        state: dict[str, Any],
        on_dropped: Callable[[], Awaitable[None]],
        idle_s: float,
        on_idle: Callable[[int], Awaitable[None]],
        on_wait: Callable[[], Awaitable[None]],
    ) -> None:
        self._stream = stream
        self._collector = collector
        self._num_groups = num_groups
        self._on_dropped = on_dropped
        self._idle_s = idle_s
        self._on_idle = on_idle
        self._on_wait = on_wait
        self._busy_at = time.monotonic()
        self._consuming: list[str] = []
        self._before = state
        collector.dropped_episodes.update(state.get("dropped_episodes", {}))
        collector.dropped_groups.update(state.get("dropped_groups", {}))
        stream.dropped.update(state.get("dropped_entries", {}))
        self._told_dropped = self.num_dropped_groups

    async def open(self) -> None:
        """Join the stream where the checkpoint left it."""
        await self._stream.open(
            consumed=self._before.get("consumed", ()), recent=self._before.get("recent", ())
        )

    @property
    def num_dropped_groups(self) -> int:
        """Since the run began."""
        return sum(self._collector.dropped_groups.values())

    @property
    def num_lost(self) -> int:
        """Of those, the ones of which no episode came."""
        return self._collector.dropped_groups["lost"]

    @property
    def num_dead_trimmed(self) -> int:
        """Records moved aside and no longer kept."""
        return self._stream.num_dead_trimmed

    @property
    def num_waiting(self) -> int:
        """Groups that wait for episodes or for a step."""
        return self._collector.num_waiting

    @property
    def num_ready(self) -> int:
        """Groups that wait for a step."""
        return self._collector.num_ready

    async def next(self, version: int, stopped: Callable[[], bool]) -> Batch | None:
        """Read until a batch is whole; see `Feed`."""
        await self.catch_up()
        while not stopped():
            self._collector.expire(time.monotonic())
            groups = self._collector.take(self._num_groups, version)
            await self._tell_dropped()
            if groups is not None:
                self._consuming += [e.entry_id for group in groups for e in group.episodes]
                return Batch(groups=tuple(groups))
            await self._on_wait()
            await self._read(block_s=READ_BLOCK_S)
        return None

    async def catch_up(self) -> None:
        """After a step, which may outlast every deadline: what came meanwhile is in time, and
        silence begins now."""
        self._busy_at = time.monotonic()
        while self._collector.overdue(time.monotonic()) and await self._read(block_s=0.0):
            pass

    async def gather(self) -> None:
        """Take in what comes within a moment, for no step yet."""
        self._collector.expire(time.monotonic())
        await self._tell_dropped()
        await self._on_wait()
        await self._read(block_s=READ_BLOCK_S)

    def state(self) -> dict[str, Any]:
        """Entries used and dropped since the last checkpoint, and what must not come again."""
        self._consuming += self._collector.pop_finished_entries()
        return {
            **self._before,
            "consumed": list(self._consuming),
            "recent": self._stream.recent_episodes(self._consuming),
            "closed_groups": list(self._collector.closed),
            "dropped_episodes": dict(self._collector.dropped_episodes),
            "dropped_groups": dict(self._collector.dropped_groups),
            "dropped_entries": dict(self._stream.dropped),
        }

    async def settle(self) -> None:
        """Acknowledge what the durable checkpoint has consumed."""
        consumed, self._consuming = self._consuming, []
        await self._stream.acknowledge(consumed)

    def dropped(self) -> Counter[str]:
        """By cause; see `Feed`."""
        return self._collector.dropped_episodes + self._stream.dropped

    def drop_lost(self, num_groups: int) -> None:
        """Count groups of which no episode will come; a negative number takes some back."""
        self._collector.dropped_groups["lost"] += num_groups

    async def _tell_dropped(self) -> None:
        if self.num_dropped_groups != self._told_dropped:
            self._told_dropped = self.num_dropped_groups
            await self._on_dropped()

    async def _read(self, *, block_s: float) -> bool:
        """Take what the stream has, and whether it had anything, if only what was dropped."""
        before = self._stream.num_read
        deliveries = await self._stream.read(max_entries=NUM_READ, block_s=block_s)
        now_s = time.monotonic()
        for delivery in deliveries:
            self._collector.add(delivery.entry_id, delivery.record, now_s)
        if deliveries:
            self._busy_at = now_s
        elif now_s - self._busy_at >= self._idle_s:
            self._busy_at = now_s
            await self._on_idle(self._collector.num_waiting)
        return self._stream.num_read > before


class Demonstrations:
    """A collector for objectives that compare no episodes: each one is a group of its own.

    Args:
        min_reward: Episodes below it are left out; None takes every finished one.
    """

    def __init__(self, min_reward: float | None) -> None:
        self._min_reward = min_reward
        self._ready: list[Group] = []
        self._finished_entries: list[str] = []
        self.dropped_episodes: Counter[str] = Counter()
        self.dropped_groups: Counter[str] = Counter()

    @property
    def closed(self) -> tuple[str, ...]:
        """Nothing: no group can get a late episode."""
        return ()

    @property
    def num_waiting(self) -> int:
        """Episodes that wait for a step."""
        return len(self._ready)

    @property
    def num_ready(self) -> int:
        """The same: nothing waits for its group."""
        return len(self._ready)

    def add(self, entry_id: str, record: EpisodeRecord, now_s: float) -> None:
        """Take one episode, or drop it with a cause."""
        cause = excluded(record, self._min_reward)
        if cause:
            self.dropped_episodes[cause] += 1
            self._finished_entries.append(entry_id)
            return
        episode = Scored.of(entry_id, record)
        self._ready.append(Group(group_id=record.group_id, episodes=(episode,)))

    def overdue(self, now_s: float) -> list[str]:
        """Nothing waits here."""
        return []

    def expire(self, now_s: float) -> None:
        """Nothing waits here."""

    def take(self, num_groups: int, version: int) -> list[Group] | None:
        """The next `num_groups` episodes; None while there are fewer."""
        if len(self._ready) < num_groups:
            return None
        taken, self._ready = self._ready[:num_groups], self._ready[num_groups:]
        return taken

    def pop_finished_entries(self) -> list[str]:
        """Entry ids of dropped episodes since the last call."""
        entries, self._finished_entries = self._finished_entries, []
        return entries


class FileFeed:
    """Batches of demonstrations from a file of records, shuffled anew in each epoch.

    Args:
        path: Written by `harness_sdk.records_file.write_records`.
        batch: Size, epochs and threshold.
        seed: Of the order.
        state: What `state()` returned for the checkpoint that this run resumes from.
        origin: What the records have to be made with.

    Raises:
        ConfigError: None is left to train on, or one was made with another tokenizer.
    """

    def __init__(
        self, path: Path, batch: BatchOptions, *, seed: int, state: dict[str, Any], origin: Origin
    ) -> None:
        self._batch = batch
        self._seed = seed
        self._dropped: Counter[str] = Counter()
        self._groups: list[Group] = []
        for index, record in enumerate(read_records(path)):
            origin.check(record)
            self._take(index, record)
        if not self._groups:
            raise ConfigError(
                "no record to train on",
                value=f"{path}, dropped: {dict(self._dropped)}",
                remedy="lower batch.min_reward or give another file",
            )
        self._sha256 = file_sha256(path)
        self._before = state
        same = state.get("records_sha256") == self._sha256
        self._position = int(state["position"]) if same else 0
        self._epoch, self._order = -1, [0]

    async def next(self, version: int, stopped: Callable[[], bool]) -> Batch | None:
        """The next episodes in the order of their epochs; the last batch may be smaller."""
        end = self._batch.epochs * len(self._groups)
        chosen = range(self._position, min(self._position + self._batch.episodes_per_step, end))
        if stopped() or not chosen:
            return None
        self._position = chosen.stop
        return Batch(groups=tuple(self._group(place) for place in chosen))

    def state(self) -> dict[str, Any]:
        """Position over all epochs of this file; what the stream left is kept."""
        return {**self._before, "records_sha256": self._sha256, "position": self._position}

    async def settle(self) -> None:
        """The checkpoint alone is this feed's memory."""

    def dropped(self) -> Counter[str]:
        """By cause; see `Feed`."""
        return self._dropped

    def _take(self, index: int, record: EpisodeRecord) -> None:
        cause = excluded(record, self._batch.min_reward)
        if cause:
            self._dropped[cause] += 1
            return
        episode = Scored.of(f"record-{index}", record)
        self._groups.append(Group(group_id=record.group_id, episodes=(episode,)))

    def _group(self, place: int) -> Group:
        epoch, offset = divmod(place, len(self._groups))
        if epoch != self._epoch:
            order = list(range(len(self._groups)))
            random.Random(self._seed * 1_000_003 + epoch).shuffle(order)
            self._epoch, self._order = epoch, order
        return self._groups[self._order[offset]]


def excluded(record: EpisodeRecord, min_reward: float | None) -> str:
    """Why an episode is no demonstration; empty where it is one."""
    reason = StopReason(record.stop_reason)
    if reason.is_infrastructure:
        return reason.value
    if not record.num_tokens:
        return "empty"
    if min_reward is not None and outcome(record) < min_reward:
        return "low_reward"
    return ""
