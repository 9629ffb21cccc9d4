"""The trainer's side of the stream, on a real Valkey server."""

from __future__ import annotations

import asyncio
import functools
import hashlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from harness_sdk import control
from harness_sdk.cli.embedded import ValkeyServer
from harness_sdk.errors import ServiceError, Unavailable
from harness_sdk.record import record_from_bytes, record_to_bytes
from rollout_service.redis_state import read_stream_state
from tests.records import small_record
from trainer_service.feed import NUM_READ, StreamFeed
from trainer_service.groups import GroupAssembler
from trainer_service.origin import Origin, RefusedRecord
from trainer_service.parsing import parse_record
from trainer_service.run_keys import (
    delete_adapter,
    grant_permits,
    permits,
    send_figures,
    upload_adapter,
    withhold_permits,
)
from trainer_service.stream import (
    MAX_DEAD,
    EpisodeStream,
    RedisLink,
)

RUN = "r"
KEY = control.episodes_key(RUN)


@pytest.fixture
async def link(valkey: ValkeyServer) -> AsyncIterator[RedisLink]:
    link = RedisLink(valkey.url, patience_s=20.0)
    yield link
    await link.close()


@asynccontextmanager
async def _other_link(valkey: ValkeyServer) -> AsyncIterator[RedisLink]:
    """The connection of another process."""
    link = RedisLink(valkey.url)
    try:
        yield link
    finally:
        await link.close()


async def _add(link: RedisLink, *episode_ids: str) -> list[str]:
    ids = []
    for episode_id in episode_ids:
        fields = {control.RECORD_FIELD: record_to_bytes(small_record(episode_id))}
        ids.append((await link.client.xadd(KEY, fields)).decode())
    return ids


async def _read(stream: EpisodeStream, count: int = 32) -> list[str]:
    deliveries = await stream.read(max_entries=count, block_s=0.05)
    return [delivery.record.episode_id for delivery in deliveries]


async def _num_pending(link: RedisLink) -> int:
    return (await link.client.xpending(KEY, "trainer"))["pending"]


def _stream(link: RedisLink, **options: Any) -> EpisodeStream:
    return EpisodeStream(link, RUN, **options)


async def test_stream_delivers_each_episode_once_and_in_order(link: RedisLink) -> None:
    await _add(link, "a", "b", "c")
    stream = _stream(link)
    await stream.open()
    assert await _read(stream, 2) == ["a", "b"]
    assert await _read(stream) == ["c"]
    assert await _read(stream) == []
    assert await _num_pending(link) == 3


async def test_unacknowledged_entries_come_again_after_a_restart(
    valkey: ValkeyServer, link: RedisLink
) -> None:
    ids = await _add(link, "a", "b", "c")
    first = _stream(link)
    await first.open()
    assert await _read(first) == ["a", "b", "c"]
    await first.acknowledge(ids[:1])
    async with _other_link(valkey) as restarted:
        second = _stream(restarted)
        await second.open()
        assert await _read(second) == ["b", "c"]
        assert await _read(second) == []


async def test_entries_in_the_checkpoint_are_acknowledged_without_training(
    valkey: ValkeyServer, link: RedisLink
) -> None:
    ids = await _add(link, "a", "b")
    first = _stream(link)
    await first.open()
    await _read(first)
    recent = first.recent_episodes(ids[:1])
    async with _other_link(valkey) as restarted:
        second = _stream(restarted)
        await second.open(consumed=ids[:1], recent=recent)
        assert await _read(second) == ["b"]
        assert await _num_pending(restarted) == 1
        # The same episode under another entry, as a retried XADD leaves one behind.
        await _add(restarted, "a")
        assert await _read(second) == []
        assert second.dropped == {"duplicate": 1}


async def test_duplicates_are_dropped_while_the_first_is_in_use(link: RedisLink) -> None:
    await _add(link, "a", "a", "b")
    stream = _stream(link)
    await stream.open()
    assert await _read(stream) == ["a", "b"]
    assert stream.dropped == {"duplicate": 1}
    assert await _num_pending(link) == 2


