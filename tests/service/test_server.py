"""The wire: every RPC, every typed refusal, and clients that go away."""

from __future__ import annotations

import asyncio
import subprocess
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import grpc
import pytest

from harness_sdk.errors import (
    AuthError,
    BudgetExhausted,
    ConfigError,
    EngineError,
    EpisodeNotFound,
    HarnessError,
    InvalidRequest,
    ProtocolError,
    ResourceExhausted,
    StaleHead,
    StepNotFound,
    ThreadEnded,
    ThreadNotFound,
)
from harness_sdk.record import EpisodeRecord
from harness_sdk.rpc.v1 import rollout_pb2 as pb
from rollout_service.access import Access
from rollout_service.engine.dry import DRY_INFO
from rollout_service.engine.transformers import TransformersEngine
from rollout_service.rpc import serve
from rollout_service.rpc.calls import abort
from rollout_service.sessions import SessionOptions
from tests.service.served import Served, failure, served
from tests.session_cases import CHAT, LOOK, ScriptedEngine, tool_call

ALL = ("fork", "rewind", "read_thread", "wait", "done")


@pytest.fixture
async def dry() -> AsyncIterator[Served]:
    """A server over an engine whose turns the test writes."""
    async with served(ScriptedEngine()) as running:
        yield running


@pytest.fixture
async def tiny(chat_folder: Path) -> AsyncIterator[Served]:
    """A server over a tiny hybrid model."""
    engine = TransformersEngine(
        str(chat_folder), max_tokens=20_000, detokenize=CHAT.tokenizer.decode
    )
    async with served(engine) as running:
        yield running


async def eventually(condition: Any, timeout_s: float = 5.0) -> float:
    began = time.monotonic()
    while not condition():
        assert time.monotonic() - began < timeout_s, "it did not come true in time"
        await asyncio.sleep(0.01)
    return time.monotonic() - began


async def test_the_handshake_tells_limits_and_checks_the_protocol(dry: Served) -> None:
    reply = await dry.stub.Connect(pb.ConnectRequest(protocol_version=1, client="test"))
    assert (reply.run, reply.engine, reply.protocol_version) == ("r", "dry", 1)
    assert reply.max_message_bytes == 64 * 1024 * 1024
    assert (reply.limits.thread_budget, reply.limits.answer_reserve) == (32_768, 2_048)
    assert list(reply.policy_versions) == [0]
    status, error = await failure(dry.stub.Connect(pb.ConnectRequest(protocol_version=2)))
    assert status is grpc.StatusCode.UNIMPLEMENTED and isinstance(error, ProtocolError)
    assert (error.value, error.limit) == ("client 2", "service 1")


async def test_an_episode_through_every_call(tiny: Served) -> None:
    episode = await tiny.open(primitives=ALL, group_id="g", task_id="t")
    events = await episode.generate(sampling=pb.Sampling(max_tokens=8, temperature=1, top_p=1))
    turn = events[-1].turn
    ids = [token for event in events[:-1] for token in event.delta.token_ids]
    assert len(ids) == turn.num_tokens == len([lp for e in events for lp in e.delta.logprobs])
    assert (turn.step, turn.thread_ended, turn.policy_version) == (1, "", 0)
    branches = [pb.Branch(thread_id=name, prompt=f"do {name}") for name in ("a", "b")]
    forked = await tiny.stub.Fork(pb.ForkRequest(call=episode.call(), branches=branches))
    assert [thread.thread_id for thread in forked.threads] == ["a", "b"]
    for _ in range(2):
        await episode.generate("", call=episode.call("a"), demonstration=LOOK)
    read = await tiny.stub.ReadThread(
        pb.ReadThreadRequest(call=episode.call("b"), branch="a", first_step=1, last_step=9)
    )
    assert (read.first_step, read.last_step) == (1, 1) and read.tokens_mounted > 0
    demonstrated = await episode.generate("", call=episode.call("b"), demonstration=LOOK)
    assert demonstrated[-1].turn.tool_calls[0].name == "look"
    await tiny.stub.Done(pb.DoneRequest(call=episode.call("b"), answer="B"))
    await tiny.stub.Cancel(pb.CancelRequest(call=episode.call("a", head=0), reason="enough"))
    waited = [event async for event in tiny.stub.Wait(pb.WaitRequest(call=episode.call()))]
    assert {event.ended.thread_id for event in waited[:-1]} == {"a", "b"}
    assert "[wait] b done; answer: B" in waited[-1].reply.note
    await episode.generate("", demonstration=LOOK)
    rewound = await tiny.stub.Rewind(pb.RewindRequest(call=episode.call(), step=1, note="back"))
    assert rewound.tokens_returned > 0
    await episode.generate("", demonstration=tool_call("done", answer="42"))
    done = await tiny.stub.Done(pb.DoneRequest(call=episode.call(), answer="42"))
    assert done.status == "done"
    closed = await tiny.stub.CloseEpisode(
        pb.CloseEpisodeRequest(episode_id=episode.opened.episode_id, reward=1.0)
    )
    assert (closed.stop_reason, closed.entry_id) == ("done", "1-0")
    last = await episode.stream.read()
    assert last.closed.stop_reason == "done"
    assert not await episode.stream.read(), "the stream has ended"
    (record,) = tiny.sink.records
    assert (record.answer, record.reward, record.group_id) == ("42", 1.0, "g")
    assert len(record.nodes) == closed.num_nodes
    assert all(logprob < 0 for node in record.nodes for logprob in node.sampled_logprobs)
    status = await tiny.stub.Status(pb.StatusRequest())
    assert (status.open_episodes, status.resident_cursors, status.tokens_resident) == (0, 0, 0)
    assert status.metrics["calls/generate"] == 6


