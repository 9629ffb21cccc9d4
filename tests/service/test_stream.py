"""The episode stream over a real Valkey server that is killed and restarted."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from pathlib import Path
from typing import Any

import pytest
import redis.asyncio

from harness_sdk import control
from harness_sdk.cli.embedded import ValkeyServer
from harness_sdk.errors import AdapterError, ConfigError, Unavailable
from harness_sdk.record import EpisodeRecord, Node, NodeKind, record_from_bytes, record_to_bytes
from rollout_service.redis_state import read_server_settings, read_stream_state
from rollout_service.stream import EpisodeStream
from tests.valkey import embedded_valkey

RUN = "test"
KEY = control.episodes_key(RUN)


def _record(number: int, num_tokens: int = 50) -> EpisodeRecord:
    node = Node(
        node_id=0,
        parent=-1,
        thread_id="root",
        step=1,
        kind=NodeKind.TURN,
        token_ids=(1000,) * num_tokens,
        sampled=(False,) * num_tokens,
        sampled_logprobs=(),
        policy_version=0,
        position_start=0,
    )
    return EpisodeRecord(
        run=RUN, episode_id=f"episode-{number}", group_id="g", task_id="t", replica_id="r",
        nodes=(node,), threads=(), reward=1.0, answer="", stop_reason="done", opened_at_s=0.0,
        closed_at_s=1.0, mount_layers=(), model_hash="", tokenizer_hash="", template_hash="",
        engine="dry",
    )  # fmt: skip


def _connect(url: str) -> Any:
    return redis.asyncio.Redis.from_url(url, protocol=2)


async def _kill(valkey: ValkeyServer) -> None:
    assert valkey.process is not None
    os.kill(valkey.process.pid, signal.SIGKILL)
    assert await valkey.process.wait() == -signal.SIGKILL


async def _episodes(url: str) -> list[tuple[str, str]]:
    async with _connect(url) as client:
        entries = await client.xrange(KEY)
    return [
        (entry_id.decode(), record_from_bytes(fields[b"record"]).episode_id)
        for entry_id, fields in entries
    ]


async def test_killed_server_loses_no_episode(valkey: ValkeyServer) -> None:
    async with EpisodeStream(valkey.url, RUN) as stream:
        first = [await stream.write(_record(number)) for number in range(20)]
        writes = [asyncio.create_task(stream.write(_record(number))) for number in range(20, 60)]
        # Somewhere inside the burst.
        while stream.num_sent < 30:
            await asyncio.sleep(0)
        await _kill(valkey)
        late = [asyncio.create_task(stream.write(_record(number))) for number in range(60, 80)]
        await asyncio.sleep(0.2)
        assert not late[0].done()
        await valkey.start()
        entry_ids = first + await asyncio.gather(*writes, *late)
        assert stream.num_retries > 0
        assert stream.buffered_bytes == 0
    stored = await _episodes(valkey.url)
    assert {episode for _, episode in stored} == {f"episode-{number}" for number in range(80)}
    # What was acknowledged to the caller is there under the id that it was told.
    assert set(zip(entry_ids, (f"episode-{number}" for number in range(80)), strict=True)) <= set(
        stored
    )


async def test_trim_keeps_everything_that_is_not_acknowledged(valkey: ValkeyServer) -> None:
    async with (
        EpisodeStream(valkey.url, RUN, trim_every=1000) as stream,
        _connect(valkey.url) as client,
    ):
        ids = [await stream.write(_record(number)) for number in range(10)]
        assert await stream.trim() == 0
        await client.xgroup_create(KEY, "trainer", id="0")
        await client.xreadgroup("trainer", "a", {KEY: ">"}, count=6)
        await client.xack(KEY, "trainer", *ids[:2], ids[4])
        # Entry 2 is still pending: 3 to 9 stay, whatever was acknowledged after it.
        assert await stream.trim() == 2
        assert [entry_id for entry_id, _ in await _episodes(valkey.url)] == ids[2:]
        await client.xgroup_create(KEY, "slow", id="0")
        await client.xack(KEY, "trainer", ids[2], ids[3], ids[5])
        assert await stream.trim() == 0
        await client.xgroup_destroy(KEY, "slow")
        assert await stream.trim() == 3
        assert [entry_id for entry_id, _ in await _episodes(valkey.url)] == ids[5:]
        state = await read_stream_state(valkey.url, RUN)
        assert (state.length, state.pending, state.undelivered, state.dead) == (5, 0, 4, 0)


async def test_stream_trims_while_it_writes(valkey: ValkeyServer) -> None:
    async with (
        EpisodeStream(valkey.url, RUN, trim_every=5) as stream,
        _connect(valkey.url) as client,
    ):
        await client.xgroup_create(KEY, "trainer", id="0", mkstream=True)
        for number in range(20):
            entry_id = await stream.write(_record(number))
            await client.xreadgroup("trainer", "a", {KEY: ">"})
            await client.xack(KEY, "trainer", entry_id)
        assert await client.xlen(KEY) < 10


async def test_full_buffer_holds_writers_back_until_redis_returns(valkey: ValkeyServer) -> None:
    await _kill(valkey)
    async with EpisodeStream(valkey.url, RUN, max_buffered_bytes=1000) as stream:
        writes = [asyncio.create_task(stream.write(_record(number))) for number in range(40)]
        await asyncio.sleep(0.1)
        assert 0 < stream.buffered_bytes <= 1000
        # A caller that gives up takes nothing back.
        writes[0].cancel()
        writes[39].cancel()
        await valkey.start()
        await asyncio.gather(*writes[1:39])
    assert {episode for _, episode in await _episodes(valkey.url)} == {
        f"episode-{number}" for number in range(40)
    }


async def test_stream_that_closes_without_redis_sends_at_the_next_start(
    valkey: ValkeyServer, tmp_path: Path
) -> None:
    spill = tmp_path / "replica" / "unsent.records"
    await _kill(valkey)
    stream = EpisodeStream(valkey.url, RUN, spill_path=spill)
    await stream.start()
    write = asyncio.create_task(stream.write(_record(7)))
    await asyncio.sleep(0.05)
    await stream.close(grace_s=0.05)
    with pytest.raises(Unavailable, match="closed"):
        await write
    with pytest.raises(Unavailable, match="closed"):
        await stream.write(_record(8))
    assert spill.exists()
    await valkey.start()
    async with EpisodeStream(valkey.url, RUN, spill_path=spill):
        pass
    assert [episode for _, episode in await _episodes(valkey.url)] == ["episode-7"]
    assert not spill.exists()


async def test_record_that_still_becomes_bytes_is_not_lost_by_a_close(
    valkey: ValkeyServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    encoding, may_encode, loop_thread = threading.Event(), threading.Event(), threading.get_ident()

    def slow_encode(record: EpisodeRecord) -> bytes:
        assert threading.get_ident() != loop_thread, "encoded off the loop"
        encoding.set()
        assert may_encode.wait(5)
        return record_to_bytes(record)

    monkeypatch.setattr("rollout_service.stream.record_to_bytes", slow_encode)
    stream = EpisodeStream(valkey.url, RUN)
    await stream.start()
    write = asyncio.create_task(stream.write(_record(7)))
    await asyncio.to_thread(encoding.wait, 5)
    closing = asyncio.create_task(stream.close())
    await asyncio.sleep(0.05)
    assert not closing.done()
    may_encode.set()
    await closing
    assert await _episodes(valkey.url) == [(await write, "episode-7")]


async def test_stream_closes_though_a_send_swallows_its_cancellation(
    valkey: ValkeyServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stream = EpisodeStream(valkey.url, RUN, spill_path=tmp_path / "unsent.records")
    await stream.start()
    add, adding = stream._client.xadd, asyncio.Event()

    async def swallowing_add(*args: Any) -> Any:
        adding.set()
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            return await add(*args)

    monkeypatch.setattr(stream._client, "xadd", swallowing_add)
    write = asyncio.create_task(stream.write(_record(7)))
    await adding.wait()
    async with asyncio.timeout(5):
        await stream.close(grace_s=0)
    with pytest.raises(Unavailable):
        await write
    assert (tmp_path / "unsent.records").exists(), "sent twice rather than never"


async def test_adapter_chunks_are_written_to_the_folder(
    valkey: ValkeyServer, tmp_path: Path
) -> None:
    data = os.urandom(2 * control.ADAPTER_CHUNK_BYTES + 17)
    size = control.ADAPTER_CHUNK_BYTES
    chunks = [data[start : start + size] for start in range(0, len(data), size)]
    async with (
        EpisodeStream(valkey.url, RUN) as stream,
        _connect(valkey.url) as client,
    ):
        with pytest.raises(AdapterError, match="not in Redis"):
            await stream.fetch_adapter(3, tmp_path, max_bytes=len(data))
        for index, chunk in enumerate(chunks):
            await client.set(control.adapter_chunk_key(RUN, 3, index), chunk)
        meta = {"num_chunks": 3, "num_bytes": len(data), "sha256": "", "config": "{}"}
        await client.hset(control.adapter_meta_key(RUN, 3), mapping=meta)
        await stream.fetch_adapter(3, tmp_path, max_bytes=len(data))
        assert (tmp_path / control.ADAPTER_FILE).read_bytes() == data
        assert (tmp_path / control.ADAPTER_CONFIG_FILE).read_text() == "{}"
        with pytest.raises(AdapterError, match="too large"):
            await stream.fetch_adapter(3, tmp_path, max_bytes=len(data) - 1)
        meta_key = control.adapter_meta_key(RUN, 3)
        await client.hset(meta_key, "config", b" " * (control.MAX_ADAPTER_CONFIG_BYTES + 1))
        with pytest.raises(AdapterError, match=r"adapter_config\.json of adapter 3 is too large"):
            await stream.fetch_adapter(3, tmp_path, max_bytes=len(data))
        await client.hset(meta_key, mapping={"config": "{}", "num_chunks": "many"})
        with pytest.raises(AdapterError, match="no number"):
            await stream.fetch_adapter(3, tmp_path, max_bytes=len(data))
        await client.hset(meta_key, "num_chunks", 10**12)
        await client.append(control.adapter_chunk_key(RUN, 3, 2), b"more")
        with pytest.raises(AdapterError, match="not whole"):
            await stream.fetch_adapter(3, tmp_path, max_bytes=len(data))
        await client.delete(control.adapter_chunk_key(RUN, 3, 1))
        with pytest.raises(AdapterError, match="not whole"):
            await stream.fetch_adapter(3, tmp_path, max_bytes=len(data))


async def test_embedded_server_is_durable_and_alone_on_its_folder(tmp_path: Path) -> None:
    async with embedded_valkey(tmp_path) as url:
        assert await read_server_settings(url) == {
            "appendonly": "yes", "appendfsync": "always", "maxmemory-policy": "noeviction",
            "maxmemory": "0",
        }  # fmt: skip
        with pytest.raises(ConfigError, match="another embedded Valkey"):
            async with embedded_valkey(tmp_path):
                pass
    with pytest.raises(Unavailable, match="cannot be reached"):
        await read_server_settings(url)


async def test_wrong_credentials_are_refused_at_the_start(valkey: ValkeyServer) -> None:
    async with _connect(valkey.url) as client:
        await client.config_set("requirepass", "right")
        with pytest.raises(ConfigError, match="credentials"):
            await EpisodeStream(valkey.url.replace("//", "//:wrong@"), RUN).start()
