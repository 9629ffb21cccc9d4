"""The stream where there is no room: Redis at its memory limit, the replica's own disk full."""

from __future__ import annotations

import asyncio
import logging
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import redis.asyncio
import redis.exceptions

from harness_sdk import control
from harness_sdk.cli.embedded import ValkeyServer
from harness_sdk.errors import Unavailable
from harness_sdk.records_file import read_records
from rollout_service.stream import EpisodeStream
from tests.records import small_record

RUN = "full"
KEY = control.episodes_key(RUN)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 64 KiB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=64k", "none", str(folder)]
    if os.geteuid() != 0 or subprocess.run(command, check=False, capture_output=True).returncode:
        pytest.skip("mounting a small file system needs root")
    try:
        yield folder
    finally:
        subprocess.run(["umount", str(folder)], check=True)


def _connect(url: str) -> Any:
    return redis.asyncio.Redis.from_url(url, protocol=2)


async def test_acknowledged_entries_make_room_where_redis_is_full(valkey: ValkeyServer) -> None:
    """The limit is reached by what nobody needs any more; without a send nothing else trims it."""
    tokens = tuple(range(1000, 21_000))
    async with (
        EpisodeStream(valkey.url, RUN, trim_every=10**9) as stream,
        _connect(valkey.url) as client,
    ):
        await client.xgroup_create(KEY, "trainer", id="0", mkstream=True)
        for number in range(20):
            await stream.write(small_record(f"e{number}", token_ids=tokens))
        entries = (await client.xreadgroup("trainer", "a", {KEY: ">"}))[0][1]
        used = (await client.info("memory"))["used_memory"]
        await client.config_set("maxmemory", used)
        late = asyncio.create_task(stream.write(small_record("late", token_ids=tokens)))
        while not stream.num_retries:
            await asyncio.sleep(0.01)
        # All of it is still needed: the writer waits, and nothing is dropped.
        assert not late.done() and await client.xlen(KEY) == 20
        await client.xack(KEY, "trainer", *(entry for entry, _ in entries))
        async with asyncio.timeout(10):
            entry_id = await late
        left = [entry.decode() for entry, _ in await client.xrange(KEY)]
        assert entry_id in left and len(left) < 21


async def test_acknowledged_entries_make_room_where_nobody_sends(
    valkey: ValkeyServer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Runs wait for permits, and the trainer for memory to store the version behind which they
    come."""
    monkeypatch.setattr("rollout_service.stream._IDLE_S", 0.02)
    async with (
        EpisodeStream(valkey.url, RUN, trim_every=10**9) as stream,
        _connect(valkey.url) as client,
    ):
        # There is no stream yet.
        assert await stream.trim() == 0
        await stream.write(small_record("e0", token_ids=tuple(range(1000, 51_000))))
        await stream.write(small_record("e1"))
        await client.xgroup_create(KEY, "trainer", id="0")
        entries = (await client.xreadgroup("trainer", "a", {KEY: ">"}))[0][1]
        await client.config_set("maxmemory", (await client.info("memory"))["used_memory"])
        with pytest.raises(redis.exceptions.OutOfMemoryError):
            await client.set("adapter", b"x" * 100_000)
        await client.xack(KEY, "trainer", *(entry for entry, _ in entries))
        async with asyncio.timeout(10):
            while await client.xlen(KEY) > 1:
                await asyncio.sleep(0.01)
        await client.set("adapter", b"x" * 100_000)
    assert "cannot trim" not in caplog.text


async def test_writers_wait_while_redis_is_full_and_lose_nothing(valkey: ValkeyServer) -> None:
    async with (
        EpisodeStream(valkey.url, RUN, max_buffered_bytes=5000) as stream,
        _connect(valkey.url) as client,
    ):
        await client.config_set("maxmemory", 1)
        writes = [asyncio.create_task(stream.write(small_record(f"e{n}"))) for n in range(100)]
        while not stream.num_retries:
            await asyncio.sleep(0.01)
        # Closing waits: that is the back-pressure on whoever runs episodes.
        assert not any(write.done() for write in writes)
        assert 0 < stream.buffered_bytes <= 5000
        await client.config_set("maxmemory", 0)
        entries = await asyncio.gather(*writes)
        assert len(set(entries)) == await client.xlen(KEY) == 100


async def test_stop_on_a_full_disk_is_told_and_ends(
    valkey: ValkeyServer, small_disk: Path, caplog: pytest.LogCaptureFixture
) -> None:
    spill = small_disk / "unsent.records"
    async with _connect(valkey.url) as client:
        await client.config_set("maxmemory", 1)
    stream = EpisodeStream(valkey.url, RUN, spill_path=spill)
    await stream.start()
    tokens = tuple(range(1000, 31_000))
    writes = [
        asyncio.create_task(stream.write(small_record(f"e{number}", token_ids=tokens)))
        for number in range(3)
    ]
    while not stream.num_retries:
        await asyncio.sleep(0.01)
    with caplog.at_level(logging.CRITICAL):
        async with asyncio.timeout(5):
            await stream.close(grace_s=0.05)
    for write in writes:
        with pytest.raises(Unavailable):
            await write
    assert "3 episodes are lost" in caplog.text and "make room there" in caplog.text
    # Half a file would end the next start.
    assert not list(small_disk.iterdir())


async def test_stop_on_a_disk_with_room_keeps_them(valkey: ValkeyServer, small_disk: Path) -> None:
    spill = small_disk / "unsent.records"
    async with _connect(valkey.url) as client:
        await client.config_set("maxmemory", 1)
    stream = EpisodeStream(valkey.url, RUN, spill_path=spill)
    await stream.start()
    write = asyncio.create_task(stream.write(small_record("kept")))
    while not stream.num_retries:
        await asyncio.sleep(0.01)
    await stream.close(grace_s=0.05)
    with pytest.raises(Unavailable):
        await write
    assert [record.episode_id for record in read_records(spill)] == ["kept"]