async def test_stale_entries_of_a_dead_consumer_are_claimed(
    valkey: ValkeyServer, link: RedisLink
) -> None:
    await _add(link, "a", "b")
    async with _other_link(valkey) as other:
        dead = _stream(other, consumer="trainer-dead")
        await dead.open()
        assert await _read(dead) == ["a", "b"]
    stream = _stream(link, claim_idle_s=0.3)
    await stream.open()
    assert await _read(stream) == []
    await asyncio.sleep(0.35)
    assert await _read(stream) == ["a", "b"]
    await asyncio.sleep(0.35)
    assert await _read(stream) == []


async def test_poison_moves_aside_at_the_third_failure_and_the_rest_goes_on(
    valkey: ValkeyServer, link: RedisLink
) -> None:
    (poison,) = [(await link.client.xadd(KEY, {control.RECORD_FIELD: b"\xff\xff"})).decode()]
    await _add(link, "a")
    stream = _stream(link)
    await stream.open()
    assert await _read(stream) == ["a"]
    assert await link.client.xlen(control.dead_key(RUN)) == 0
    # The count of attempts is the server's: a restart does not begin anew.
    async with _other_link(valkey) as restarted:
        second = _stream(restarted)
        await second.open()
        assert await _read(second) == ["a"]
        assert await link.client.xlen(control.dead_key(RUN)) == 0
        assert await _read(second) == []
        assert second.dropped == {"poison": 1}
    ((_, fields),) = await link.client.xrange(control.dead_key(RUN))
    assert fields[b"entry_id"].decode() == poison
    assert fields[control.RECORD_FIELD.encode()] == b"\xff\xff"
    assert b"ProtocolError" in fields[b"error"]
    assert await _num_pending(link) == 1


async def test_record_that_parses_and_makes_no_sense_is_poison_too(link: RedisLink) -> None:
    def refuse(data: bytes) -> Any:
        raise ValueError("mounts nothing")

    await _add(link, "a")
    stream = _stream(link, parse=refuse)
    await stream.open()
    for _ in range(3):
        assert await _read(stream) == []
    ((_, fields),) = await link.client.xrange(control.dead_key(RUN))
    assert fields[b"error"] == b"ValueError: mounts nothing"


async def test_record_of_another_tokenizer_moves_aside_at_once_with_what_to_do(
    valkey: ValkeyServer, link: RedisLink
) -> None:
    parse = functools.partial(parse_record, origin=Origin({"a" * 64}))
    hashes = {"first": "a" * 64, "other": "b" * 64, "last": "a" * 64}
    for episode_id, tokenizer in hashes.items():
        record = replace(small_record(episode_id), tokenizer_hash=tokenizer)
        await link.client.xadd(KEY, {control.RECORD_FIELD: record_to_bytes(record)})
    stream = _stream(link, parse=parse)
    await stream.open()
    assert await _read(stream) == ["first", "last"]
    assert stream.dropped == {"other_tokenizer": 1}
    ((_, fields),) = await link.client.xrange(control.dead_key(RUN))
    error = fields[b"error"].decode()
    assert error.startswith("RefusedRecord: episode other was made with another tokenizer; got bb")
    assert "allowed: aa" in error
    assert "the same model folder" in error
    assert record_from_bytes(fields[control.RECORD_FIELD.encode()]).episode_id == "other"
    assert await _num_pending(link) == 2
    # It is done with: a restarted trainer does not meet it again.
    async with _other_link(valkey) as restarted:
        second = _stream(restarted, parse=parse)
        await second.open()
        assert await _read(second) == ["first", "last"]
        assert second.dropped == {}


