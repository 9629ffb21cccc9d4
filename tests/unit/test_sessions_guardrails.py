"""Guardrails: the reserve, limits that end threads, the termination prompt, the roster."""

from __future__ import annotations

from dataclasses import replace

import pytest

from harness_sdk.errors import BudgetExhausted, HarnessError, InvalidRequest
from harness_sdk.record import NodeKind
from harness_sdk.types import Limits, Message, SamplingOptions, ThreadStatus
from rollout_service.engine.dry import DRY_INFO
from rollout_service.sessions import OpenRequest
from rollout_service.sessions.options import SessionOptions, resolve_limits
from tests.session_cases import CHAT, LOOK, Bench, ScriptedEngine, path_text, text, tool_call

OPENING = len(CHAT.generation_prompt)


def small_model(max_positions: int) -> ScriptedEngine:
    return ScriptedEngine(info=replace(DRY_INFO, max_positions=max_positions))


async def test_a_turn_without_calls_is_prompted_once_then_ends_no_done() -> None:
    bench = Bench()
    episode = await bench.open()
    first = await bench.say("root", "I am finished")
    assert first.thread_ended is None
    await bench.say("root", LOOK)
    last = await bench.say("root", "still finished")
    assert last.thread_ended is ThreadStatus.NO_DONE
    assert path_text(episode).count("[end] call done") == 1
    record = await bench.close(reward=0.0)
    assert record.stop_reason == "no_done"
    (prompt,) = [n for n in record.nodes if n.kind is NodeKind.TERMINATION]
    assert not any(prompt.sampled)
    metrics = bench.sessions.status().metrics
    assert metrics["guardrails/termination_prompts"] == 1
    assert metrics["guardrails/ended_no_done"] == 1


async def test_a_bad_call_counts_as_a_call() -> None:
    bench = Bench()
    await bench.open()
    for _ in range(3):
        assert (await bench.say("root", "<tool_call>{")).thread_ended is None


async def test_without_done_among_the_primitives_plain_turns_are_normal() -> None:
    bench = Bench()
    episode = await bench.open(primitives=())
    for _ in range(3):
        assert (await bench.say("root", "text")).thread_ended is None
    assert "[end]" not in path_text(episode)


async def test_the_last_turn_ends_a_model_driven_thread() -> None:
    bench = Bench()
    await bench.open(limits=Limits(max_turns=2))
    assert (await bench.say()).budget.turns_left == 1
    assert (await bench.say()).thread_ended is ThreadStatus.MAX_TURNS
    assert (await bench.close()).stop_reason == "max_turns"


async def test_a_last_turn_that_calls_done_may_still_be_done() -> None:
    bench = Bench()
    await bench.open(limits=Limits(max_turns=1))
    turn = await bench.say("root", tool_call("done", answer="x"))
    assert turn.thread_ended is None
    await bench.sessions.done(bench.call(), "x")
    record = await bench.close(reward=1.0)
    assert (record.stop_reason, record.answer, record.reward) == ("done", "x", 1.0)


async def test_past_max_turns_a_plain_agent_is_refused_and_may_be_done() -> None:
    bench = Bench()
    await bench.open(primitives=(), limits=Limits(max_turns=1))
    await bench.say()
    with pytest.raises(BudgetExhausted, match="no model turn is left; got 1 turns; allowed: 1"):
        await bench.say()
    assert bench.sessions.build_record("e").stop_reason == "max_turns"
    await bench.sessions.done(bench.call(), "late")
    assert (await bench.close()).stop_reason == "done"


async def test_near_the_reserve_everything_but_done_is_refused() -> None:
    bench = Bench()
    episode = await bench.open(limits=Limits(thread_budget=600, answer_reserve=150))
    await bench.say()
    await bench.fork("a")
    assert not (await bench.say("root", LOOK, "x")).budget.reserve_reached
    frame = 1 + len(CHAT.delta([Message(role="tool", content="")])) + OPENING
    turn = await bench.say("root", LOOK, "x" * (450 - episode.root.tokens_used - frame))
    assert turn.budget.reserve_reached
    assert path_text(episode).count("[budget] only done") == 1
    head = episode.root.head_id
    sessions, call = bench.sessions, bench.call()
    for attempt in (
        lambda: sessions.fork(call, {"b": "x"}),
        lambda: sessions.rewind(call, 0),
        lambda: sessions.read_thread(call, "a", 1, 1),
        lambda: anext(sessions.wait(call)),
    ):
        with pytest.raises(BudgetExhausted, match=r"reserve is reached.*more than 150.*call done"):
            await attempt()
    assert episode.root.head_id == head
    again = await bench.say("root", LOOK)
    assert path_text(episode).count("[budget] only done") == 1, "said once on a path"
    assert again.budget.tokens_left < turn.budget.tokens_left
    await bench.sessions.done(bench.call(), "x")