async def test_refusals_arrive_typed_with_value_limit_and_remedy(dry: Served) -> None:
    episode = await dry.open(primitives=ALL, limits=pb.Limits(max_threads=1, thread_budget=4000))
    await episode.generate(demonstration=LOOK)
    call = episode.call()
    stub = dry.stub
    cases: list[tuple[Callable[[], Any], type[HarnessError], grpc.StatusCode]] = [
        (
            lambda: stub.Fork(pb.ForkRequest(call=call, branches=[pb.Branch(thread_id="root")])),
            InvalidRequest,
            grpc.StatusCode.INVALID_ARGUMENT,
        ),
        (
            lambda: stub.Fork(pb.ForkRequest(call=call, branches=[pb.Branch(thread_id="a")] * 2)),
            InvalidRequest,
            grpc.StatusCode.INVALID_ARGUMENT,
        ),
        (
            lambda: stub.Fork(
                pb.ForkRequest(call=call, branches=[pb.Branch(thread_id=n) for n in "ab"])
            ),
            BudgetExhausted,
            grpc.StatusCode.RESOURCE_EXHAUSTED,
        ),
        (
            lambda: stub.Rewind(pb.RewindRequest(call=call, step=7)),
            StepNotFound,
            grpc.StatusCode.OUT_OF_RANGE,
        ),
        (
            lambda: stub.ReadThread(pb.ReadThreadRequest(call=call, branch="root", last_step=1)),
            InvalidRequest,
            grpc.StatusCode.INVALID_ARGUMENT,
        ),
        (
            lambda: stub.ReadThread(pb.ReadThreadRequest(call=call, branch="zz", last_step=1)),
            ThreadNotFound,
            grpc.StatusCode.NOT_FOUND,
        ),
        (
            lambda: stub.Wait(pb.WaitRequest(call=call)),
            InvalidRequest,
            grpc.StatusCode.INVALID_ARGUMENT,
        ),
        (
            lambda: stub.Done(pb.DoneRequest(call=episode.call(head=0))),
            StaleHead,
            grpc.StatusCode.ABORTED,
        ),
        (
            lambda: stub.Generate(
                pb.GenerateRequest(call=call, messages=[pb.Message(role="robot")])
            ),
            InvalidRequest,
            grpc.StatusCode.INVALID_ARGUMENT,
        ),
        (
            lambda: stub.CloseEpisode(pb.CloseEpisodeRequest(episode_id="zz")),
            EpisodeNotFound,
            grpc.StatusCode.NOT_FOUND,
        ),
        (
            lambda: stub.OpenEpisode(pb.OpenEpisodeRequest(primitives=["jump"])),
            InvalidRequest,
            grpc.StatusCode.INVALID_ARGUMENT,
        ),
    ]
    for rpc, kind, code in cases:
        status, error = await failure(rpc())
        assert (status, type(error)) == (code, kind), error
        assert error.limit or error.remedy
    await episode.generate("", demonstration=LOOK)
    await dry.stub.Done(pb.DoneRequest(call=episode.call(), answer="x"))
    status, error = await failure(dry.stub.Done(pb.DoneRequest(call=episode.call())))
    assert isinstance(error, ThreadEnded) and status is grpc.StatusCode.FAILED_PRECONDITION


async def test_an_unexpected_failure_does_not_end_the_server(dry: Served) -> None:
    episode = await dry.open()
    engine = dry.engine
    assert isinstance(engine, ScriptedEngine)
    engine.failure = RuntimeError("cuda is on fire")
    engine.scripts.append(CHAT.reply("x"))
    status, error = await failure(
        dry.stub.Generate(
            pb.GenerateRequest(
                call=episode.call(), messages=[pb.Message(role="user", content="go")]
            )
        )
    )
    assert status is grpc.StatusCode.INTERNAL and isinstance(error, EngineError)
    assert "cuda is on fire" in error.message
    broken = dry.sessions.status
    dry.sessions.status = lambda: 1 / 0  # type: ignore[assignment, return-value]
    status, error = await failure(dry.stub.Status(pb.StatusRequest()))
    assert status is grpc.StatusCode.INTERNAL and error.value == "ZeroDivisionError"
    dry.sessions.status = broken  # type: ignore[method-assign]
    assert (await dry.stub.Status(pb.StatusRequest())).open_episodes == 1


