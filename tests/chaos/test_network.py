"""A cut link, a relay with latency, stalls and resets, half-open connections, and bad clients."""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import grpc
import pytest

from harness_sdk import OctopusClient, SamplingOptions
from harness_sdk.errors import HarnessError
from harness_sdk.options import Timeouts
from harness_sdk.rpc.v1 import rollout_pb2 as pb
from rollout_service.sessions import SessionOptions
from tests.chaos.agents import CALL_S, TIMEOUTS, Played, play_until
from tests.chaos.network import Host, Link, Relay, Weather, host_behind, why_no_link
from tests.fuzz.dice import DiceEngine
from tests.service.served import Served, served

BAD = Weather(delay_s=0.2, stall_rate=0.02, stall_s=1.5, reset_rate=0.01)
FAIR = replace(BAD, delay_s=0.03)
WITHIN_S = 8.0
"""A client that is gone is noticed in 4 s, and its episodes are closed in 5."""


@pytest.fixture
async def running() -> AsyncIterator[Served]:
    async with served(DiceEngine(0)) as running:
        yield running


async def _settled(running: Served) -> None:
    """Nothing is open or resident any more, before long."""
    async with asyncio.timeout(WITHIN_S):
        while running.sessions.status().open_episodes or running.engine.stats().resident_cursors:
            await asyncio.sleep(0.02)


def _check_records(played: Played, records: list[tuple[str, str]], opened: float) -> None:
    """One record of each opened episode, and each that the agent was told of under its entry."""
    assert len(records) == len({episode for episode, _ in records}) == opened
    assert played.closed.items() <= dict(records).items()


# The link


async def _until_settled(host: Host) -> dict[str, object]:
    async with asyncio.timeout(WITHIN_S):
        while (told := await host.tell())["open"] or told["resident"]:
            await asyncio.sleep(0.05)
    return told


async def _play_through_a_cut(folder: Path, cut_s: float, num_clients: int) -> Played:
    """Clients here, services there; the link is cut in the middle for `cut_s` seconds."""
    reason = await asyncio.to_thread(why_no_link)
    if reason:
        pytest.skip(reason)
    played, is_over = Played(), asyncio.Event()
    with Link() as link:
        async with host_behind(link, folder) as host, contextlib.AsyncExitStack() as stack:
            clients = [
                await stack.enter_async_context(
                    OctopusClient.connect(host.address, timeouts=TIMEOUTS)
                )
                for _ in range(num_clients)
            ]
            async with asyncio.TaskGroup() as tasks:
                for client in clients:
                    tasks.create_task(play_until(client, played, is_over.is_set))
                async with asyncio.timeout(WITHIN_S):
                    while not played.closed:
                        await asyncio.sleep(0.05)
                assert not played.failed
                link.cut()
                await asyncio.sleep(cut_s)
                link.mend()
                mended = time.monotonic()
                # However often gRPC's connections still fail: soon they do no more.
                async with asyncio.timeout(2 * CALL_S + 10.0):
                    while not played.closed_at_s or played.closed_at_s[-1] < mended:
                        await asyncio.sleep(0.05)
                await asyncio.sleep(0.3)
                is_over.set()
            told = await _until_settled(host)
            records = [(episode, entry) for episode, entry, _ in told["records"]]  # type: ignore[attr-defined]
            _check_records(played, records, told["opened"])  # type: ignore[arg-type]
    return played


async def test_a_short_cut_of_the_link_loses_nothing(tmp_path: Path) -> None:
    played = await _play_through_a_cut(tmp_path, 0.8, 3)
    assert not played.failed, played.failed


@pytest.mark.soak
async def test_half_a_minute_without_a_link_loses_nothing(tmp_path: Path) -> None:
    played = await _play_through_a_cut(tmp_path, 30.0, 8)
    assert played.failed, "no episode outlives so long a silence"
    print(f"{len(played.closed)} episodes closed, {len(played.failed)} failed by type")


# The relay


async def _play_through_a_relay(
    running: Served, weather: Weather, seconds: float
) -> tuple[Played, Relay]:
    played, ends_s = Played(), time.monotonic() + seconds

    def is_over() -> bool:
        return time.monotonic() > ends_s and bool(played.closed)

    async def one(address: str) -> None:
        try:
            async with OctopusClient.connect(address, timeouts=TIMEOUTS) as client:
                await play_until(client, played, is_over)
        except HarnessError as error:
            # The handshake, which may meet a reset too.
            played.failed.append(error)

    async with (
        Relay(running.server.address, weather, 3) as relay,
        asyncio.TaskGroup() as tasks,
    ):
        for _ in range(6):
            tasks.create_task(one(relay.address))
    await _settled(running)
    records = [(r.episode_id, f"{i}-0") for i, r in enumerate(running.sink.records, 1)]
    _check_records(played, records, running.sessions.status().metrics["episodes/opened"])
    return played, relay