async def test_sampling_stops_at_the_reserve_and_then_at_the_budget() -> None:
    bench = Bench()
    engine = bench.engine
    assert isinstance(engine, ScriptedEngine)
    episode = await bench.open(limits=Limits(thread_budget=300, answer_reserve=100))
    engine.scripts += [CHAT.reply("y" * 500)[:-1], CHAT.reply("z" * 500)[:-1]]
    user = [Message(role="user", content="go")]
    sampling = SamplingOptions(max_tokens=1000)
    turn = await bench.sessions.turn(bench.call(), user, sampling=sampling)
    assert (turn.budget.tokens_used, turn.finish_reason) == (200, "length")
    turn = await bench.sessions.turn(bench.call(), (), sampling=sampling)
    assert turn.budget.tokens_left == 0
    assert turn.thread_ended is ThreadStatus.BUDGET
    assert "[budget] only done" in path_text(episode)
    assert (await bench.close()).stop_reason == "budget"


async def test_a_plain_agent_samples_into_the_reserve() -> None:
    bench = Bench()
    assert isinstance(bench.engine, ScriptedEngine)
    await bench.open(primitives=(), limits=Limits(thread_budget=200, answer_reserve=100))
    bench.engine.scripts.append(CHAT.reply("y" * 500)[:-1])
    user = [Message(role="user", content="go")]
    turn = await bench.sessions.turn(bench.call(), user)
    assert (turn.budget.tokens_left, turn.thread_ended) == (0, None)


async def test_an_observation_that_does_not_fit_is_refused_and_may_be_shortened() -> None:
    bench = Bench()
    episode = await bench.open(limits=Limits(thread_budget=300))
    await bench.say()
    used, head = episode.root.tokens_used, episode.root.head_id
    with pytest.raises(BudgetExhausted, match=f"with {used} used; allowed: 300 tokens; shorten"):
        await bench.say("root", LOOK, "x" * 300)
    assert (episode.root.tokens_used, episode.root.head_id) == (used, head)
    assert bench.sessions.build_record("e").stop_reason == "budget"
    await bench.say("root", "", "short")
    assert bench.sessions.build_record("e").stop_reason == "agent_ended"


async def test_the_models_positions_limit_turns_forks_and_reads() -> None:
    bench = Bench(engine=small_model(400))
    episode = await bench.open(primitives=("fork", "read_thread"))
    await bench.say()
    with pytest.raises(BudgetExhausted, match=r"no room for its sub-task.*400 positions"):
        await bench.sessions.fork(bench.call(), {"a": "x" * 400})
    await bench.fork("a", "b")
    for _ in range(2):
        await bench.say("a", LOOK, "x" * 60)
    with pytest.raises(BudgetExhausted, match=r"pass the model's positions.*400 positions"):
        await bench.say("a", LOOK, "x" * 140)
    await bench.say("b", LOOK)
    await bench.say("b", LOOK, "x" * 60)
    head = episode.thread("b").head_id
    with pytest.raises(BudgetExhausted, match="read passes the model's"):
        await bench.sessions.read_thread(bench.call("b"), "a", 1, 1)
    assert episode.thread("b").head_id == head and not episode.thread("b").mounts


async def test_positions_end_a_model_driven_thread() -> None:
    bench = Bench(engine=small_model(200))
    assert isinstance(bench.engine, ScriptedEngine)
    episode = await bench.open()
    await bench.say()
    await bench.fork("a")
    bench.engine.scripts.append(CHAT.reply("y" * 500)[:-1])
    turn = await bench.sessions.turn(bench.call("a"))
    assert turn.thread_ended is ThreadStatus.BUDGET
    head = episode.thread("a").head
    assert head is not None and head.next_position == 200 > turn.budget.tokens_used


async def test_the_roster_is_appended_after_a_peer_step_and_names_each_once() -> None:
    bench = Bench()
    episode = await bench.open()
    await bench.say()
    await bench.fork("a", "b")
    await bench.say("a")
    await bench.say("b")
    assert "[readable]" not in path_text(episode, "b"), "no peer step is finished"
    assert "read_thread" not in path_text(episode)
    await bench.say("a")
    await bench.say("b")
    await bench.say("b")
    seen = path_text(episode, "b")
    assert seen.count("[readable] a 1-1; read_thread(branch, steps)") == 1
    await bench.say("root")
    assert "[readable] a 1-1, b 1-2; read_thread(branch, steps)" in path_text(episode)
    # A child inherits what its prefix says, and hears of newcomers alone.
    await bench.fork("c")
    await bench.say("root")
    await bench.fork("d")
    await bench.say("c")
    await bench.say("c")
    await bench.say("d")
    seen = path_text(episode, "d")
    assert seen.count("read_thread(branch, steps)") == 1
    assert "[readable] c 1-1\n" in seen
    assert bench.sessions.status().metrics["guardrails/roster_notes"] >= 3


