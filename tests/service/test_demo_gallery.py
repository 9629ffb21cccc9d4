"""The gallery over a real Valkey: it ends when asked to, and outlives a restart of the server."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
import redis.asyncio

from harness_sdk.cli.demo.gallery import Gallery
from harness_sdk.cli.embedded import ValkeyServer
from harness_sdk.control import RECORD_FIELD, episodes_key

RUN = "gallery"


@pytest.fixture
def kept(monkeypatch: pytest.MonkeyPatch) -> asyncio.Queue[bytes]:
    """What reached the gallery."""
    found: asyncio.Queue[bytes] = asyncio.Queue()
    monkeypatch.setattr(Gallery, "keep", lambda _, data: found.put_nowait(data))
    return found


async def send(valkey: ValkeyServer, data: bytes) -> None:
    async with redis.asyncio.Redis.from_url(valkey.url) as client:
        await client.xadd(episodes_key(RUN), {RECORD_FIELD: data})


async def test_gallery_ends_though_its_read_swallows_the_cancellation(
    valkey: ValkeyServer, kept: asyncio.Queue[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As `asyncio.wait_for` of Python 3.11 does when a result comes in the same moment."""
    xread = redis.asyncio.Redis.xread
    num_swallowed = 0

    async def swallowing(*args: Any, **kwargs: Any) -> Any:
        nonlocal num_swallowed
        try:
            return await xread(*args, **kwargs)
        except asyncio.CancelledError:
            num_swallowed += 1
            return []

    monkeypatch.setattr(redis.asyncio.Redis, "xread", swallowing)
    async with asyncio.timeout(10):
        async with Gallery().collect(valkey.url, RUN):
            await send(valkey, b"one")
            assert await kept.get() == b"one"
            # By now it waits for the next one.
            await asyncio.sleep(0.1)
    assert num_swallowed == 1


async def test_gallery_goes_on_after_a_restart(
    valkey: ValkeyServer, kept: asyncio.Queue[bytes]
) -> None:
    async with asyncio.timeout(30), Gallery().collect(valkey.url, RUN):
        await send(valkey, b"before")
        assert await kept.get() == b"before"
        assert valkey.process is not None
        valkey.process.kill()
        await valkey.process.wait()
        await valkey.start()
        await send(valkey, b"after")
        assert await kept.get() == b"after"