@pytest.mark.parametrize("error", [InvalidRequest("no"), grpc.aio.InternalError("not sent")])
async def test_a_client_that_left_is_told_nothing_and_leaves_no_error_in_the_log(
    error: Exception, caplog: pytest.LogCaptureFixture
) -> None:
    class Gone:
        async def abort(self, *status: object) -> None:
            raise grpc.aio.InternalError("not sent")

    with pytest.raises(asyncio.CancelledError):
        await abort(cast(Any, Gone()), error)
    assert not caplog.records


async def test_a_cancelled_turn_stops_the_engine_and_keeps_the_head(tiny: Served) -> None:
    episode = await tiny.open()
    await episode.generate(demonstration="first")
    head = episode.call().expected_head
    baseline = tiny.engine.stats()
    request = pb.GenerateRequest(
        call=episode.call(),
        messages=[pb.Message(role="tool", content="x" * 200)],
        sampling=pb.Sampling(max_tokens=15_000, temperature=1, top_p=1, seed=3),
    )
    stream = tiny.stub.Generate(request)
    await stream.read()
    assert tiny.engine.stats().running == 1
    stream.cancel()
    await eventually(lambda: tiny.engine.stats().running == 0)
    await eventually(lambda: tiny.engine.stats().tokens_resident == baseline.tokens_resident)
    assert tiny.engine.stats().resident_cursors == baseline.resident_cursors
    assert episode.call().expected_head == head
    # At once, on the head that the client knows.
    assert (await episode.generate("", demonstration="next"))[-1].turn.step == 2


async def test_a_lost_client_gives_everything_back_within_5_s(tiny: Served) -> None:
    episode = await tiny.open(primitives=ALL)
    await episode.generate(demonstration=LOOK)
    branches = [pb.Branch(thread_id=name, prompt="x") for name in ("a", "b")]
    await tiny.stub.Fork(pb.ForkRequest(call=episode.call(), branches=branches))
    sampling = pb.Sampling(max_tokens=15_000, temperature=1, top_p=1)
    streams = [
        tiny.stub.Generate(pb.GenerateRequest(call=episode.call(name), sampling=sampling))
        for name in ("a", "b")
    ]
    readers = [aiter(stream) for stream in streams]
    for reader in readers:
        await anext(reader)
    episode.stream.cancel()
    took_s = await eventually(lambda: len(tiny.sink.records) == 1)
    stats = tiny.engine.stats()
    assert (stats.running, stats.resident_cursors, stats.tokens_resident) == (0, 0, 0)
    assert stats.recurrent_slots == 0 and took_s < 5
    assert tiny.sink.records[0].stop_reason == "client_lost"
    for reader in readers:
        _, error = await failure(reader)
        assert isinstance(error, EpisodeNotFound) and "client_lost" in error.limit


async def test_a_client_lost_while_queued_leaves_the_queue() -> None:
    engine = ScriptedEngine()
    options = SessionOptions(run="r", admission_poll_s=0.01)
    async with served(engine, options=options) as running:
        await running.open()
        engine.kv_use = 0.9
        stream = running.stub.OpenEpisode(pb.OpenEpisodeRequest())
        event = await stream.read()
        assert (event.queued.ahead, event.queued.kv_use) == (0, 0.9)
        stream.cancel()
        await eventually(lambda: running.sessions.status().queued_episodes == 0)
        assert running.sessions.status().open_episodes == 1


async def test_a_repeated_turn_comes_back_whole(tiny: Served) -> None:
    episode = await tiny.open()
    call = episode.call(key="k")
    sampling = pb.Sampling(max_tokens=6, temperature=1, top_p=1)
    first = await episode.generate(call=call, sampling=sampling)
    again = await episode.generate(call=call, sampling=sampling)
    assert again[-1] == first[-1]
    assert len(again) == 2
    assert list(again[0].delta.token_ids) == [t for e in first for t in e.delta.token_ids]