async def test_dead_stream_keeps_the_newest_and_counts_the_others(
    valkey: ValkeyServer, link: RedisLink, caplog: pytest.LogCaptureFixture
) -> None:
    num_bad = MAX_DEAD + 250
    async with link.client.pipeline(transaction=False) as pipe:
        for number in range(num_bad):
            pipe.xadd(KEY, {control.RECORD_FIELD: f"bad {number}"})
        await pipe.execute()

    def refuse(data: bytes) -> Any:
        raise RefusedRecord(f"{data!r} is of no use", cause="other_tokenizer")

    stream = _stream(link, parse=refuse)
    await stream.open()
    while stream.dropped["other_tokenizer"] < num_bad:
        assert await _read(stream) == []
    kept = await link.client.xrange(control.dead_key(RUN))
    assert MAX_DEAD <= len(kept) <= MAX_DEAD + 100
    assert kept[-1][1][control.RECORD_FIELD.encode()] == f"bad {num_bad - 1}".encode()
    assert stream.num_dead_trimmed == num_bad - len(kept)
    state = await read_stream_state(valkey.url, RUN)
    assert (state.dead, state.dead_trimmed) == (len(kept), num_bad - len(kept))
    assert caplog.text.count("keeps its newest") == 1
    # The count is the server's: a restarted trainer goes on from it.
    async with _other_link(valkey) as restarted:
        second = _stream(restarted, parse=refuse)
        await second.open()
        await link.client.xadd(KEY, {control.RECORD_FIELD: b"one more"})
        assert await _read(second) == []
        assert second.num_dead_trimmed + await link.client.xlen(control.dead_key(RUN)) == (
            num_bad + 1
        )


async def test_redis_restart_loses_nothing(valkey: ValkeyServer, link: RedisLink) -> None:
    ids = await _add(link, "a", "b", "c")
    stream = _stream(link)
    await stream.open()
    assert await _read(stream, 1) == ["a"]
    assert valkey.process is not None
    valkey.process.kill()
    await valkey.process.wait()
    reading = asyncio.create_task(_read(stream))
    await asyncio.sleep(0.3)
    assert not reading.done()
    await valkey.start()
    seen = await reading
    while more := await _read(stream):
        seen += more
    assert seen == ["b", "c"]
    await stream.acknowledge(ids)
    assert await _num_pending(link) == 0


async def test_reply_lost_with_its_connection_is_delivered_after_all(link: RedisLink) -> None:
    """The server believes that it delivered; only the consumer's own pending list knows."""
    await _add(link, "a", "b")
    stream = _stream(link)
    await stream.open()
    assert await _read(stream, 1) == ["a"]
    await link.client.xreadgroup("trainer", "trainer-0", {KEY: ">"}, count=10)
    assert await _read(stream) == []
    link.reconnects += 1
    assert await _read(stream) == ["b"]


async def test_reader_that_swallows_its_cancellation_stops(link: RedisLink) -> None:
    async def swallowing() -> None:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            return

    async def read() -> None:
        while True:
            await link.call(swallowing)

    reading = asyncio.create_task(read())
    await asyncio.sleep(0)
    reading.cancel()
    async with asyncio.timeout(5):
        with pytest.raises(asyncio.CancelledError):
            await reading


def _feed(link: RedisLink, groups: GroupAssembler, **options: Any) -> StreamFeed:
    async def ignore(number: int) -> None:
        del number

    async def nothing() -> None:
        pass

    ignoring = {"on_dropped": nothing, "idle_s": 60.0, "on_idle": ignore, "on_wait": nothing}
    return StreamFeed(_stream(link), groups, num_groups=1, state={}, **{**ignoring, **options})


async def test_group_that_is_whole_by_the_end_of_a_long_step_is_in_time(link: RedisLink) -> None:
    groups = GroupAssembler(group_size=2, min_group=2, deadline_s=0.2, max_policy_lag=None)
    feed = _feed(link, groups)
    await feed.open()
    await _add(link, "a")
    assert await feed.next(0, lambda: groups.num_open > 0) is None
    # The other half of the group comes while a step takes longer than the deadline.
    await _add(link, "b")
    await asyncio.sleep(0.25)
    batch = await feed.next(0, lambda: False)
    assert batch is not None
    assert [episode.record.episode_id for episode in batch.episodes] == ["a", "b"]


