"""rewind: back to exactly the cursor after a step, whatever followed it."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest

from harness_sdk.errors import InvalidRequest, StepNotFound, ThreadEnded
from harness_sdk.record import NodeKind
from harness_sdk.types import ThreadStatus
from rollout_service.cursors import Cursor
from rollout_service.sessions.replies import WaitReply
from tests.session_cases import ALL, CHAT, LOOK, Bench, ScriptedEngine, path_text


async def test_rewind_returns_tokens_and_keeps_turns_and_the_dag() -> None:
    bench = Bench()
    episode = await bench.open(primitives=())
    await bench.say("root", "one")
    await bench.say("root", "two", "first")
    used = episode.root.tokens_used
    turn = await bench.say("root", "three", "second")
    await bench.say("root", "four", "third")
    dropped = episode.root.tokens_used - used
    reply = await bench.sessions.rewind(bench.call(), 1, "dead end")
    step_two = sum(len(n.cursor.token_ids) for n in episode.nodes if n.step >= 2)
    assert reply.result.tokens_returned == step_two > dropped
    assert reply.budget.tokens_used == episode.root.tokens_used
    assert reply.budget.turns_left == 50 - 4
    after = await bench.say("root", "again")
    assert after.step == 2 and turn.step == 3
    seen = path_text(episode)
    assert "[rewind 1] dead end" in seen and "second" not in seen and "first" in seen
    record = await bench.close()
    assert [n.rewound for n in record.nodes] == [
        *[False] * 3, *[True] * 5, False, False
    ]  # fmt: skip
    assert record.nodes[8].parent == 2 and record.nodes[8].kind is NodeKind.NOTE
    assert record.threads[0].num_rewinds == 1


async def test_rewind_to_an_unknown_step_names_the_allowed_ones() -> None:
    bench = Bench()
    episode = await bench.open()
    with pytest.raises(StepNotFound, match="allowed: none before"):
        await bench.sessions.rewind(bench.call(), 0)
    await bench.say()
    await bench.say()
    for step in (2, 7):
        with pytest.raises(StepNotFound, match=f"got {step}; allowed: 0 to 1"):
            await bench.sessions.rewind(bench.call(), step)
    assert episode.root.steps[-1].number == 2


async def test_rewind_cancels_children_forked_later_with_their_work() -> None:
    bench = Bench()
    engine = bench.engine
    assert isinstance(engine, ScriptedEngine)
    episode = await bench.open()
    await bench.say()
    await bench.fork("early")
    await bench.say()
    await bench.fork("late")
    await bench.say("late")
    await bench.fork("later", thread="late")
    await bench.fork("ended")
    await bench.sessions.done(bench.call("ended"), "x")
    engine.gate = asyncio.Event()
    engine.scripts.append(CHAT.reply("never"))
    running = asyncio.ensure_future(bench.sessions.turn(bench.call("later")))
    await engine.sampling.wait()
    reply = await bench.sessions.rewind(bench.call(), 1)
    assert reply.result.cancelled_threads == ("late", "later")
    with pytest.raises(ThreadEnded, match="was ended during generate"):
        await running
    orphans = {name for name, thread in episode.threads.items() if thread.orphan}
    assert orphans == {"late", "later", "ended"}
    assert episode.thread("early").status is ThreadStatus.RUNNING
    with pytest.raises(InvalidRequest, match="rewound"):
        await bench.sessions.read_thread(bench.call(), "late", 1, 1)
    record = await bench.close()
    assert all(node.rewound for node in record.nodes if node.thread_id in orphans)
    assert {t.thread_id: t.orphan for t in record.threads}["early"] is False


async def test_a_rewind_whose_caller_leaves_is_whole_and_keeps_its_reply(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    bench = Bench()
    episode = await bench.open()
    await bench.say()
    await bench.say()
    await bench.fork("a")
    evicting, may_evict = asyncio.Event(), asyncio.Event()
    evict = bench.engine.evict

    async def slow_evict(cursors: Sequence[Cursor]) -> None:
        evicting.set()
        await may_evict.wait()
        await evict(cursors)

    monkeypatch.setattr(bench.engine, "evict", slow_evict)
    call = bench.call(expected_head=episode.root.head_id, idempotency_key="k")
    rewinding = asyncio.ensure_future(bench.sessions.rewind(call, 0, "n"))
    await evicting.wait()
    rewinding.cancel()
    with pytest.raises(asyncio.CancelledError):
        await rewinding
    child = episode.thread("a")
    assert (child.status, child.orphan) == (ThreadStatus.CANCELLED, True)
    assert episode.root.head is episode.root.steps[0].head
    reply = await bench.sessions.rewind(call, 0, "n")
    assert (reply.head, reply.result.cancelled_threads) == (episode.root.head_id, ("a",))
    may_evict.set()
    await bench.close()
    assert isinstance(bench.engine, ScriptedEngine)
    dropped = {node.cursor for node in episode.nodes if node.rewound}
    assert dropped <= set(bench.engine.evicted), "the eviction went on without its caller"


async def test_rewind_says_again_what_is_still_true() -> None:
    bench = Bench()
    episode = await bench.open()
    await bench.say()
    await bench.fork("a")
    await bench.say()
    await bench.say("a")
    await bench.sessions.done(bench.call("a"), "42")
    await bench.say()
    await bench.wait("a")
    await bench.say()
    assert path_text(episode).count("[readable] a 1-1; read_thread(branch, steps)") == 1
    assert path_text(episode).count("[wait] a done; answer: 42; steps 1-1") == 1
    await bench.sessions.rewind(bench.call(), 1, "n")
    assert "[wait]" not in path_text(episode)
    await bench.say()
    seen = path_text(episode)
    assert seen.count("[readable] a 1-1; read_thread(branch, steps)") == 1
    assert seen.count("[wait] a done; answer: 42; steps 1-1") == 1
    assert seen.count("[fork] a") == 1


async def test_a_repeated_rewind_returns_to_the_same_state() -> None:
    bench = Bench()
    episode = await bench.open(primitives=ALL)
    await bench.say()
    await bench.fork("peer")
    await bench.say("peer")
    await bench.say("peer")
    await bench.say("root", LOOK, "kept")
    await bench.say()
    base = episode.root.steps[1].head
    used = sum(step.num_tokens for step in episode.root.steps[:2])
    for note in ("try A", "try B", "try C"):
        await bench.sessions.rewind(bench.call(), 1, note)
        assert (episode.root.head, episode.root.tokens_used, episode.root.mounts) == (
            base,
            used,
            (),
        )
        await bench.sessions.read_thread(bench.call(), "peer", 1, 1)
        await bench.fork(f"after {note}")
        mounted = {node.cursor for node in episode.thread("peer").steps[1].nodes}
        assert {mount.source for mount in episode.root.mounts} == mounted
    reply = await bench.sessions.rewind(bench.call(), 1, "last")
    assert reply.result.tokens_returned > 0
    assert reply.result.cancelled_threads == ("after try C",)
    turn = await bench.say("root", LOOK, "now")
    assert turn.step == 2
    seen = path_text(episode)
    assert "[rewind 1] last" in seen and "kept" in seen and "try" not in seen
    assert seen.count("[readable] peer 1-1; read_thread(branch, steps)") == 1
    record = await bench.close()
    kinds = [(n.step, n.kind) for n in record.nodes[-2:]]
    assert kinds == [(2, NodeKind.NOTE), (2, NodeKind.DEMONSTRATION)]


async def test_what_follows_a_rewind_is_read_with_the_step_that_it_begins() -> None:
    bench = Bench()
    episode = await bench.open()
    await bench.say()
    await bench.fork("a", "reader")
    await bench.say("reader")
    await bench.say("a")
    await bench.say("a")
    await bench.sessions.rewind(bench.call("a"), 1, "n")
    await bench.fork("aa", thread="a")
    for _ in range(2):
        await bench.say("a")
    a = episode.thread("a")
    assert [node.kind for node in a.steps[2].nodes][:2] == [NodeKind.NOTE, NodeKind.NOTE]
    await bench.sessions.read_thread(bench.call("reader"), "a", 2, 2)
    mounted = [mount.source for mount in episode.thread("reader").mounts]
    assert mounted == [node.cursor for node in a.steps[2].nodes]
    # The child's prefix ends inside step 2: it may read the rest of it.
    await bench.sessions.read_thread(bench.call("aa"), "a", 1, 9)
    mounted = [mount.source for mount in episode.thread("aa").mounts]
    assert mounted == [node.cursor for node in a.steps[2].nodes[1:]]


async def test_a_thread_that_ends_right_after_a_rewind_has_no_step_without_a_turn() -> None:
    bench = Bench()
    episode = await bench.open()
    await bench.say()
    await bench.fork("a")
    await bench.say("a", "first <tool_call>")
    await bench.say("a")
    await bench.sessions.rewind(bench.call("a"), 1)
    await bench.sessions.done(bench.call("a"), "x")
    (_, reply) = await bench.wait("a")
    assert isinstance(reply, WaitReply)
    (result,) = reply.results
    assert [step.step for step in result.steps] == [1] and result.summary == "bad call"
    assert episode.thread("a").last_finished == 1
