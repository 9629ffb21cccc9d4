"""The trainer's connection to Redis and its place in the stream of episodes; see also `run_keys`.

An entry is acknowledged only by `acknowledge`, which the loop calls once a durable checkpoint
holds what became of it; whatever was read and not acknowledged comes again after a restart.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass
from typing import Any, TypeVar

from redis.exceptions import (
    BusyLoadingError,
    ConnectionError,
    OutOfMemoryError,
    RedisError,
    ResponseError,
    TimeoutError,
)

from harness_sdk import control
from harness_sdk._cancellation import cancellable
from harness_sdk.errors import ProtocolError, ServiceError, Unavailable
from harness_sdk.record import EpisodeRecord, record_from_bytes
from harness_sdk.redis_client import redis_client
from trainer_service.origin import RefusedRecord

log = logging.getLogger(__name__)

MAX_PARSE_ATTEMPTS = 3
RECENT_EPISODES = 16_384
"""Episode ids remembered for dropping duplicates; a duplicate follows its first within seconds."""

MAX_DEAD = 256
"""Entries that the stream of dead records keeps, the newest: enough to see what is wrong, and at
about 1 MB for an episode of 128K tokens no burden on a server that evicts nothing. Redis trims
whole blocks of small entries, so up to a hundred more may stay."""

T = TypeVar("T")
_Entry = tuple[bytes, dict[bytes, bytes] | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Delivery:
    """One episode as it came from the stream."""

    entry_id: str
    record: EpisodeRecord


class RedisLink:
    """A connection that outlives the server's restarts.

    Args:
        url: `redis://` or `rediss://` address.
        patience_s: How long one call keeps trying while the server is away.

    Raises:
        ConfigError: The URL is no address.
    """

    def __init__(self, url: str, *, patience_s: float = 300.0) -> None:
        # It retries nothing itself: after a lost reply the stream must look for what the server
        # believes it delivered.
        self.client: Any = redis_client(url)
        self.reconnects = 0
        self._patience_s = patience_s

    async def call(self, operation: Callable[[], Awaitable[T]]) -> T:
        """Await `operation()`, again after each lost connection; it must be idempotent.

        Raises:
            Unavailable: The server stayed away for longer than the link's patience.
            ServiceError: The server refused the command, or had no memory for it all the time.
        """
        give_up = time.monotonic() + self._patience_s
        delay_s = 0.05
        while True:
            try:
                return await cancellable(operation())
            except (ConnectionError, TimeoutError, BusyLoadingError, OSError) as error:
                self.reconnects += 1
                if time.monotonic() > give_up:
                    raise Unavailable(
                        "Redis cannot be reached",
                        value=error,
                        limit=f"{self._patience_s:g} s",
                        remedy="start it, or correct redis.url",
                    ) from error
                if self.reconnects == 1 or delay_s >= 1.0:
                    log.warning("Redis is away (%s); trying again", error)
                await asyncio.sleep(delay_s)
                delay_s = min(delay_s * 2, 2.0)
            except OutOfMemoryError as error:
                # Replicas trim what is acknowledged as soon as they are refused themselves.
                if time.monotonic() > give_up:
                    raise ServiceError(
                        "Redis is at its memory limit",
                        value=error,
                        limit=f"{self._patience_s:g} s",
                        remedy="raise its maxmemory; the trainer resumes from its checkpoint",
                    ) from error
                log.warning("Redis is at its memory limit; trying again in %.2f s", delay_s)
                await asyncio.sleep(delay_s)
                delay_s = min(delay_s * 2, 2.0)
            except RedisError as error:
                raise ServiceError(
                    "Redis refused a command",
                    value=f"{type(error).__name__}: {error}",
                    remedy="see its log and `octopus doctor`; the trainer resumes from its "
                    "checkpoint",
                ) from error

    async def close(self) -> None:
        """Close the connection."""
        await self.client.aclose()


class EpisodeStream:
    """This trainer's place in the stream of finished episodes.

    Args:
        link: Connection.
        run: Run name, which names the keys.
        consumer: Name of this consumer; a restarted trainer keeps its name.
        group: Consumer group.
        claim_idle_s: Entries that another consumer left unacknowledged so long are taken over.
        parse: Bytes to record; `ProtocolError` or `ValueError` mark the entry as bad,
            `RefusedRecord` as one that no other attempt makes better.
    """

    def __init__(
        self,
        link: RedisLink,
        run: str,
        *,
        consumer: str = "trainer-0",
        group: str = "trainer",
        claim_idle_s: float = 60.0,
        parse: Callable[[bytes], EpisodeRecord] = record_from_bytes,
    ) -> None:
        self._link = link
        self._key = control.episodes_key(run)
        self._dead_key = control.dead_key(run)
        self._consumer = consumer
        self._group = group
        self._claim_idle_s = claim_idle_s
        self._parse = parse
        self._held: dict[str, str] = {}
        self._recent: dict[str, None] = {}
        self._consumed: set[str] = set()
        self._suspects: list[str] = []
        self._seen_reconnects = -1
        self._next_claim = 0.0
        self.dropped: Counter[str] = Counter()
        self.num_read = 0
        """Entries that came, those that were dropped included."""
        self.num_dead_trimmed = 0
        """Dead records that are no longer kept, by the server's count at the last one."""

    async def open(self, *, consumed: Iterable[str] = (), recent: Iterable[str] = ()) -> None:
        """Join the consumer group and settle what the last checkpoint had already used.

        Args:
            consumed: Entry ids inside that checkpoint: acknowledged here, never trained again.
            recent: Episode ids inside it: their duplicates are dropped.
        """
        self._consumed = set(consumed)
        self._recent = dict.fromkeys(recent)
        await self._link.call(self._create_group)
        await self.acknowledge(self._consumed)

    async def read(self, *, max_entries: int, block_s: float) -> list[Delivery]:
        """The next episodes: those left from before first, then new ones.

        Returns:
            At most `max_entries` new episodes plus any recovered ones; empty after `block_s`
            seconds without any.
        """
        entries = await self._recovered()
        if not entries:
            entries = await self._new(max_entries, block_s)
        self.num_read += len(entries)
        deliveries = []
        for entry_id, fields in entries:
            delivery = await self._admit(entry_id.decode(), fields)
            if delivery is not None:
                deliveries.append(delivery)
        return deliveries

    async def acknowledge(self, entry_ids: Iterable[str]) -> None:
        """Mark entries as done with; the rollout services trim the stream behind them."""
        ids = list(entry_ids)
        if ids:
            await self._link.call(lambda: self._link.client.xack(self._key, self._group, *ids))
        for entry_id in ids:
            episode_id = self._held.pop(entry_id, None)
            if episode_id is not None:
                self._remember(episode_id)

    def recent_episodes(self, entry_ids: Iterable[str]) -> list[str]:
        """Episode ids for the checkpoint that consumes `entry_ids`, oldest first."""
        held = [self._held[entry_id] for entry_id in entry_ids if entry_id in self._held]
        return [*self._recent, *held][-RECENT_EPISODES:]

    async def _create_group(self) -> None:
        try:
            await self._link.client.xgroup_create(self._key, self._group, id="0", mkstream=True)
        except ResponseError as error:
            if "BUSYGROUP" not in str(error):
                raise

    async def _new(self, max_entries: int, block_s: float) -> list[_Entry]:
        async def read() -> Any:
            return await self._link.client.xreadgroup(
                self._group,
                self._consumer,
                {self._key: ">"},
                count=max_entries,
                block=max(1, int(block_s * 1000)),
            )

        reply = await self._in_group(read)
        return reply[0][1] if reply else []

    async def _in_group(self, operation: Callable[[], Awaitable[Any]]) -> Any:
        """Await `operation`, where needed after making the group anew: a server that lost its data
        lost the group too. `_consumed` and `_recent` keep what was trained from coming again."""

        async def attempt() -> Any:
            try:
                return await operation()
            except ResponseError as error:
                if "NOGROUP" not in str(error):
                    raise
                log.warning("Redis lost the consumer group of %s; making it anew", self._key)
                await self._create_group()
                return await operation()

        return await self._link.call(attempt)

    async def _recovered(self) -> list[_Entry]:
        """Entries that the server delivered and this process has not: after a start, a lost
        connection or another consumer's death, and those whose parsing is tried again."""
        entries: list[_Entry] = []
        if self._suspects:
            suspects, self._suspects = self._suspects, []
            entries += await self._claim(suspects)
        if self._seen_reconnects != self._link.reconnects:
            self._seen_reconnects = self._link.reconnects
            entries += await self._own_pending()
        if time.monotonic() >= self._next_claim:
            self._next_claim = time.monotonic() + self._claim_idle_s / 2
            entries += await self._stale()
        # A suspect is among the pending too.
        return [entry for entry in dict(entries).items() if entry[0].decode() not in self._held]

    async def _own_pending(self) -> list[_Entry]:
        entries: list[_Entry] = []
        last = "0"
        while True:
            start = last
            reply = await self._in_group(
                lambda start=start: self._link.client.xreadgroup(
                    self._group, self._consumer, {self._key: start}, count=64
                )
            )
            page = reply[0][1] if reply else []
            if not page:
                return entries
            entries += page
            last = page[-1][0].decode()

    async def _stale(self) -> list[_Entry]:
        """Takes over what other consumers left; own entries are either held or known suspects."""
        idle_ms = int(self._claim_idle_s * 1000)
        pending = await self._in_group(
            lambda: self._link.client.xpending_range(
                self._key, self._group, min="-", max="+", count=1000, idle=idle_ms
            )
        )
        mine = self._consumer.encode()
        return await self._claim(
            [item["message_id"].decode() for item in pending if item["consumer"] != mine],
            idle_ms=idle_ms,
        )

    async def _claim(self, entry_ids: list[str], *, idle_ms: int = 0) -> list[_Entry]:
        if not entry_ids:
            return []
        return await self._in_group(
            lambda: self._link.client.xclaim(
                self._key, self._group, self._consumer, idle_ms, entry_ids
            )
        )

    async def _admit(self, entry_id: str, fields: dict[bytes, bytes] | None) -> Delivery | None:
        """Parse an entry; None where it is a duplicate, gone or bad, or held since before the
        group was made anew."""
        if entry_id in self._held:
            return None
        if entry_id in self._consumed:
            await self._drop(entry_id, "trained_before")
            return None
        if not fields:
            await self._drop(entry_id, "trimmed")
            return None
        data = fields.get(control.RECORD_FIELD.encode(), b"")
        try:
            record = await asyncio.to_thread(self._parse, data)
        except RefusedRecord as error:
            await self._bury(entry_id, data, error, error.cause)
            return None
        except (ProtocolError, ValueError) as error:
            await self._suspect(entry_id, data, error)
            return None
        if record.episode_id in self._recent or record.episode_id in self._held.values():
            await self._drop(entry_id, "duplicate")
            return None
        self._held[entry_id] = record.episode_id
        return Delivery(entry_id=entry_id, record=record)

    async def _suspect(self, entry_id: str, data: bytes, error: Exception) -> None:
        """Leave a bad entry for another attempt, or move it aside after the last one.

        The count of deliveries is the server's, so restarts do not start it anew.
        """
        found = await self._in_group(
            lambda: self._link.client.xpending_range(
                self._key, self._group, min=entry_id, max=entry_id, count=1
            )
        )
        attempts = found[0]["times_delivered"] if found else MAX_PARSE_ATTEMPTS
        if attempts < MAX_PARSE_ATTEMPTS:
            self._suspects.append(entry_id)
            return
        await self._bury(entry_id, data, error, "poison")

    async def _bury(self, entry_id: str, data: bytes, error: Exception, cause: str) -> None:
        """Move an entry aside, with the reason beside it; the oldest such are let go."""
        log.error("entry %s moved to %s: %s", entry_id, self._dead_key, error)
        fields = {
            control.RECORD_FIELD: data,
            "entry_id": entry_id,
            "error": f"{type(error).__name__}: {error}",
        }
        client = self._link.client
        await self._link.call(
            lambda: client.xadd(self._dead_key, fields, maxlen=MAX_DEAD, approximate=True)
        )
        info = await self._link.call(lambda: client.xinfo_stream(self._dead_key))
        # Counted from Redis 7 on.
        trimmed = info.get("entries-added", info["length"]) - info["length"]
        if trimmed and not self.num_dead_trimmed:
            log.warning("%s keeps its newest %d entries alone", self._dead_key, info["length"])
        self.num_dead_trimmed = trimmed
        await self._drop(entry_id, cause)

    async def _drop(self, entry_id: str, cause: str) -> None:
        self.dropped[cause] += 1
        await self._link.call(lambda: self._link.client.xack(self._key, self._group, entry_id))

    def _remember(self, episode_id: str) -> None:
        self._recent[episode_id] = None
        while len(self._recent) > RECENT_EPISODES:
            del self._recent[next(iter(self._recent))]