async def test_dropped_entries_hide_none_that_came_in_time(link: RedisLink) -> None:
    groups = GroupAssembler(group_size=2, min_group=2, deadline_s=0.2, max_policy_lag=None)
    feed = _feed(link, groups)
    await feed.open()
    await _add(link, "a")
    assert await feed.next(0, lambda: groups.num_open > 0) is None
    await _add(link, *["a"] * NUM_READ, "b")
    await asyncio.sleep(0.25)
    async with asyncio.timeout(10):
        batch = await feed.next(0, lambda: False)
    assert batch is not None
    assert [episode.record.episode_id for episode in batch.episodes] == ["a", "b"]
    assert feed.dropped() == {"duplicate": NUM_READ}


async def test_long_step_is_no_silence_of_the_stream(link: RedisLink) -> None:
    idle: list[int] = []

    async def on_idle(num_waiting: int) -> None:
        idle.append(num_waiting)

    groups = GroupAssembler(group_size=2, min_group=2, deadline_s=1.2, max_policy_lag=None)
    feed = _feed(link, groups, idle_s=1.2, on_idle=on_idle)
    await feed.open()
    await asyncio.sleep(1.3)
    await feed.catch_up()
    await feed.gather()
    assert idle == []


async def test_server_that_stays_away_is_reported_with_its_remedy(valkey: ValkeyServer) -> None:
    await valkey.stop()
    link = RedisLink(valkey.url, patience_s=0.2)
    with pytest.raises(Unavailable, match=r"redis\.url"):
        await _stream(link).open()
    await link.close()


async def test_server_that_lost_its_data_is_joined_anew(link: RedisLink) -> None:
    ids = await _add(link, "a")
    stream = _stream(link, claim_idle_s=0.01)
    await stream.open()
    assert await _read(stream) == ["a"]
    await link.client.flushall()
    await asyncio.sleep(0.02)
    assert await _read(stream) == []
    await link.client.flushall()
    link.reconnects += 1
    await _add(link, "b")
    assert await _read(stream) == ["b"]
    await stream.acknowledge(ids)


async def test_entry_held_when_its_group_is_lost_stays_pending_until_it_is_trained(
    valkey: ValkeyServer, link: RedisLink
) -> None:
    ids = await _add(link, "a")
    stream = _stream(link)
    await stream.open()
    assert await _read(stream) == ["a"]
    await link.client.xgroup_destroy(KEY, "trainer")
    assert await _read(stream) == []
    assert not stream.dropped
    async with _other_link(valkey) as restarted:
        second = _stream(restarted)
        await second.open()
        assert await _read(second) == ["a"]
    await stream.acknowledge(ids)
    assert await _num_pending(link) == 0


async def test_bad_entry_is_moved_aside_once_though_a_connection_was_lost(link: RedisLink) -> None:
    await link.client.xadd(KEY, {control.RECORD_FIELD: b"bad"})
    stream = _stream(link)
    await stream.open()
    assert await _read(stream) == []
    assert await _read(stream) == []
    link.reconnects += 1
    assert await _read(stream) == []
    assert stream.dropped == {"poison": 1}
    assert await link.client.xlen(control.dead_key(RUN)) == 1


async def test_command_that_redis_refuses_is_an_error_of_ours(link: RedisLink) -> None:
    await link.client.set("text", "x")
    with pytest.raises(ServiceError, match=r"ResponseError.*doctor"):
        await link.call(lambda: link.client.incr("text"))


