"""Opening, waiting for admission, closing once, records, and clients that go away."""

from __future__ import annotations

import asyncio
from typing import NoReturn

import pytest

from harness_sdk.errors import EpisodeNotFound, InvalidRequest, Unavailable
from harness_sdk.record import record_from_bytes, record_to_bytes
from harness_sdk.types import Limits, Message
from rollout_service.sessions import OpenRequest
from rollout_service.sessions.replies import Queued
from tests.session_cases import CHAT, LOOK, Bench, ScriptedEngine


async def test_a_closed_episode_left_one_record_and_no_residency() -> None:
    bench = Bench()
    await bench.open(group_id="g", task_id="t")
    await bench.say()
    await bench.fork("a")
    await bench.say("a")
    await bench.sessions.done(bench.call("a"), "A")
    await bench.sessions.done(bench.call(), "42", "seen")
    result = await bench.sessions.close("e", reward=1.0, idempotency_key="k")
    again = await bench.sessions.close("e", reward=1.0, idempotency_key="k")
    assert again is result
    (record,) = bench.sink.records
    assert (record.run, record.episode_id, record.group_id, record.task_id) == ("r", "e", "g", "t")
    assert (record.answer, record.reward, record.stop_reason) == ("42", 1.0, "done")
    assert (result.entry_id, result.num_nodes, result.num_tokens) == (
        "1-0",
        len(record.nodes),
        record.num_tokens,
    )
    assert record.engine == "dry" and record.template_hash == CHAT.template_hash
    assert record.tokenizer_hash == CHAT.tokenizer.digest
    assert record_from_bytes(record_to_bytes(record)) == record
    assert bench.engine.stats().resident_cursors == 0
    with pytest.raises(EpisodeNotFound, match="closed; got e; allowed: closed as done"):
        await bench.sessions.close("e", idempotency_key="other")
    with pytest.raises(EpisodeNotFound):
        await bench.sessions.turn(bench.call(), ())


