"""Whatever reaches Redis refuses an address that is none, and a missing redis-py, in one way."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from harness_sdk.cli.episode_stream import reading
from harness_sdk.errors import ConfigError
from harness_sdk.permits import redis_permits
from harness_sdk.redis_client import blocking_redis_client, redis_client
from rollout_service.stream import EpisodeStream
from trainer_service.stream import RedisLink


def _read(url: str) -> None:
    with reading(url, "r"):
        pass


async def _take_permits(url: str) -> None:
    async with redis_permits(url, "r"):
        pass


async def _write(url: str) -> None:
    EpisodeStream(url, "r")


async def _train(url: str) -> None:
    RedisLink(url)


async def _look(url: str) -> None:
    redis_client(url)


@pytest.mark.parametrize("use", [_look, _take_permits, _write, _train, _read])
async def test_an_address_that_is_none_is_refused_the_same_way_everywhere(
    use: Callable[[str], Any],
) -> None:
    with pytest.raises(
        ConfigError, match=r"redis\.url is no address; got .*redis://host"
    ) as caught:
        waiting = use("http://user:secret@h:1/0")
        if waiting is not None:
            await waiting
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize("use", [_look, _take_permits, _write, _train, _read])
async def test_a_tls_file_that_is_not_there_is_named_at_once(
    use: Callable[[str], Any], tmp_path: Path
) -> None:
    ca = tmp_path / "ca.pem"
    with pytest.raises(ConfigError, match=r"ssl_ca_certs of redis\.url.*ca\.pem.*No such file"):
        waiting = use(f"rediss://user:secret@h:1/0?ssl_ca_certs={ca}")
        if waiting is not None:
            await waiting
    ca.touch()
    redis_client(f"rediss://user:secret@h:1/0?ssl_ca_certs={ca}")


@pytest.mark.parametrize("client", [redis_client, blocking_redis_client])
def test_without_redis_py_the_package_to_install_is_named(
    client: Callable[[str], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("redis", "redis.asyncio"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ConfigError, match=r"redis-py.*octopus-agents\[rollout\]"):
        client("redis://h:1/0")
