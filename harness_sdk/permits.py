"""Permits: how far `octopus run` may go ahead of the trainer, counted in groups in Redis."""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import logging
from collections.abc import AsyncGenerator
from typing import Any, Protocol

from harness_sdk.control import permits_key, permits_wake_key
from harness_sdk.errors import ConfigError, Unavailable

logger = logging.getLogger(__name__)

_POLL_S = 1
"""A grant wakes one waiting runner; others look again after this long."""


class Permits(Protocol):
    """Where the permission to start a group comes from."""

    async def take(self) -> None:
        """Suspend until another group may start, and count it as taken."""
        ...

    async def give_back(self) -> None:
        """Return the permit of a group that never started."""
        ...

    async def counts(self) -> tuple[int, int]:
        """Groups granted and taken since the run began."""
        ...


class NoPermits:
    """Every group may start at once."""

    async def take(self) -> None:
        """Nothing to wait for."""

    async def give_back(self) -> None:
        """Nothing to return."""

    async def counts(self) -> tuple[int, int]:
        """Nothing is counted."""
        return 0, 0


class RedisPermits:
    """Permits of a run: `granted` by the trainer, `taken` by runners, in one Redis hash."""

    def __init__(self, client: Any, run: str) -> None:
        self._client = client
        self._run = run

    async def take(self) -> None:
        """Wait until fewer groups are taken than granted, and take one.

        Raises:
            Unavailable: Redis cannot be reached.
        """
        told = False
        while not await self._try():
            if not told:
                logger.info("waiting for the trainer to grant run %s another group", self._run)
                told = True
            await self._call("blpop", [permits_wake_key(self._run)], _POLL_S)
            _check_cancelled()
        try:
            _check_cancelled()
        except asyncio.CancelledError:
            await self.give_back()
            raise

    async def give_back(self) -> None:
        """Count one group less as taken."""
        await self._call("hincrby", permits_key(self._run), "taken", -1)

    async def counts(self) -> tuple[int, int]:
        """Groups granted and taken since the run began.

        Raises:
            Unavailable: Redis cannot be reached.
        """
        found = await self._call("hmget", permits_key(self._run), "granted", "taken")
        return int(found[0] or 0), int(found[1] or 0)

    async def _try(self) -> bool:
        key = permits_key(self._run)
        taken = int(await self._call("hincrby", key, "taken", 1))
        if taken <= int(await self._call("hget", key, "granted") or 0):
            return True
        await self.give_back()
        return False

    async def _call(self, name: str, *args: Any) -> Any:
        import redis.exceptions

        try:
            return await getattr(self._client, name)(*args)
        except redis.exceptions.ConnectionError as error:
            raise Unavailable(
                f"Redis cannot be reached: {error}", remedy="start it, or correct --redis-url"
            ) from error


def _check_cancelled() -> None:
    # asyncio.wait_for of Python 3.11, which redis-py calls, drops a cancellation that arrives
    # together with its result.
    task = asyncio.current_task()
    if task is not None and task.cancelling():
        raise asyncio.CancelledError


@contextlib.asynccontextmanager
async def redis_permits(url: str, run: str) -> AsyncGenerator[RedisPermits, None]:
    """Permits of `run` kept at `url`.

    Raises:
        ConfigError: redis-py is not installed.
    """
    try:
        asyncio_redis: Any = importlib.import_module("redis.asyncio")
    except ImportError as error:
        raise ConfigError(
            "permits need redis-py", remedy="pip install 'octopus-agents[rollout]'"
        ) from error
    client = asyncio_redis.Redis.from_url(url, decode_responses=True)
    try:
        yield RedisPermits(client, run)
    finally:
        await client.aclose()