async def test_a_clock_that_is_set_back_bends_no_duration(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench()
    episode = await bench.open()
    monkeypatch.setattr("time.time", lambda: episode.opened_at_s - 3600.0)
    record = await bench.close()
    assert 0.0 <= record.closed_at_s - record.opened_at_s < 60.0


async def test_concurrent_closes_write_once() -> None:
    bench = Bench()
    await bench.open()
    await bench.say()
    await asyncio.gather(
        bench.sessions.close("e"), bench.sessions.close("e"), bench.sessions.lost("e")
    )
    assert len(bench.sink.records) == 1


async def test_closing_cancels_the_calls_that_run() -> None:
    bench = Bench()
    engine = bench.engine
    assert isinstance(engine, ScriptedEngine)
    await bench.open()
    engine.gate = asyncio.Event()
    engine.scripts.append(CHAT.reply("x"))
    turn = asyncio.ensure_future(
        bench.sessions.turn(bench.call(), [Message(role="user", content="go")])
    )
    await engine.sampling.wait()
    closing = asyncio.ensure_future(bench.sessions.close("e"))
    with pytest.raises(EpisodeNotFound, match="closed as agent_ended"):
        await turn
    await closing
    assert engine.stats().resident_cursors == 0
    assert bench.sink.records[0].nodes == ()


async def test_a_lost_client_leaves_a_record_and_nothing_else() -> None:
    bench = Bench()
    await bench.open()
    await bench.say()
    await bench.fork("a")
    await bench.sessions.lost("e")
    await bench.sessions.lost("e")
    (record,) = bench.sink.records
    assert (record.stop_reason, record.error_kind) == ("client_lost", "Unavailable")
    assert len(record.nodes) == 2
    assert bench.engine.stats().resident_cursors == 0
    assert bench.sessions.status().open_episodes == 0


async def test_a_record_that_cannot_be_written_may_be_closed_again() -> None:
    bench = Bench()
    await bench.open()
    await bench.say()
    bench.sink.failures.append(Unavailable("the episode stream is closed"))
    with pytest.raises(Unavailable):
        await bench.sessions.close("e", reward=0.5, idempotency_key="k")
    assert bench.engine.stats().resident_cursors == 0
    result = await bench.sessions.close("e", reward=0.5, idempotency_key="k")
    assert result.entry_id == "1-0" and len(bench.sink.records) == 1


@pytest.mark.parametrize(
    ("error_kind", "reason"),
    [
        ("ToolError", "tool_error"),
        ("ValueError", "tool_error"),
        ("EngineError", "engine_error"),
        ("DeadlineExceeded", "engine_error"),
        ("CancelledError", "cancelled"),
        ("BudgetExhausted", "budget"),
    ],
)
async def test_a_failed_agent_is_stored_by_cause(error_kind: str, reason: str) -> None:
    bench = Bench()
    await bench.open()
    record = await bench.close(error_kind=error_kind, error_message="boom")
    assert (record.stop_reason, record.error_kind, record.error_message) == (
        reason,
        error_kind,
        "boom",
    )


async def test_the_roots_end_is_the_episodes() -> None:
    bench = Bench()
    await bench.open()
    await bench.say()
    await bench.fork("a")
    await bench.sessions.done(bench.call("a"), "not the outcome")
    await bench.sessions.cancel(bench.call())
    record = await bench.close()
    assert (record.stop_reason, record.answer) == ("cancelled", "")


@pytest.mark.parametrize("reward", [-0.1, 1.1, float("nan")])
async def test_a_reward_out_of_range_is_refused(reward: float) -> None:
    bench = Bench()
    await bench.open()
    with pytest.raises(InvalidRequest, match="reward is out of range"):
        await bench.sessions.close("e", reward=reward)
    await bench.close(reward=0.0)


@pytest.mark.parametrize(
    ("request_", "match"),
    [
        (OpenRequest(primitives=("fork", "jump")), "unknown primitive; got 'jump'"),
        (OpenRequest(version_policy="latest"), "unknown version policy"),
        (OpenRequest(run="other"), "serves another run; got other; allowed: r"),
        (OpenRequest(limits=Limits(max_turns=-1)), "max_turns"),
        (OpenRequest(episode_id="e"), "used before"),
    ],
)
async def test_requests_that_cannot_be_served_are_refused(
    request_: OpenRequest, match: str
) -> None:
    bench = Bench()
    await bench.open()
    with pytest.raises(InvalidRequest, match=match):
        await bench.sessions.open(request_)
    await bench.close()
    if request_.episode_id:
        with pytest.raises(InvalidRequest, match=match):
            await bench.sessions.open(request_)


async def test_new_episodes_wait_in_order_while_the_pool_is_full() -> None:
    engine = ScriptedEngine()
    bench = Bench(engine=engine, admission_poll_s=0.001)
    await bench.open()
    engine.kv_use = 0.76
    told: list[tuple[str, Queued]] = []

    async def enter(name: str) -> str:
        async def on_queued(queued: Queued) -> None:
            told.append((name, queued))

        await bench.sessions.open(OpenRequest(episode_id=name), on_queued)
        return name

    tasks = [asyncio.ensure_future(enter(name)) for name in ("x", "y", "z")]
    for task in tasks:
        assert not task.done()
        await asyncio.sleep(0.005)
    assert told == [(n, Queued(ahead=i, kv_use=0.76)) for i, n in enumerate(("x", "y", "z"))]
    assert bench.sessions.status().queued_episodes == 3
    await bench.say("root", LOOK)  # running episodes never wait behind them
    tasks[1].cancel()
    await asyncio.sleep(0.005)
    assert told[-1] == ("z", Queued(ahead=1, kv_use=0.76))
    engine.kv_use = 0.75
    assert await asyncio.gather(tasks[0], tasks[2]) == ["x", "z"]
    assert bench.sessions.status().metrics["guardrails/queued_episodes"] == 2


async def test_a_repeated_opening_takes_the_episode_over() -> None:
    bench = Bench()
    request = OpenRequest(episode_id="e", idempotency_key="k")
    first = await bench.sessions.open(request)
    again = await bench.sessions.open(request)
    assert (again.head, again.holder) == (first.head, first.holder + 1)
    await bench.sessions.lost("e", first.holder)
    await bench.say()
    await bench.sessions.lost("e", again.holder)
    assert bench.sink.records[0].stop_reason == "client_lost"


async def test_a_repeat_of_a_queued_opening_waits_for_the_first() -> None:
    engine = ScriptedEngine()
    bench = Bench(engine=engine, admission_poll_s=0.001)
    await bench.open()
    engine.kv_use = 1.0
    request = OpenRequest(episode_id="x", idempotency_key="k")
    first, again = (asyncio.ensure_future(bench.sessions.open(request)) for _ in range(2))
    await asyncio.sleep(0.01)
    assert bench.sessions.status().queued_episodes == 1
    engine.kv_use = 0.0
    assert (await first).holder == 1 and (await again).holder == 2


async def test_a_full_pool_without_episodes_admits() -> None:
    engine = ScriptedEngine()
    engine.kv_use = 1.0
    bench = Bench(engine=engine)
    async with asyncio.timeout(1):
        await bench.open()


async def test_shutdown_closes_every_episode_and_admits_none() -> None:
    bench = Bench()
    await bench.open()
    await bench.sessions.shutdown()
    assert bench.sink.records[0].stop_reason == "cancelled"
    with pytest.raises(Unavailable, match="shutting down"):
        await bench.sessions.open(OpenRequest())


async def test_a_lost_engine_ends_every_call_with_its_error_and_is_in_the_record() -> None:
    engine = ScriptedEngine()
    engine.gate = asyncio.Event()
    engine.scripts.append([5, 6, 7])
    bench = Bench(engine=engine)
    await bench.open()
    message = Message(role="user", content="go")
    turn = asyncio.ensure_future(bench.sessions.turn(bench.call(), [message]))
    await engine.sampling.wait()
    bench.sessions.fail(Unavailable("the engine has ended", remedy="try another replica"))
    await bench.sessions.shutdown()
    lost = "the engine has ended; try another replica"
    with pytest.raises(Unavailable, match=lost) as caught:
        await turn
    assert caught.value.retryable
    with pytest.raises(Unavailable, match=lost):
        await bench.fork("late")
    with pytest.raises(Unavailable, match=lost):
        await bench.sessions.open(OpenRequest(episode_id="other"))
    (record,) = bench.sink.records
    assert (record.stop_reason, record.error_kind) == ("engine_error", "Unavailable")
    assert record.error_message == "the engine has ended"


@pytest.mark.parametrize("ends", [False, True])
async def test_openings_wait_while_the_engine_is_started_again(ends: bool) -> None:
    engine = ScriptedEngine()
    engine.is_serving = False
    bench = Bench(engine=engine, admission_poll_s=0.001)
    waiting = asyncio.ensure_future(bench.open())
    await asyncio.sleep(0.02)
    status = bench.sessions.status()
    assert not waiting.done() and status.queued_episodes == 1
    assert (status.metrics["engine/serving"], status.metrics["engine/restarts"]) == (0, 0)
    if ends:
        bench.sessions.fail(Unavailable("the engine is not started again"))
        with pytest.raises(Unavailable, match="not started again"):
            await waiting
    else:
        engine.is_serving = True
        await waiting
        assert bench.sessions.status().metrics["engine/serving"] == 1
    assert bench.sessions.status().queued_episodes == 0


async def test_an_opening_queued_at_shutdown_is_refused() -> None:
    engine = ScriptedEngine()
    bench = Bench(engine=engine, admission_poll_s=0.001)
    await bench.open()
    engine.kv_use = 1.0
    queued = asyncio.ensure_future(bench.sessions.open(OpenRequest(episode_id="late")))
    await asyncio.sleep(0.005)
    await bench.sessions.shutdown()
    with pytest.raises(Unavailable, match="shutting down"):
        await queued
    assert [record.episode_id for record in bench.sink.records] == ["e"]


async def test_a_long_message_is_encoded_off_the_loop() -> None:
    bench = Bench(thread_budget=3_000_000)
    await bench.open(primitives=())
    ticks = 0

    async def tick() -> None:
        nonlocal ticks
        while True:
            await asyncio.sleep(0.005)
            ticks += 1

    ticking = asyncio.ensure_future(tick())
    await bench.say("root", "ok", "word " * 100_000)
    ticking.cancel()
    assert ticks >= 3
    assert (await bench.close()).num_tokens > 400_000


@pytest.mark.parametrize("name", ["n" * 513, "a\nb"])
async def test_a_name_that_no_log_line_could_hold_is_refused(name: str) -> None:
    bench = Bench()
    with pytest.raises(InvalidRequest, match=r"the group_id cannot be used.*512 printable"):
        await bench.open(group_id=name)
    with pytest.raises(InvalidRequest, match="the episode_id cannot be used"):
        await bench.sessions.open(OpenRequest(episode_id=name))
    await bench.open(group_id="n" * 512)


async def test_a_record_is_written_where_the_engine_is_gone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    bench = Bench()
    await bench.open()
    await bench.say()

    def gone() -> NoReturn:
        raise Unavailable("the engine is not running")

    monkeypatch.setattr(bench.engine, "stats", gone)
    record = await bench.close(reward=1.0)
    assert record.reward == 1.0 and bench.sink.records == [record]
