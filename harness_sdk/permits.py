"""Permits: how far `octopus run` may go ahead of the trainer, counted in groups in Redis."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncGenerator
from typing import Any, Protocol

from harness_sdk.control import permits_key, permits_wake_key, running_key
from harness_sdk.errors import ConfigError, Unavailable
from harness_sdk.redis_client import redis_client

logger = logging.getLogger(__name__)

_POLL_S = 1
"""A grant wakes one waiting runner; others look again after this long."""
_PAUSE_S = 0.2
_GRACE_S = 2.0


class Permits(Protocol):
    """Where the permission to start a group comes from."""

    async def take(self, permit_id: str) -> int:
        """Suspend until another group may start, and count it as taken; which of the run's groups
        it is, from 0."""
        ...

    async def give_back(self, permit_id: str) -> None:
        """Return the permit of a group that never started."""
        ...

    async def end(self, permit_id: str) -> None:
        """Say that no episode of the group runs any more."""
        ...

    async def counts(self) -> tuple[int, int]:
        """Groups granted and taken since the run began."""
        ...

    async def refills(self) -> int:
        """Failed episodes of a group that are to be replaced, at most."""
        ...


class NoPermits:
    """Every group may start at once; nothing remembers how many did."""

    def __init__(self) -> None:
        self._num_begun = 0

    async def take(self, permit_id: str) -> int:
        """Nothing to wait for."""
        self._num_begun += 1
        return self._num_begun - 1

    async def give_back(self, permit_id: str) -> None:
        """The next group takes its place."""
        self._num_begun -= 1

    async def end(self, permit_id: str) -> None:
        """Nobody waits for it."""

    async def counts(self) -> tuple[int, int]:
        """Nothing is counted."""
        return 0, 0

    async def refills(self) -> int:
        """Nobody waits for whole groups."""
        return 0


class RedisPermits:
    """Permits of a run: `granted` by the trainer, `taken` by runners, in one Redis hash.

    Args:
        client: Of redis-py, answering text.
        run: Name of the run.
        patience_s: How long a call keeps trying while Redis is away.
        group_size: Episodes of the runner's groups; None compares them with nothing.
    """

    def __init__(
        self, client: Any, run: str, *, patience_s: float = 60.0, group_size: int | None = None
    ) -> None:
        self._client = client
        self._group_size = group_size
        self._run = run
        self._patience_s = patience_s

    async def take(self, permit_id: str) -> int:
        """Wait until fewer groups are taken than granted, and take one; its place in the run.

        Raises:
            Unavailable: Redis cannot be reached.
            ConfigError: The trainer waits for groups of another size.
        """
        try:
            await self._until_taken(permit_id)
        except BaseException:
            await self.end(permit_id)
            raise
        try:
            _check_cancelled()
            await self._check_group_size()
            # Not `taken`, which for a moment counts those too that try in vain.
            return int(await self._call("hincrby", permits_key(self._run), "begun", 1)) - 1
        except BaseException:
            await self._give_back(permit_id, "taken")
            raise

    async def give_back(self, permit_id: str) -> None:
        """Count one group less; soon given up, since a runner that ends calls it."""
        await self._give_back(permit_id, "begun", "taken")

    async def _give_back(self, permit_id: str, *counts: str) -> None:
        key, patience_s = permits_key(self._run), min(_GRACE_S, self._patience_s)
        for name in counts:
            await self._call("hincrby", key, name, -1, patience_s=patience_s)
        await self.end(permit_id)

    async def end(self, permit_id: str) -> None:
        """Count the group as running no more; where Redis is away, the trainer finds it silent."""
        key = running_key(self._run)
        try:
            await self._call("srem", key, permit_id, patience_s=min(_GRACE_S, self._patience_s))
        except Unavailable as error:
            logger.warning("the end of the group of permit %s is not told: %s", permit_id, error)

    async def counts(self) -> tuple[int, int]:
        """Groups granted and taken since the run began.

        Raises:
            Unavailable: Redis cannot be reached.
        """
        found = await self._call("hmget", permits_key(self._run), "granted", "taken")
        return int(found[0] or 0), int(found[1] or 0)

    async def refills(self) -> int:
        """As the trainer last asked.

        Raises:
            Unavailable: Redis cannot be reached.
        """
        return int(await self._call("hget", permits_key(self._run), "refills") or 0)

    async def _check_group_size(self) -> None:
        """Smaller groups would wait for their deadline, the rest of larger ones be dropped."""
        if self._group_size is None:
            return
        wanted = await self._call("hget", permits_key(self._run), "group_size")
        if wanted is not None and int(wanted) != self._group_size:
            raise ConfigError(
                "the trainer waits for groups of another size",
                value=self._group_size,
                limit=wanted,
                remedy=f"--group-size {wanted}, or the trainer's --batch.group-size",
            )

    async def _until_taken(self, permit_id: str) -> None:
        told = False
        while not await self._try(permit_id):
            if not told:
                logger.info("waiting for the trainer to grant run %s another group", self._run)
                told = True
            await self._call("blpop", [permits_wake_key(self._run)], _POLL_S)
            _check_cancelled()

    async def _try(self, permit_id: str) -> bool:
        key = permits_key(self._run)
        # First: who withholds permits and then looks for running groups misses none.
        await self._call("sadd", running_key(self._run), permit_id)
        taken = int(await self._call("hincrby", key, "taken", 1))
        if taken <= int(await self._call("hget", key, "granted") or 0):
            return True
        await self._call("hincrby", key, "taken", -1)
        await self._call("srem", running_key(self._run), permit_id)
        return False

    async def _call(self, name: str, *args: Any, patience_s: float | None = None) -> Any:
        """One command, again after each lost connection.

        A permit taken twice by it is one that the trainer finds lost and grants anew.
        """
        import redis.exceptions

        patience_s = self._patience_s if patience_s is None else patience_s
        give_up = time.monotonic() + patience_s
        while True:
            try:
                return await getattr(self._client, name)(*args)
            except (redis.exceptions.ConnectionError, redis.exceptions.TimeoutError) as error:
                if time.monotonic() > give_up:
                    raise Unavailable(
                        f"Redis cannot be reached: {error}",
                        limit=f"{patience_s:g} s",
                        remedy="start it, or correct --redis-url",
                    ) from error
                logger.warning("Redis is away (%s); trying again", error)
            await asyncio.sleep(_PAUSE_S)


def _check_cancelled() -> None:
    # asyncio.wait_for of Python 3.11, which redis-py calls, drops a cancellation that arrives
    # together with its result.
    task = asyncio.current_task()
    if task is not None and task.cancelling():
        raise asyncio.CancelledError


@contextlib.asynccontextmanager
async def redis_permits(
    url: str, run: str, *, patience_s: float = 60.0, group_size: int | None = None
) -> AsyncGenerator[RedisPermits, None]:
    """Permits of `run` kept at `url`; calls outlive an absence of Redis of `patience_s` seconds.

    Raises:
        ConfigError: redis-py is not installed, or the URL is no address.
    """
    client = redis_client(url, decode=True)
    try:
        yield RedisPermits(client, run, patience_s=patience_s, group_size=group_size)
    finally:
        await client.aclose()