async def test_upload_waits_for_memory_and_says_so_where_none_comes(
    valkey: ValkeyServer, link: RedisLink, tmp_path: Path
) -> None:
    (tmp_path / control.ADAPTER_FILE).write_bytes(bytes(control.ADAPTER_CHUNK_BYTES))
    (tmp_path / control.ADAPTER_CONFIG_FILE).write_text("{}")
    await link.client.config_set("maxmemory", "1mb")
    impatient = RedisLink(valkey.url, patience_s=0.1)
    with pytest.raises(ServiceError, match=r"memory limit.*raise its maxmemory"):
        await upload_adapter(impatient, RUN, 1, tmp_path)
    await impatient.close()
    uploading = asyncio.create_task(upload_adapter(link, RUN, 1, tmp_path))
    await asyncio.sleep(0.2)
    assert not uploading.done()
    await link.client.config_set("maxmemory", "0")
    await uploading


async def test_permits_only_rise_and_wake_the_runner(link: RedisLink) -> None:
    await grant_permits(link, RUN, 4, 8)
    await link.client.hincrby(control.permits_key(RUN), "taken", 3)
    await grant_permits(link, RUN, 2, 6)
    assert await permits(link, RUN) == (4, 3)
    assert int(await link.client.hget(control.permits_key(RUN), "group_size")) == 6
    for granted in range(5, 40):
        await grant_permits(link, RUN, granted, 6)
    assert await permits(link, RUN) == (39, 3)
    assert await link.client.blpop([control.permits_wake_key(RUN)], timeout=1) is not None
    assert await link.client.llen(control.permits_wake_key(RUN)) <= 16


async def test_permits_that_nobody_took_are_withheld_until_the_next_grant(link: RedisLink) -> None:
    await withhold_permits(link, RUN)
    assert await permits(link, RUN) == (0, 0)
    await grant_permits(link, RUN, 5, 8)
    await link.client.hincrby(control.permits_key(RUN), "taken", 3)
    await withhold_permits(link, RUN)
    assert await permits(link, RUN) == (3, 3)
    # A runner that has just counted itself in, and will find that it may not.
    await link.client.hincrby(control.permits_key(RUN), "taken", 1)
    await withhold_permits(link, RUN)
    assert await permits(link, RUN) == (3, 4)
    await grant_permits(link, RUN, 5, 8)
    assert await permits(link, RUN) == (5, 4)


async def test_adapter_travels_in_chunks_and_is_deleted_whole(
    link: RedisLink, tmp_path: Path
) -> None:
    data = bytes(range(256)) * (control.ADAPTER_CHUNK_BYTES // 100)
    (tmp_path / control.ADAPTER_FILE).write_bytes(data)
    (tmp_path / control.ADAPTER_CONFIG_FILE).write_text('{"r": 4}')
    assert await upload_adapter(link, RUN, 7, tmp_path) == f"redis:{control.adapter_key(RUN, 7)}"
    meta = await link.client.hgetall(control.adapter_meta_key(RUN, 7))
    assert int(meta[b"num_chunks"]) == 3
    assert int(meta[b"num_bytes"]) == len(data)
    assert meta[b"sha256"].decode() == hashlib.sha256(data).hexdigest()
    assert meta[b"config"] == b'{"r": 4}'
    chunks = [await link.client.get(control.adapter_chunk_key(RUN, 7, i)) for i in range(3)]
    assert b"".join(chunks) == data
    await delete_adapter(link, RUN, 7)
    assert await link.client.keys("*adapter*") == []


async def test_figures_of_steps_stay_in_order_and_outlive_a_restart(
    valkey: ValkeyServer, link: RedisLink
) -> None:
    await send_figures(link, RUN, '{"step": 1}')
    await valkey.stop()
    sending = asyncio.create_task(send_figures(link, RUN, '{"step": 2}'))
    await valkey.start()
    await sending
    entries = await link.client.xrange(control.steps_key(RUN))
    assert [fields[b"figures"] for _, fields in entries] == [b'{"step": 1}', b'{"step": 2}']