async def test_a_5_mb_observation_passes_and_an_oversize_one_names_the_limit() -> None:
    options = SessionOptions(run="r", thread_budget=10_000_000)
    engine = ScriptedEngine(info=replace(DRY_INFO, max_positions=10_000_000))
    async with served(engine, options=options) as running:
        episode = await running.open()
        # Of 4 bytes a token: those of one byte take four times as long for the same message.
        events = await episode.generate(" the" * 1_250_000, demonstration="ok")
        assert events[-1].turn.budget.tokens_used > 1_250_000
    async with served(ScriptedEngine(), max_message_bytes=100_000) as running:
        episode = await running.open()
        request = pb.GenerateRequest(
            call=episode.call(), messages=[pb.Message(role="user", content="x" * 200_000)]
        )
        status, error = await failure(running.stub.Generate(request))
        assert status is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert isinstance(error, ResourceExhausted)
        assert "server" in error.message and error.limit == "100000 bytes"
        await episode.generate(demonstration="ok")


async def test_every_call_needs_the_token() -> None:
    async with served(ScriptedEngine(), access=Access("secret")) as running:
        rpcs = (
            lambda **k: running.stub.Connect(pb.ConnectRequest(protocol_version=1), **k),
            lambda **k: running.stub.OpenEpisode(pb.OpenEpisodeRequest(), **k),
        )
        for rpc in rpcs:
            for metadata in ((), (("authorization", "Bearer wrong"),)):
                status, error = await failure(rpc(metadata=metadata))
                assert status is grpc.StatusCode.UNAUTHENTICATED
                assert isinstance(error, AuthError) and "secret" not in str(error)
        assert not running.sessions.status().open_episodes
        reply = await rpcs[0](metadata=(("authorization", "Bearer secret"),))
        assert reply.protocol_version == 1


async def test_tls_with_a_client_certificate(tmp_path: Path) -> None:
    ca, ca_key = certificate(tmp_path, "ca")
    cert, key = certificate(tmp_path, "localhost", issuer="ca")
    ours, our_key = certificate(tmp_path, "client", issuer="ca")
    tls = grpc.ssl_server_credentials([(key, cert)], root_certificates=ca, require_client_auth=True)
    known = grpc.ssl_channel_credentials(ca, our_key, ours)
    async with served(ScriptedEngine(), tls=tls, credentials=known) as running:
        reply = await running.stub.Connect(pb.ConnectRequest(protocol_version=1))
        assert reply.engine == "dry"
    unknown = grpc.ssl_channel_credentials(ca)
    async with served(ScriptedEngine(), tls=tls, credentials=unknown) as running:
        status, _ = await failure(running.stub.Connect(pb.ConnectRequest(protocol_version=1)))
        assert status is grpc.StatusCode.UNAVAILABLE
    assert ca_key


def certificate(folder: Path, name: str, issuer: str = "") -> tuple[bytes, bytes]:
    """PEM of a certificate for `name` and of its key, by openssl's command line."""
    command = [
        "openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256",
        "-nodes", "-days", "2", "-subj", f"/CN={name}", "-keyout", f"{name}.key",
        "-out", f"{name}.pem", "-addext", f"subjectAltName=DNS:{name}",
    ]  # fmt: skip
    if issuer:
        command += ["-CA", f"{issuer}.pem", "-CAkey", f"{issuer}.key"]
    subprocess.run(command, cwd=folder, check=True, capture_output=True)
    return (folder / f"{name}.pem").read_bytes(), (folder / f"{name}.key").read_bytes()


async def test_an_address_in_use_is_a_config_error(dry: Served) -> None:
    port = int(dry.server.address.rpartition(":")[2])
    with pytest.raises(ConfigError, match=f"127.0.0.1:{port}"):
        await serve(dry.sessions, port=port)


async def test_a_stop_closes_the_episodes_and_their_streams() -> None:
    engine = ScriptedEngine()
    async with served(engine) as running:
        episode = await running.open()
        await episode.generate(demonstration="x")
        await running.server.stop(1.0)
        assert (await episode.stream.read()).closed.stop_reason == "cancelled"
        assert running.sink.records[0].stop_reason == "cancelled"
        assert engine.stats().resident_cursors == 0


async def test_a_stop_is_bounded_while_no_record_can_be_written(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    may_write = asyncio.Event()
    async with served(ScriptedEngine()) as running:
        write = running.sink.write

        async def stuck_write(record: EpisodeRecord) -> str:
            await may_write.wait()
            return await write(record)

        monkeypatch.setattr(running.sink, "write", stuck_write)
        for name in "abc":
            await running.open(episode_id=name)
        async with asyncio.timeout(3):
            await running.server.stop(0.2)
        assert not running.sink.records
        may_write.set()
        await running.sessions.shutdown()
        assert {record.episode_id for record in running.sink.records} == set("abc")


async def test_cost_on_the_wire_is_that_of_the_new_tokens(dry: Served) -> None:
    episode = await dry.open()
    await episode.generate("long " * 2000, demonstration="x" * 50)
    events = await episode.generate("short", demonstration="y")
    assert sum(event.ByteSize() for event in events) < 200