async def test_the_roster_is_for_models_that_may_read() -> None:
    bench = Bench()
    episode = await bench.open(primitives=("fork", "done"))
    await bench.say()
    await bench.fork("a", "b")
    await bench.say("a")
    await bench.say("a")
    await bench.say("b")
    assert "[readable]" not in path_text(episode, "b")


async def test_a_demonstration_past_the_budget_is_refused() -> None:
    bench = Bench()
    episode = await bench.open(limits=Limits(thread_budget=200))
    with pytest.raises(BudgetExhausted, match="demonstration does not fit"):
        await bench.say("root", "y" * 200)
    assert episode.nodes == [] and bench.engine.stats().resident_cursors == 0


@pytest.mark.parametrize(
    ("asked", "match"),
    [
        (Limits(thread_budget=100, answer_reserve=100), "leaves nothing"),
        (Limits(answer_reserve=40_000), "leaves nothing"),
        (Limits(max_turns=0), "max_turns is too small"),
        (Limits(max_depth=-1), "max_depth is too small"),
        (Limits(thread_budget=0), "leaves nothing"),
        (Limits(thread_budget=50_001), "positions or visible length; got 50001; allowed: 50000"),
    ],
)
def test_limits_that_cannot_work_are_refused(asked: Limits, match: str) -> None:
    with pytest.raises(InvalidRequest, match=match):
        resolve_limits(SessionOptions(), asked, 50_000)


@pytest.mark.parametrize(
    ("asked", "max_positions", "max_visible_tokens", "budget_and_reserve"),
    [
        (Limits(), 50_000, None, (32_768, 2_048)),
        (Limits(thread_budget=2048), 50_000, None, (2048, 512)),
        (Limits(), 2048, None, (2048, 512)),
        (Limits(), 50_000, 1000, (1000, 250)),
        (Limits(answer_reserve=100), 2048, None, (2048, 100)),
        (Limits(thread_budget=2048), 2048, None, (2048, 512)),
    ],
)
def test_default_limits_fit_the_model(
    asked: Limits,
    max_positions: int,
    max_visible_tokens: int | None,
    budget_and_reserve: tuple[int, int],
) -> None:
    options = SessionOptions(max_visible_tokens=max_visible_tokens)
    limits = resolve_limits(options, asked, max_positions)
    assert (limits.thread_budget, limits.answer_reserve) == budget_and_reserve


async def test_a_model_of_2048_positions_runs_ordinary_turns_by_default() -> None:
    bench = Bench(small_model(2048))
    assert isinstance(bench.engine, ScriptedEngine)
    episode = await bench.open()
    assert bench.sessions.info(1).limits.thread_budget == 2048
    reserve_reached = False
    while not reserve_reached:
        bench.engine.scripts.append(CHAT.reply(LOOK))
        role = "user" if episode.root.head is None else "tool"
        turn = await bench.sessions.turn(bench.call(), [Message(role=role, content="x " * 30)])
        assert turn.finish_reason == "stop" and turn.thread_ended is None
        reserve_reached = turn.budget.reserve_reached
    assert episode.root.num_turns > 10
    assert path_text(episode).count("[budget] only done") <= 1
    bench.engine.scripts.append(CHAT.reply(tool_call("done", answer="x" * 200)))
    turn = await bench.sessions.turn(bench.call(), [Message(role="tool", content="x")])
    assert turn.finish_reason == "stop" and turn.tool_calls[0].name == "done"
    assert path_text(episode).count("[budget] only done") == 1
    with pytest.raises(InvalidRequest, match="got 2049; allowed: 2048 tokens; lower"):
        await bench.sessions.open(OpenRequest(limits=Limits(thread_budget=2049)))


async def test_every_refusal_leaves_the_episode_usable() -> None:
    bench = Bench()
    episode = await bench.open(limits=Limits(max_threads=1))
    await bench.say()
    await bench.fork("a")
    call = bench.call()
    attempts = (
        bench.sessions.fork(call, {}),
        bench.sessions.fork(call, {"b": "x"}),
        bench.sessions.rewind(call, 9),
        bench.sessions.read_thread(call, "root", 1, 1),
        bench.sessions.read_thread(call, "zzz", 1, 1),
        bench.sessions.done(bench.call("zzz"), "x"),
        bench.sessions.done(bench.call(expected_head=999), "x"),
    )
    for attempt in attempts:
        with pytest.raises(HarnessError) as caught:
            await attempt
        assert caught.value.remedy or caught.value.limit
    assert (await bench.say()).step == 2
    record = await bench.close()
    assert text(record, 0).endswith("go<|im_end|>\n")
    assert episode.root.num_turns == 2
