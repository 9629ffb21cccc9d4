"""How this service, and commands that look on, reach Redis, and what they say where they cannot."""

from __future__ import annotations

from typing import Any

import redis.asyncio
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff

from harness_sdk.errors import ConfigError, Unavailable
from harness_sdk.masking import masked_url


def redis_client(url: str, *, timeout_s: float = 30.0) -> Any:
    """A client that gives up at once; it connects with its first command.

    Args:
        url: `redis://` or `rediss://` address.
        timeout_s: Longest wait for an answer.

    Raises:
        ConfigError: `url` is no address.
    """
    try:
        # Retries are the callers': each is logged and bounded by what its call can bear.
        return redis.asyncio.Redis.from_url(
            url,
            protocol=2,
            retry=Retry(NoBackoff(), 0),
            socket_timeout=timeout_s,
            socket_connect_timeout=5,
        )
    except ValueError as error:
        raise ConfigError(
            "redis.url is no address",
            value=masked_url(url),
            limit="redis://host:port/db",
            remedy=str(error),
        ) from error


def away(error: Exception) -> Unavailable:
    """The error of a server that cannot be reached, or refuses us."""
    return Unavailable("Redis cannot be reached", value=error, remedy="start it or correct its URL")
