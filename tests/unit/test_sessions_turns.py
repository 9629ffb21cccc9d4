"""Turns: what is appended where, what is sampled once, what a failure leaves behind."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence

import pytest

from harness_sdk.deltas import CallArguments, CallBegun, CallFinished, TokenDelta
from harness_sdk.errors import (
    EngineError,
    EpisodeNotFound,
    InvalidRequest,
    StaleHead,
    ThreadEnded,
    ThreadNotFound,
)
from harness_sdk.record import NodeKind
from harness_sdk.types import (
    Message,
    SamplingOptions,
    StructuredOutput,
    ThreadStatus,
)
from rollout_service.chat.calls import ParsedReply
from rollout_service.cursors import Cursor
from rollout_service.sessions.planning import TurnRequest
from rollout_service.sessions.replies import TurnReply
from rollout_service.sessions.turns import take_turn
from tests.session_cases import CHAT, LOOK, Bench, ScriptedEngine, path_text, text, tool_call

IM_END = CHAT.terminator[0]
ENDOFTEXT = next(iter(CHAT.stop_token_ids - {IM_END}))
USER = [Message(role="user", content="hi")]
TOOL = [Message(role="tool", content="4 hits")]


def ids(reply: str, *end: int) -> tuple[int, ...]:
    return (*CHAT.reply(reply)[:-1], *end)


async def test_a_sampled_turn_end_opens_the_terminator_once() -> None:
    bench = Bench()
    engine = bench.engine
    assert isinstance(engine, ScriptedEngine)
    episode = await bench.open()
    engine.scripts += [ids("one", IM_END), ids("two", IM_END)]
    first = await bench.sessions.turn(bench.call(), USER)
    assert (first.step, first.raw_text, first.finish_reason) == (1, "one", "stop")
    assert first.token_ids[-1] == IM_END
    assert first.sampled_logprobs == (-0.5,) * len(first.token_ids)
    await bench.sessions.turn(bench.call(), TOOL)
    expected = (
        "<|im_start|>system\nTools: fork(branches), rewind(step, note), wait(branches), "
        "done(answer, evidence)<|im_end|>\n"
        "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\none<|im_end|>\n"
        "<|im_start|>user\n<tool_response>\n4 hits\n</tool_response>\n"
        "<tool_response>\n[end] call done\n</tool_response><|im_end|>\n"
        "<|im_start|>assistant\ntwo<|im_end|>"
    )
    seen = path_text(episode)
    # The termination prompt was pending before the tool's answer came.
    assert seen.replace(
        "[end] call done\n</tool_response>\n<tool_response>\n4 hits",
        "4 hits\n</tool_response>\n<tool_response>\n[end] call done",
    ) == expected  # fmt: skip
    record = await bench.close()
    assert [node.kind for node in record.nodes] == [
        NodeKind.CONTEXT,
        NodeKind.TURN,
        NodeKind.TERMINATION,
        NodeKind.TURN,
    ]
    assert [node.step for node in record.nodes] == [0, 1, 1, 2]
    turn = record.nodes[1]
    opening = len(CHAT.generation_prompt)
    assert turn.token_ids[:opening] == CHAT.generation_prompt
    assert turn.sampled == (False,) * opening + (True,) * 4


async def test_a_turn_cut_by_length_gets_its_terminator_unsampled() -> None:
    bench = Bench()
    assert isinstance(bench.engine, ScriptedEngine)
    await bench.open(primitives=())
    bench.engine.scripts += [ids("abcdef"), ids("x", IM_END)]
    cut = await bench.sessions.turn(bench.call(), USER, sampling=SamplingOptions(max_tokens=3))
    assert (cut.raw_text, cut.finish_reason, cut.thread_ended) == ("abc", "length", None)
    await bench.sessions.turn(bench.call(), TOOL)
    record = await bench.close()
    assert text(record, 2).startswith("<|im_end|>\n<|im_start|>user\n<tool_response>")
    assert not any(record.nodes[2].sampled)


async def test_another_stop_id_becomes_a_leaf_of_one_token() -> None:
    bench = Bench()
    assert isinstance(bench.engine, ScriptedEngine)
    await bench.open(primitives=())
    bench.engine.scripts += [ids("a", ENDOFTEXT), (ENDOFTEXT,), ids("b", IM_END)]
    turn = await bench.sessions.turn(bench.call(), USER)
    assert (turn.raw_text, turn.token_ids[-1], turn.finish_reason) == ("a", ENDOFTEXT, "stop")
    assert bench.engine.stats().resident_cursors == 2, "the prompt and the turn that goes on"
    await bench.sessions.turn(bench.call(), TOOL)
    await bench.sessions.turn(bench.call(), TOOL)
    record = await bench.close()
    leaf = record.nodes[2]
    assert (leaf.token_ids, leaf.sampled, leaf.parent) == ((ENDOFTEXT,), (True,), 1)
    assert leaf.position_start == record.nodes[1].position_start + len(record.nodes[1].token_ids)
    assert record.nodes[3].parent == 1, "the path goes on before the leaf"
    assert text(record, 3).startswith("<|im_end|>\n")
    # A turn that sampled nothing but the stop: its node holds the generation prompt alone.
    assert not any(record.nodes[4].sampled) and record.nodes[5].token_ids == (ENDOFTEXT,)
    assert record.num_sampled == 2 + 1 + 2
    assert bench.engine.stats().resident_cursors == 0


async def test_deltas_add_up_and_hold_whole_characters() -> None:
    bench = Bench()
    assert isinstance(bench.engine, ScriptedEngine)
    await bench.open(primitives=())
    bench.engine.scripts.append(ids("é漢", IM_END))
    events = [event async for event in bench.sessions.generate(bench.call(), USER)]
    deltas = [event for event in events if isinstance(event, TokenDelta)]
    reply = events[-1]
    assert isinstance(reply, TurnReply)
    assert [d.text for d in deltas] == ["", "é", "", "", "漢", ""]
    assert sum((d.token_ids for d in deltas), ()) == reply.turn.token_ids
    assert sum((d.sampled_logprobs for d in deltas), ()) == reply.turn.sampled_logprobs


async def _read(
    events: AsyncIterator[TokenDelta | TurnReply],
) -> tuple[list[TokenDelta], TurnReply]:
    *deltas, reply = [event async for event in events]
    assert isinstance(reply, TurnReply)
    return [delta for delta in deltas if isinstance(delta, TokenDelta)], reply


@pytest.mark.parametrize("stop", [(), ("STOP",), ("Sx",)])
async def test_events_of_the_deltas_add_up_to_the_turn(stop: tuple[str, ...]) -> None:
    bench = Bench()
    assert isinstance(bench.engine, ScriptedEngine)
    await bench.open(primitives=("done",))
    said = f"<think>hm</think>I look.{tool_call('done', answer='é [1]')} S"
    bench.engine.scripts.append(ids(said + "TOP" * bool(stop == ("STOP",)), IM_END))
    sampling = SamplingOptions(max_tokens=200, stop=stop)
    stream = bench.sessions.generate(bench.call(), USER, sampling=sampling, with_events=True)
    deltas, reply = await _read(stream)
    found = [event for delta in deltas for event in delta.events]
    whole = ParsedReply.of(found)
    assert (whole.text, whole.reasoning) == (reply.turn.text, reply.turn.reasoning)
    assert whole.tool_calls == reply.turn.tool_calls
    assert whole.text.endswith(" S") == (stop != ("STOP",))
    # The call begins, and its arguments come, before it is whole.
    kinds = [[type(event) for event in delta.events] for delta in deltas]
    begun, ended = kinds.index([CallBegun]), kinds.index([CallFinished])
    assert sum([CallArguments] == kind for kind in kinds[begun:ended]) > 5
    assert sum((delta.token_ids for delta in deltas), ()) == reply.turn.token_ids


async def test_deltas_hold_no_events_that_nobody_asked_for() -> None:
    bench = Bench()
    assert isinstance(bench.engine, ScriptedEngine)
    await bench.open(primitives=())
    bench.engine.scripts.append(ids("so", IM_END))
    deltas, _ = await _read(bench.sessions.generate(bench.call(), USER))
    assert len(deltas) == 3 and not any(delta.events for delta in deltas)


@pytest.mark.parametrize("is_repeat", [False, True])
async def test_a_turn_that_was_not_streamed_tells_its_events_at_once(is_repeat: bool) -> None:
    bench = Bench()
    assert isinstance(bench.engine, ScriptedEngine)
    await bench.open(primitives=("done",))
    said = "<think>hm</think>I look." + tool_call("done", answer="x")
    bench.engine.scripts.append(ids(said, IM_END))
    call = bench.call(idempotency_key="k")
    demonstration = None if is_repeat else said
    if is_repeat:
        _ = [event async for event in bench.sessions.generate(call, USER)]
    stream = bench.sessions.generate(call, USER, with_events=True, demonstration=demonstration)
    (delta,), reply = await _read(stream)
    assert ParsedReply.of(delta.events) == ParsedReply(
        text=reply.turn.text, reasoning="hm", tool_calls=reply.turn.tool_calls
    )
    (arguments,) = [event.text for event in delta.events if isinstance(event, CallArguments)]
    assert arguments == '{"answer": "x"}'


async def test_a_demonstration_is_recorded_as_sampled_and_parsed() -> None:
    bench = Bench()
    await bench.open()
    turn = await bench.say("root", tool_call("fork", branches={"a": "x"}))
    assert turn.tool_calls[0].name == "fork"
    record = await bench.close()
    node = record.nodes[1]
    assert node.kind is NodeKind.DEMONSTRATION
    assert node.token_ids[-1] == IM_END and node.sampled[-1]
    assert sum(node.sampled) == len(node.token_ids) - len(CHAT.generation_prompt)


async def test_stop_strings_cut_the_text_and_keep_the_tokens() -> None:
    bench = Bench()
    assert isinstance(bench.engine, ScriptedEngine)
    await bench.open(primitives=())
    bench.engine.scripts.append(ids("answer\n\nObs"))
    sampling = SamplingOptions(max_tokens=11, stop=("\n\nObs",))
    turn = await bench.sessions.turn(bench.call(), USER, sampling=sampling)
    assert turn.text == "answer"
    assert turn.raw_text == "answer\n\nObs"


async def test_a_cancelled_turn_leaves_the_head_and_no_residency() -> None:
    bench = Bench()
    engine = bench.engine
    assert isinstance(engine, ScriptedEngine)
    episode = await bench.open()
    await bench.say()
    head, resident = episode.root.head_id, engine.stats().resident_cursors
    engine.gate = asyncio.Event()
    engine.scripts.append(ids("long", IM_END))
    task = asyncio.ensure_future(bench.sessions.turn(bench.call(), TOOL))
    await engine.sampling.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert (episode.root.head_id, engine.stats().resident_cursors) == (head, resident)
    assert not episode.root.busy
    engine.gate = None
    engine.scripts.append(ids("again", IM_END))
    await bench.sessions.turn(bench.call(expected_head=head), TOOL)
    assert path_text(episode).count("4 hits") == 1


async def test_a_turn_cancelled_twice_gives_its_residency_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    bench = Bench()
    engine = bench.engine
    assert isinstance(engine, ScriptedEngine)
    episode = await bench.open()
    await bench.say()
    resident = engine.stats().resident_cursors
    releasing, may_release = asyncio.Event(), asyncio.Event()
    release = engine.release

    async def slow_release(cursors: Sequence[Cursor]) -> None:
        releasing.set()
        await may_release.wait()
        await release(cursors)

    monkeypatch.setattr(engine, "release", slow_release)
    engine.gate = asyncio.Event()
    engine.scripts.append(ids("long", IM_END))
    run = episode.run(bench.call(), "generate", lambda thread: take_turn(
        episode, thread, TurnRequest(messages=tuple(TOOL)), lambda delta: None
    ))  # fmt: skip
    turn = asyncio.ensure_future(run)
    await engine.sampling.wait()
    turn.cancel()
    await releasing.wait()
    body = episode.root.task
    assert body is not None
    for task in (turn, body):
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
    assert engine.stats().resident_cursors == resident + 1, "the release still waits"
    assert not episode.root.busy
    may_release.set()
    await episode.background.settle()
    assert engine.stats().resident_cursors == resident


async def test_an_engine_failure_is_typed_and_leaves_the_thread() -> None:
    bench = Bench()
    assert isinstance(bench.engine, ScriptedEngine)
    episode = await bench.open()
    bench.engine.failure = RuntimeError("out of luck")
    bench.engine.scripts.append(ids("x", IM_END))
    with pytest.raises(EngineError, match="out of luck") as caught:
        await bench.sessions.turn(bench.call(), USER)
    assert caught.value.episode_id == "e"
    assert episode.nodes == [] and bench.engine.stats().resident_cursors == 0
    bench.engine.failure = None
    bench.engine.scripts.append(ids("x", IM_END))
    assert (await bench.sessions.turn(bench.call(), USER)).step == 1


async def test_two_writers_never_interleave() -> None:
    bench = Bench()
    engine = bench.engine
    assert isinstance(engine, ScriptedEngine)
    episode = await bench.open(primitives=())
    engine.gate = asyncio.Event()
    engine.scripts.append(ids("x", IM_END))
    first = asyncio.ensure_future(bench.sessions.turn(bench.call(), USER))
    await engine.sampling.wait()
    with pytest.raises(StaleHead, match="another call runs on the thread: generate"):
        await bench.sessions.done(bench.call(), "late")
    before = episode.root.head_id
    engine.gate.set()
    await first
    with pytest.raises(StaleHead) as caught:
        await bench.sessions.done(bench.call(expected_head=before), "stale")
    assert (caught.value.value, caught.value.limit) == (
        f"expected head {before}",
        f"head {episode.root.head_id}",
    )


async def test_a_call_right_after_a_cancelled_one_waits_for_its_end() -> None:
    bench = Bench(busy_grace_s=5.0)
    engine = bench.engine
    assert isinstance(engine, ScriptedEngine)
    await bench.open()
    engine.gate = asyncio.Event()
    engine.scripts.append(ids("x", IM_END))
    first = asyncio.ensure_future(bench.sessions.turn(bench.call(), USER))
    await engine.sampling.wait()
    second = asyncio.ensure_future(bench.sessions.done(bench.call(), "answer"))
    await asyncio.sleep(0)
    first.cancel()
    assert (await second).status == "done"


async def test_a_repeated_key_returns_the_first_reply() -> None:
    bench = Bench()
    assert isinstance(bench.engine, ScriptedEngine)
    episode = await bench.open(primitives=())
    bench.engine.scripts.append(ids("once", IM_END))
    call = bench.call(expected_head=episode.root.head_id, idempotency_key="k")
    first = [event async for event in bench.sessions.generate(call, USER)]
    again = [event async for event in bench.sessions.generate(call, USER)]
    assert again[-1] == first[-1]
    delta, reply = again
    assert isinstance(delta, TokenDelta) and isinstance(reply, TurnReply)
    assert delta.token_ids == reply.turn.token_ids
    assert len(episode.nodes) == 2
    with pytest.raises(InvalidRequest, match="key was used for generate"):
        await bench.sessions.done(bench.call(idempotency_key="k"), "x")


async def test_a_concurrent_repeat_waits_for_the_first() -> None:
    bench = Bench()
    assert isinstance(bench.engine, ScriptedEngine)
    episode = await bench.open(primitives=())
    bench.engine.scripts.append(ids("once", IM_END))
    call = bench.call(idempotency_key="k")
    turns = await asyncio.gather(*(bench.sessions.turn(call, USER) for _ in range(3)))
    assert turns[0] == turns[1] == turns[2]
    assert len(episode.nodes) == 2


async def test_kept_replies_are_bounded() -> None:
    bench = Bench(max_replies=2)
    episode = await bench.open(primitives=())
    await bench.say()
    for index in range(4):
        await bench.sessions.fork(bench.call(idempotency_key=f"k{index}"), {f"b{index}": "x"})
    assert list(episode._replies._kept) == ["k2", "k3"]


@pytest.mark.parametrize(
    ("sampling", "name"),
    [
        (SamplingOptions(max_tokens=0), "max_tokens"),
        (SamplingOptions(temperature=-1), "temperature"),
        (SamplingOptions(temperature=1e-45), "temperature"),
        (SamplingOptions(temperature=float("nan")), "temperature"),
        (SamplingOptions(top_p=0), "top_p"),
        (SamplingOptions(top_p=0.9), "top_p"),
        (SamplingOptions(top_k=5), "top_k"),
        (SamplingOptions(structured=StructuredOutput(choice=("a",))), "structured=choice"),
    ],
)
async def test_sampling_that_cannot_be_served_is_refused(
    sampling: SamplingOptions, name: str
) -> None:
    bench = Bench()
    await bench.open()
    with pytest.raises(InvalidRequest, match=name):
        await bench.sessions.turn(bench.call(), USER, sampling=sampling)


async def test_tools_come_with_the_first_turn_alone() -> None:
    bench = Bench()
    episode = await bench.open()
    tools = '[{"type": "function", "function": {"name": "search", "parameters": {}}}]'
    await bench.sessions.turn(bench.call(), USER, tools_json=tools, demonstration="x")
    assert "Tools: search(), fork(branches)" in path_text(episode)
    await bench.fork("a")
    await bench.sessions.turn(bench.call("a"), (), tools_json=tools, demonstration="x")
    with pytest.raises(InvalidRequest, match="fixed by the root's first turn") as caught:
        other = tools.replace("search", "open")
        await bench.sessions.turn(bench.call("a"), (), tools_json=other, demonstration="x")
    assert (caught.value.value, caught.value.limit) == ("open", "search")


async def test_a_tool_with_a_primitives_name_is_refused() -> None:
    bench = Bench()
    await bench.open()
    tools = '[{"type": "function", "function": {"name": "done"}}]'
    with pytest.raises(InvalidRequest, match="not unique; got done"):
        await bench.sessions.turn(bench.call(), USER, tools_json=tools, demonstration="x")


async def test_unknown_addresses_and_ended_threads_are_typed() -> None:
    bench = Bench()
    await bench.open()
    with pytest.raises(EpisodeNotFound, match="no such episode"):
        bench.sessions.episode("other")
    with pytest.raises(ThreadNotFound) as caught:
        await bench.sessions.turn(bench.call("x"), USER)
    assert (caught.value.value, caught.value.limit) == ("x", "root")
    with pytest.raises(InvalidRequest, match="first turn has no messages"):
        await bench.sessions.turn(bench.call(), ())
    await bench.sessions.done(bench.call(), "a")
    with pytest.raises(ThreadEnded, match="no generate; got done"):
        await bench.sessions.turn(bench.call(), USER)


async def test_refresh_takes_the_newest_version_and_keep_the_first() -> None:
    for policy, expected in (("keep", 0), ("refresh", 1)):
        bench = Bench()
        await bench.engine.load_adapter(1, "")
        await bench.open(version_policy=policy, primitives=())
        await bench.say()
        bench.version = 1
        turn = await bench.say()
        assert turn.policy_version == expected
        assert bench.sessions.versions_in_use() == ({0} if policy == "keep" else set())
        record = await bench.close()
        assert [node.policy_version for node in record.nodes] == [0, 0, expected, expected]


async def test_a_refreshing_episode_holds_a_version_only_while_it_computes() -> None:
    bench = Bench()
    engine = bench.engine
    assert isinstance(engine, ScriptedEngine)
    for version in (1, 2):
        await engine.load_adapter(version, "")
    bench.version = 1
    episode = await bench.open(version_policy="refresh")
    engine.gate = asyncio.Event()
    engine.scripts.append(CHAT.reply(LOOK))
    turn = asyncio.ensure_future(bench.sessions.turn(bench.call(), USER))
    await engine.sampling.wait()
    bench.version = 2
    assert bench.sessions.versions_in_use() == {1}
    engine.gate.set()
    assert (await turn).policy_version == 1
    assert bench.sessions.versions_in_use() == set()
    await bench.fork("a", "b")
    waiting = asyncio.ensure_future(bench.wait("a", timeout_s=0.1))
    await asyncio.sleep(0.01)
    assert episode.root.status is ThreadStatus.WAITING
    assert bench.sessions.versions_in_use() == set()
    await engine.unload_adapter(1)
    for name in ("b", "a"):
        await bench.say(name)
        await bench.say(name)
    await bench.sessions.read_thread(bench.call("a"), "b", 1, 1)
    await bench.sessions.done(bench.call("a"), "x")
    await waiting
    # Its note is appended by the read, under a version that is still there.
    await bench.sessions.read_thread(bench.call(), "b", 1, 1)
    assert (await bench.say()).policy_version == 2
    record = await bench.close()
    assert [node.policy_version for node in record.nodes] == [1, 1] + [2] * (len(record.nodes) - 2)
