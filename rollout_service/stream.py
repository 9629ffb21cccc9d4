"""Episodes on their way into Redis, and adapters out of it.

A record that `write` has taken is sent once Redis takes it, however often Redis restarts in
between; a repeated send is possible, and the trainer drops duplicates by episode id.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from redis.exceptions import AuthenticationError, OutOfMemoryError, RedisError, ResponseError

from harness_sdk import control
from harness_sdk._cancellation import cancellable, end
from harness_sdk.errors import ConfigError, Unavailable
from harness_sdk.record import EpisodeRecord, record_to_bytes
from harness_sdk.records_file import read_records, write_records
from harness_sdk.redis_client import redis_client
from rollout_service.adapter_chunks import fetch_adapter

logger = logging.getLogger(__name__)

_FIRST_DELAY_S, _LAST_DELAY_S = 0.05, 2.0
_IDLE_S = 30.0
"""Without a record for so long, the stream is trimmed all the same."""


@dataclass(slots=True)
class _Pending:
    record: EpisodeRecord
    data: bytes
    entry_id: asyncio.Future[str] = field(default_factory=lambda: asyncio.Future())


class EpisodeStream:
    """The way of finished episodes into `octopus:{run}:episodes`; an async context manager.

    Args:
        url: `redis://` or `rediss://` address.
        run: Run name, which names the keys.
        max_buffered_bytes: Records held while Redis is away; past it `write` waits.
        spill_path: File that keeps what Redis had not taken when this is closed; it is sent
            first by the next start. None drops it with an error in the log.
        trim_every: Entries between two trims.
    """

    def __init__(
        self,
        url: str,
        run: str,
        *,
        max_buffered_bytes: int = 64 * 1024 * 1024,
        spill_path: Path | None = None,
        trim_every: int = 64,
    ) -> None:
        self._client = redis_client(url)
        self._run = run
        self._key = control.episodes_key(run)
        self._max_buffered_bytes = max_buffered_bytes
        self._spill_path = spill_path
        self._trim_every = trim_every
        self._buffer: deque[_Pending] = deque()
        self._changed = asyncio.Condition()
        self._tasks: set[asyncio.Task[Any]] = set()
        self._sender: asyncio.Task[None] | None = None
        self._draining = False
        self._closed = False
        self._num_entering = 0
        self.buffered_bytes = 0
        self.num_sent = 0
        self.num_retries = 0

    async def __aenter__(self) -> EpisodeStream:
        await self.start()
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self.close()

    async def start(self) -> None:
        """Begin to send, what the last run left unsent first; Redis may still be away.

        Raises:
            ConfigError: Redis refuses the credentials.
        """
        try:
            await self._client.ping()
        except AuthenticationError as error:
            await self._client.aclose()
            raise ConfigError(
                "Redis refuses the credentials", value=error, remedy="correct redis.url"
            ) from error
        except (RedisError, OSError) as error:
            logger.warning("Redis is away (%s); episodes wait in memory", error)
        if self._spill_path is not None:
            unsent = await asyncio.to_thread(_unsent, self._spill_path)
            for record, data in unsent:
                self._push(_Pending(record, data))
            if unsent:
                logger.info("sending %d episodes that the last run left", len(unsent))
        self._sender = asyncio.create_task(self._send_all())

    async def close(self, grace_s: float = 10.0) -> None:
        """Send what is buffered, for at most `grace_s` seconds, then spill the rest."""
        if self._closed:
            return
        async with self._changed:
            # Writers that wait for room join the buffer now: what is spilled is not lost.
            self._draining = True
            self._changed.notify_all()
        try:
            async with asyncio.timeout(grace_s), self._changed:
                await self._changed.wait_for(lambda: not (self._buffer or self._num_entering))
        except TimeoutError:
            logger.error("Redis did not take %d episodes in time", len(self._buffer))
        async with self._changed:
            # What still becomes bytes is soon in the buffer: nothing waits for room any more.
            await self._changed.wait_for(lambda: not self._num_entering)
            self._closed = True
        if self._sender is not None:
            await end(self._sender)
        if self._spill_path is not None:
            await self._spill(self._spill_path)
        async with self._changed:
            for pending in self._buffer:
                pending.entry_id.set_exception(_closed())
            self._buffer.clear()
            self._changed.notify_all()
        await self._client.aclose()

    async def write(self, record: EpisodeRecord) -> str:
        """Append a record; waits while the buffer is full or Redis is away.

        Cancelling the caller does not take the record back.

        Returns:
            Its entry id.

        Raises:
            Unavailable: The stream was closed first.
        """
        task = asyncio.create_task(self._write(record))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return await asyncio.shield(task)

    async def trim(self) -> int:
        """Drop the entries below the lowest one that some consumer group still needs.

        Without a group nobody has read anything, and nothing is dropped.

        Returns:
            How many entries were dropped.
        """
        needed = []
        for group in await self._groups():
            # Read before XPENDING: what is acknowledged in between only lets us keep more.
            needed.append(group["last-delivered-id"].decode())
            if group["pending"]:
                lowest = (await self._client.xpending(self._key, group["name"]))["min"]
                needed += [lowest.decode()] if lowest is not None else []
        if not needed:
            return 0
        minid = min(needed, key=_entry_order)
        return await self._client.xtrim(self._key, minid=minid, approximate=False)

    async def fetch_adapter(self, version: int, folder: Path, *, max_bytes: int) -> None:
        """Write an adapter's two files to `folder`, one chunk in memory at a time.

        Raises:
            AdapterError: The version is not there, not whole, or larger than `max_bytes`.
            Unavailable: Redis cannot be reached.
        """
        try:
            await cancellable(fetch_adapter(self._client, self._run, version, folder, max_bytes))
        except (RedisError, OSError) as error:
            raise Unavailable("cannot fetch the adapter from Redis", value=error) from error

    async def _groups(self) -> list[dict[str, Any]]:
        """The consumer groups; none where nothing was sent yet."""
        try:
            return await self._client.xinfo_groups(self._key)
        except ResponseError as error:
            if "no such key" in str(error):
                return []
            raise

    async def _write(self, record: EpisodeRecord) -> str:
        if self._closed:
            raise _closed()
        self._num_entering += 1
        try:
            data = await asyncio.to_thread(record_to_bytes, record)
            pending = _Pending(record, data)
            async with self._changed:
                await self._changed.wait_for(lambda: self._draining or self._fits(len(data)))
                self._push(pending)
        finally:
            self._num_entering -= 1
            async with self._changed:
                self._changed.notify_all()
        return await pending.entry_id

    async def _spill(self, path: Path) -> None:
        """Keep in a file what Redis has not taken; a disk that is full loses it with an error."""
        try:
            await asyncio.to_thread(_spill, path, [pending.record for pending in self._buffer])
        except OSError as error:
            logger.critical(
                "%d episodes are lost: Redis has not taken them, and %s cannot be written (%s); "
                "make room there, and start Redis before the service stops",
                len(self._buffer), path, error,
            )  # fmt: skip

    def _fits(self, size: int) -> bool:
        return not self._buffer or self.buffered_bytes + size <= self._max_buffered_bytes

    def _push(self, pending: _Pending) -> None:
        # A caller that gave up never looks at the result.
        pending.entry_id.add_done_callback(lambda done: done.cancelled() or done.exception())
        self._buffer.append(pending)
        self.buffered_bytes += len(pending.data)

    async def _send_all(self) -> None:
        while True:
            first = await self._first()
            entry_id = await self._add(first.data)
            async with self._changed:
                self._buffer.popleft()
                self.buffered_bytes -= len(first.data)
                self._changed.notify_all()
            first.entry_id.set_result(entry_id)
            self.num_sent += 1
            if self.num_sent % self._trim_every == 0:
                await self._try_trim()

    async def _first(self) -> _Pending:
        """The next to send, once there is one."""
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_IDLE_S), self._changed:
                    await self._changed.wait_for(lambda: self._buffer)
                    return self._buffer[0]
            # What the trainer has acknowledged since the last send may be what leaves it no
            # memory to publish, and so nobody a reason to send.
            await self._try_trim()

    async def _add(self, data: bytes) -> str:
        """XADD until it succeeds: out of memory, restarting and unreachable all pass in time."""
        delay_s = _FIRST_DELAY_S
        while True:
            try:
                adding = self._client.xadd(self._key, {control.RECORD_FIELD: data})
                entry_id: bytes = await cancellable(adding)
                return entry_id.decode()
            except (RedisError, OSError) as error:
                self.num_retries += 1
                logger.warning(
                    "Redis did not take an episode (%s); %d wait, next try in %.2f s",
                    error, len(self._buffer), delay_s,
                )  # fmt: skip
                if isinstance(error, OutOfMemoryError):
                    # What is acknowledged may be all that fills it, and no other send trims.
                    await self._try_trim()
            await asyncio.sleep(delay_s * random.uniform(0.5, 1.0))
            delay_s = min(delay_s * 2, _LAST_DELAY_S)

    async def _try_trim(self) -> None:
        try:
            await cancellable(self.trim())
        except (RedisError, OSError) as error:
            logger.warning("cannot trim the episode stream: %s", error)


def _closed() -> Unavailable:
    return Unavailable("the episode stream is closed", remedy="open the episode on a live replica")


def _unsent(path: Path) -> list[tuple[EpisodeRecord, bytes]]:
    if not path.exists():
        return []
    return [(record, record_to_bytes(record)) for record in read_records(path)]


def _spill(path: Path, records: list[EpisodeRecord]) -> None:
    if records:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_records(path, records)
        logger.warning("%d episodes wait in %s for the next start", len(records), path)
    else:
        path.unlink(missing_ok=True)


def _entry_order(entry_id: str) -> tuple[int, int]:
    milliseconds, _, sequence = entry_id.partition("-")
    return int(milliseconds), int(sequence)
