"""Episodes for the report, kept as they pass through the stream: some early ones, some late."""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import AsyncGenerator, Iterable
from typing import Any

from harness_sdk._cancellation import cancellable, end
from harness_sdk.control import RECORD_FIELD, episodes_key
from harness_sdk.record import EpisodeRecord, record_from_bytes
from harness_sdk.types import StopReason

_KEPT = 64
_BLOCK_MS = 500
_PAUSE_S = 0.2
_FIELD = RECORD_FIELD.encode()


class Gallery:
    """The first and the last episodes of a phase."""

    def __init__(self) -> None:
        self._first: list[EpisodeRecord] = []
        self._last: deque[EpisodeRecord] = deque(maxlen=_KEPT)

    @contextlib.asynccontextmanager
    async def collect(self, redis_url: str, run: str) -> AsyncGenerator[None]:
        """Watch the stream of `run` while the block runs, without taking anything from it.

        Everything sent after the block was entered is seen.
        """
        from harness_sdk.redis_client import redis_client

        key = episodes_key(run)
        async with redis_client(redis_url) as client:
            newest: Any = await client.xrevrange(key, count=1)
            last = newest[0][0] if newest else b"0"
            task = asyncio.create_task(self._read(client, key, last))
            try:
                yield
            finally:
                await end(task)

    def keep(self, data: bytes) -> None:
        """Take a record's bytes in the order in which the episodes ended.

        Those that the end of the run cut short are left out.
        """
        record = record_from_bytes(data)
        if StopReason(record.stop_reason).is_infrastructure:
            return
        if len(self._first) < _KEPT:
            self._first.append(record)
        self._last.append(record)

    def early(self) -> EpisodeRecord | None:
        """An early episode that failed, one that forked where there is one."""
        return _pick(self._first, reward=0.0)

    def late(self) -> EpisodeRecord | None:
        """A late episode that earned the reward."""
        return _pick(reversed(self._last), reward=1.0)

    async def _read(self, client: Any, key: str, last: bytes) -> None:
        """Keep what comes after the entry `last`."""
        import redis.exceptions

        while True:
            try:
                streams = await cancellable(client.xread({key: last}, block=_BLOCK_MS))
            except (redis.exceptions.ConnectionError, redis.exceptions.TimeoutError):
                # The server is being restarted; its entries outlive that.
                await asyncio.sleep(_PAUSE_S)
                continue
            for _, entries in streams or ():
                for entry_id, fields in entries:
                    last = entry_id
                    self.keep(fields[_FIELD])


def _pick(records: Iterable[EpisodeRecord], *, reward: float) -> EpisodeRecord | None:
    kept = list(records)
    wanted = [record for record in kept if record.reward == reward]
    branched = [record for record in wanted if len(record.threads) > 1]
    for choice in (branched, wanted, kept):
        if choice:
            return choice[0]
    return None