async def test_latency_stalls_and_resets_lose_nothing(running: Served) -> None:
    played, relay = await _play_through_a_relay(running, FAIR, 1.0)
    assert played.closed and relay.num_stalls + relay.num_resets


@pytest.mark.soak
async def test_a_minute_of_latency_stalls_and_resets_loses_nothing(running: Served) -> None:
    played, relay = await _play_through_a_relay(running, BAD, 60.0)
    assert played.closed and played.failed and relay.num_resets > 10
    print(
        f"{len(played.closed)} episodes closed, {len(played.failed)} failed by type; "
        f"{relay.num_resets} resets, {relay.num_stalls} stalls"
    )


async def test_a_half_open_connection_is_given_up_on_both_sides(running: Served) -> None:
    timeouts = Timeouts(call_s=0.5, generate_s=0.5, close_s=0.5)
    sampling = SamplingOptions(max_tokens=4)
    async with (
        Relay(running.server.address, Weather()) as relay,
        OctopusClient.connect(relay.address, timeouts=timeouts) as client,
    ):
        began = time.monotonic()
        with pytest.raises(HarnessError) as caught:
            async with client.episode(primitives=(), sampling=sampling) as episode:
                await episode.root.generate("go")
                relay.freeze()
                began = time.monotonic()
                await episode.root.generate("and now?")
        # A turn and the close of the failed episode, each within its deadline.
        assert time.monotonic() - began < 3.0
        assert caught.value.status == "DEADLINE_EXCEEDED"
        await _settled(running)
        assert [r.stop_reason for r in running.sink.records] == ["client_lost"]


# Clients


async def test_silent_and_garbling_connections_hold_nobody_up(running: Served) -> None:
    host, _, port = running.server.address.rpartition(":")
    rng = random.Random(0)
    preface = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
    said = [b"", b"GET / HTTP/1.1\r\n\r\n", preface, preface + rng.randbytes(5000)]
    said += [rng.randbytes(rng.randrange(1, 4000)) for _ in range(20)]
    writers = []
    for data in said:
        _, writer = await asyncio.open_connection(host, int(port))
        with contextlib.suppress(OSError):
            writer.write(data)
            await writer.drain()
        writers.append(writer)
    played = Played()
    async with OctopusClient.connect(running.server.address, timeouts=TIMEOUTS) as client:
        await play_until(client, played, lambda: bool(played.closed))
    for writer in writers:
        writer.transport.abort()
    assert len(played.closed) == 1 and not played.failed


async def test_a_flood_of_openings_and_calls_is_served_and_forgotten() -> None:
    # Small enough for all of them to be admitted, whatever they fork.
    options = SessionOptions(run="r", thread_budget=300)
    async with served(DiceEngine(0), options=options) as running:
        await _flood(running)


async def _flood(running: Served) -> None:
    streams = [running.stub.OpenEpisode(pb.OpenEpisodeRequest()) for _ in range(200)]
    opened = [(await stream.read()).opened for stream in streams]
    calls = [
        pb.CallContext(episode_id=each.episode_id, thread_id="root", expected_head=each.head)
        for each in opened
    ]
    go = [pb.Message(role="user", content="go")]

    async def turn(call: pb.CallContext) -> bool:
        # Half of them at once on one thread: one is served, the others are refused by type.
        try:
            request = pb.GenerateRequest(call=call, messages=go, demonstration="x")
            return bool([event async for event in running.stub.Generate(request)])
        except grpc.aio.AioRpcError as error:
            assert error.code() is grpc.StatusCode.ABORTED, error
            return False

    served_turns = await asyncio.gather(*(turn(call) for call in [*calls, *calls[:1] * 100]))
    assert sum(served_turns) == 200
    for stream in streams:
        stream.cancel()
    await _settled(running)
    assert len(running.sink.records) == 200


async def test_a_slow_reader_does_not_slow_the_others(running: Served) -> None:
    episode = await running.open()
    request = pb.GenerateRequest(
        call=episode.call(),
        messages=[pb.Message(role="user", content="go")],
        demonstration="x" * 20_000,
        with_events=True,
    )
    # Never read: gRPC's window fills, and the turn waits for it alone.
    slow = running.stub.Generate(request)
    played = Played()
    async with OctopusClient.connect(running.server.address, timeouts=TIMEOUTS) as client:
        await play_until(client, played, lambda: len(played.closed) == 3)
    assert not played.failed
    slow.cancel()
    episode.stream.cancel()
    await _settled(running)
