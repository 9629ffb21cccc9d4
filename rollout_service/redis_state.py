"""What commands look up in Redis: the state of a run's stream, the server's settings and clock."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast

from redis.exceptions import RedisError, ResponseError

from harness_sdk import control
from harness_sdk.redis_client import away, redis_client


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamState:
    """The stream at one moment."""

    length: int
    pending: int
    """Delivered to a consumer group and not acknowledged, over all groups."""
    undelivered: int
    """Of the group that lags most; the whole length without a group."""
    dead: int
    """Records that failed to parse or were refused, as far as they are kept."""
    dead_trimmed: int
    """Such that are no longer kept."""


async def read_stream_state(url: str, run: str) -> StreamState:
    """Look at the stream of `run`.

    Raises:
        Unavailable: Redis cannot be reached.
    """
    client = redis_client(url)
    try:
        return await stream_state(client, run)
    except (RedisError, OSError) as error:
        raise away(error) from error
    finally:
        await client.aclose()


async def stream_state(client: Any, run: str) -> StreamState:
    """The same over a connection of redis-py's that is there already.

    Raises:
        RedisError: Redis cannot be reached.
    """
    key, dead_key = control.episodes_key(run), control.dead_key(run)
    length = await client.xlen(key)
    groups = await client.xinfo_groups(key) if await client.exists(key) else []
    dead = {"length": 0}
    if await client.exists(dead_key):
        dead = await client.xinfo_stream(dead_key)
    return StreamState(
        length=length,
        pending=sum(group["pending"] for group in groups),
        undelivered=max((group["lag"] or 0 for group in groups), default=length),
        dead=dead["length"],
        # Counted from Redis 7 on.
        dead_trimmed=dead.get("entries-added", dead["length"]) - dead["length"],
    )


async def read_newest_step(url: str, run: str) -> dict[str, Any] | None:
    """`step`, `time_s`, `objective` and the figures of the trainer's newest step; None before one.

    Raises:
        Unavailable: Redis cannot be reached.
    """
    client = redis_client(url)
    try:
        entries = await client.xrevrange(control.steps_key(run), count=1)
    except (RedisError, OSError) as error:
        raise away(error) from error
    finally:
        await client.aclose()
    try:
        figures: object = json.loads(entries[0][1][control.FIGURES_FIELD.encode()])
    except (IndexError, KeyError, ValueError):
        return None
    return cast("dict[str, Any]", figures) if isinstance(figures, dict) else None


async def read_server_settings(url: str) -> Mapping[str, str]:
    """`appendonly`, `appendfsync`, `maxmemory-policy`, `maxmemory`; {} where a server hides them.

    Raises:
        Unavailable: The server cannot be reached or refuses the credentials.
    """
    client = redis_client(url)
    names = ("appendonly", "appendfsync", "maxmemory-policy", "maxmemory")
    try:
        await client.ping()
        try:
            return dict(await client.config_get(*names))
        except ResponseError:
            return {}
    except (RedisError, OSError) as error:
        raise away(error) from error
    finally:
        await client.aclose()


async def read_clock_skew(url: str) -> float:
    """Seconds that the server's clock is ahead of this machine's.

    Raises:
        Unavailable: The server cannot be reached.
    """
    client = redis_client(url)
    try:
        before = time.time()
        seconds, microseconds = await client.time()
        return seconds + microseconds / 1e6 - (before + time.time()) / 2
    except (RedisError, OSError) as error:
        raise away(error) from error
    finally:
        await client.aclose()
