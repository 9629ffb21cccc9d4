"""How everything here reaches Redis, and what it says where it cannot; redis is imported on use."""

from __future__ import annotations

import importlib
from typing import Any
from urllib.parse import parse_qsl

from harness_sdk.errors import ConfigError, Unavailable
from harness_sdk.masking import masked_url


def redis_client(url: str, *, timeout_s: float = 30.0, decode: bool = False) -> Any:
    """An asyncio client that gives up at once; it connects with its first command.

    Args:
        url: `redis://` or `rediss://` address.
        timeout_s: Longest wait for an answer.
        decode: Answers are text in place of bytes.

    Raises:
        ConfigError: redis-py is not installed, `url` is no address, or names a TLS file that
            cannot be used.
    """
    return _client("redis.asyncio", url, timeout_s, decode=decode)


def blocking_redis_client(url: str, *, timeout_s: float = 30.0) -> Any:
    """`redis_client` for code without an event loop."""
    return _client("redis", url, timeout_s, decode=False)


def away(error: Exception) -> Unavailable:
    """The error of a server that cannot be reached, or refuses us."""
    return Unavailable("Redis cannot be reached", value=error, remedy="start it or correct its URL")


def _check_tls_files(url: str) -> None:
    # redis-py opens them with each connection: a wrong name would look like a server that is away.
    for name, file in parse_qsl(url.partition("?")[2]):
        if name in ("ssl_ca_certs", "ssl_certfile", "ssl_keyfile"):
            try:
                open(file, "rb").close()
            except OSError as error:
                raise ConfigError(
                    f"{name} of redis.url cannot be read",
                    value=file,
                    remedy=f"correct it: {error.strerror}",
                ) from error


def _client(package: str, url: str, timeout_s: float, *, decode: bool) -> Any:
    try:
        redis: Any = importlib.import_module(package)
        retry: Any = importlib.import_module(f"{package}.retry")
        backoff: Any = importlib.import_module("redis.backoff")
    except ImportError as error:
        raise ConfigError(
            "Redis is reached through redis-py, which is not installed",
            value=masked_url(url),
            remedy="pip install 'octopus-agents[rollout]'",
        ) from error
    _check_tls_files(url)
    try:
        # Retries are the callers': each is logged and bounded by what its call can bear.
        return redis.Redis.from_url(
            url,
            protocol=2,
            retry=retry.Retry(backoff.NoBackoff(), 0),
            socket_timeout=timeout_s,
            socket_connect_timeout=5,
            decode_responses=decode,
        )
    except ValueError as error:
        raise ConfigError(
            "redis.url is no address",
            value=masked_url(url),
            limit="redis://host:port/db",
            remedy=str(error),
        ) from error
