"""Reading finished episodes from the stream of a run; redis is imported on use."""

from __future__ import annotations

import contextlib
from collections.abc import Generator, Iterable, Iterator
from typing import Any

from harness_sdk import control
from harness_sdk.errors import Unavailable
from harness_sdk.masking import masked_url
from harness_sdk.record import EpisodeRecord, record_from_bytes
from harness_sdk.redis_client import blocking_redis_client

_FIELD = control.RECORD_FIELD.encode()
_BATCH = 32


class EpisodeStream:
    """The stream of one run, to read from; made by `reading`."""

    def __init__(self, client: Any, run: str) -> None:
        self._client = client
        self._key = control.episodes_key(run)

    def last(self) -> EpisodeRecord | None:
        """The newest episode."""
        entries = self._client.xrevrange(self._key, count=1)
        return record_from_bytes(entries[0][1][_FIELD]) if entries else None

    def all(self) -> Iterator[EpisodeRecord]:
        """Every episode that is kept, oldest first."""
        start = "-"
        while entries := self._client.xrange(self._key, min=start, count=_BATCH):
            yield from (record_from_bytes(fields[_FIELD]) for _, fields in entries)
            start = f"({entries[-1][0].decode()}"

    def at(self, entry_ids: Iterable[str]) -> Iterator[tuple[str, EpisodeRecord]]:
        """The episodes of those entries with their ids, without the ones that were trimmed."""
        for entry_id in entry_ids:
            for _, fields in self._client.xrange(self._key, min=entry_id, max=entry_id):
                yield entry_id, record_from_bytes(fields[_FIELD])


@contextlib.contextmanager
def reading(url: str, run: str) -> Generator[EpisodeStream]:
    """The stream of `run` at `url`.

    Raises:
        ConfigError: redis-py is not installed, or `url` is no address.
        Unavailable: Redis cannot be read.
    """
    client = blocking_redis_client(url)
    import redis

    try:
        with client:
            yield EpisodeStream(client, run)
    except redis.RedisError as error:
        raise Unavailable("Redis cannot be read", value=f"{masked_url(url)}: {error}") from error
