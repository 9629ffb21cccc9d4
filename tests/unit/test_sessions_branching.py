"""fork, rewind, read_thread, wait, done and cancel: what each does to the DAG and the budget."""

from __future__ import annotations

import asyncio

import pytest

from harness_sdk.errors import (
    BudgetExhausted,
    InvalidRequest,
    ThreadEnded,
    ThreadNotFound,
)
from harness_sdk.record import NodeKind
from harness_sdk.types import BranchResult, Limits, Message, ThreadStatus
from rollout_service.sessions.replies import WaitReply
from tests.session_cases import CHAT, Bench, ScriptedEngine, path_text, text


async def test_children_branch_after_the_turn_and_hear_their_sub_task() -> None:
    bench = Bench()
    episode = await bench.open(primitives=())
    await bench.say("root", "I fork")
    reply = await bench.sessions.fork(bench.call(), {"b": "find B", "a": "find A"})
    assert [forked.thread_id for forked in reply.threads] == ["b", "a"]
    assert reply.budget.threads_left == 8
    await bench.say("a", "A says")
    await bench.say("root", "going on", "result")
    turn = episode.root.steps[1].turn
    child = episode.thread("a").steps[0].nodes[0].cursor
    assert child.parent is turn
    assert CHAT.tokenizer.decode(child.token_ids) == (
        "\n<|im_start|>user\n<tool_response>\n[branch a] find A\n</tool_response><|im_end|>\n"
    )
    assert path_text(episode).endswith(
        "I fork<|im_end|>\n<|im_start|>user\n<tool_response>\n[fork] b, a\n</tool_response>\n"
        "<tool_response>\nresult\n</tool_response><|im_end|>\n<|im_start|>assistant\n"
        "going on<|im_end|>"
    )
    assert path_text(episode).count("<|im_end|>") == path_text(episode).count("<|im_start|>")
    assert episode.thread("a").tokens_used == sum(
        len(node.cursor.token_ids) for node in episode.nodes if node.thread_id == "a"
    )
    # A child with nothing said of its own holds its sub-task until its first turn.
    assert episode.thread("b").head is turn


async def test_a_child_may_fork_before_its_first_turn() -> None:
    bench = Bench()
    episode = await bench.open()
    await bench.say()
    await bench.fork("a")
    await bench.fork("aa", thread="a")
    await bench.say("aa", "deep")
    assert "do a" in path_text(episode, "aa") and "do aa" in path_text(episode, "aa")
    assert episode.thread("aa").depth == 2
    with pytest.raises(InvalidRequest, match="no fork before the first turn"):
        other = Bench()
        await other.open()
        await other.fork("a")


@pytest.mark.parametrize("name", ["", " ", "root", "a"])
async def test_bad_branch_names_are_refused(name: str) -> None:
    bench = Bench()
    episode = await bench.open()
    await bench.say()
    await bench.fork("a")
    with pytest.raises(InvalidRequest, match="empty, reserved or taken"):
        await bench.sessions.fork(bench.call(), {"new": "x", name: "x"})
    assert list(episode.threads) == ["root", "a"], "a refused fork starts nobody"


async def test_thread_and_depth_limits_name_value_and_limit() -> None:
    bench = Bench()
    await bench.open(limits=Limits(max_threads=2, max_depth=1))
    await bench.say()
    await bench.fork("a")
    with pytest.raises(BudgetExhausted) as caught:
        await bench.fork("b", "c")
    assert (caught.value.value, caught.value.limit) == ("2 more beside 1", "2 children")
    await bench.say("a")
    with pytest.raises(BudgetExhausted, match="too deep; got 2; allowed: 1"):
        await bench.fork("aa", thread="a")
    await bench.fork("b")


async def test_a_read_mounts_the_steps_and_jumps() -> None:
    bench = Bench()
    episode = await bench.open()
    await bench.say()
    await bench.fork("a", "b")
    await bench.say("a", "finding one <tool_call>")
    await bench.say("a", "finding two <tool_call>", "obs")
    await bench.say("a", "unfinished <tool_call>", "obs")
    before = episode.thread("b").head
    reply = await bench.sessions.read_thread(bench.call("b"), "a", 0, 99)
    source = episode.thread("a")
    spans = [node.cursor for step in source.steps[1:3] for node in step.nodes]
    reader = episode.thread("b")
    assert reply.result.first_step == 1 and reply.result.last_step == 2
    assert reply.result.tokens_mounted == sum(len(c.token_ids) for c in spans)
    assert [mount.source for mount in reader.mounts] == spans
    stub = reader.head
    assert stub is not None and stub.parent is not before
    assert stub.position_start == max(c.next_position for c in spans)
    assert reply.result.next_position == stub.next_position
    assert reader.tokens_used == sum(len(n.cursor.token_ids) for n in reader.steps[0].nodes)
    assert [n.kind for n in reader.steps[0].nodes] == [NodeKind.NOTE, NodeKind.STUB]
    assert f"[read] a steps 1-2, {reply.result.tokens_mounted} tokens" in path_text(episode, "b")
    again = await bench.sessions.read_thread(bench.call("b"), "a", 1, 2)
    assert (again.result.tokens_mounted, reader.head) == (0, stub)
    assert again.result.next_position == stub.next_position
    assert "already visible" in again.result.stub


async def test_a_read_is_transitive_and_visibility_is_a_set() -> None:
    bench = Bench()
    episode = await bench.open()
    await bench.say()
    await bench.fork("a", "b", "c")
    for name in ("a", "b"):
        await bench.say(name, f"{name} <tool_call>")
        await bench.say(name, f"{name} <tool_call>")
    await bench.sessions.read_thread(bench.call("b"), "a", 1, 1)
    await bench.say("b", "read it <tool_call>")
    await bench.sessions.read_thread(bench.call("c"), "b", 2, 2)
    a, b, c = (episode.thread(name) for name in "abc")
    sources = [mount.source for mount in c.mounts]
    assert sources == [
        *(node.cursor for node in a.steps[1].nodes),
        *(node.cursor for node in b.steps[2].nodes),
    ]
    # Mutual: a reads b, whose step 2 mounted a's own step 1, which a sees already.
    await bench.sessions.read_thread(bench.call("a"), "b", 1, 2)
    assert [m.source for m in a.mounts] == [n.cursor for s in b.steps[1:3] for n in s.nodes]
    assert len(set(sources)) == len(sources)


async def test_a_transitive_read_does_not_depend_on_what_its_source_saw_before() -> None:
    bench = Bench()
    episode = await bench.open()
    await bench.say()
    await bench.fork("x", "y", "s", "r", "q")
    for name in "xysrq":
        await bench.say(name)
    await bench.say("y")
    await bench.sessions.read_thread(bench.call("x"), "y", 1, 1)
    await bench.say("x")
    await bench.sessions.read_thread(bench.call("s"), "y", 1, 1)
    await bench.say("s")
    # s sees y already, so its second step mounts x alone, and its third nothing.
    await bench.sessions.read_thread(bench.call("s"), "x", 1, 1)
    await bench.say("s")
    nothing = await bench.sessions.read_thread(bench.call("s"), "x", 1, 1)
    assert nothing.result.tokens_mounted == 0
    await bench.say("s")

    def sources(reader: str) -> set[str]:
        mounted = {mount.source for mount in episode.thread(reader).mounts}
        return {node.thread_id for node in episode.nodes if node.cursor in mounted}

    for reader, step in (("r", 2), ("q", 3)):
        await bench.sessions.read_thread(bench.call(reader), "s", step, step)
        assert sources(reader) == {"s", "x", "y"}


async def test_reading_an_ancestor_mounts_only_what_follows_the_fork() -> None:
    bench = Bench()
    episode = await bench.open()
    await bench.say()
    await bench.fork("a")
    with pytest.raises(InvalidRequest, match="finished steps none yet"):
        await bench.sessions.read_thread(bench.call("a"), "root", 1, 9)
    await bench.say()
    await bench.say()
    reply = await bench.sessions.read_thread(bench.call("a"), "root", 1, 9)
    assert (reply.result.first_step, reply.result.last_step) == (2, 2)
    mounted = [mount.source for mount in episode.thread("a").mounts]
    assert mounted == [node.cursor for node in episode.root.steps[2].nodes]


async def test_bad_reads_are_refused_with_the_finished_range() -> None:
    bench = Bench()
    episode = await bench.open()
    with pytest.raises(InvalidRequest, match="before the first turn"):
        await bench.sessions.read_thread(bench.call(), "x", 1, 1)
    await bench.say()
    await bench.fork("a")
    head = episode.root.head_id
    for branch, first, last, match in (
        ("a", 1, 1, "finished steps none yet"),
        ("root", 1, 1, "cannot read itself"),
    ):
        with pytest.raises(InvalidRequest, match=match):
            await bench.sessions.read_thread(bench.call(), branch, first, last)
    with pytest.raises(ThreadNotFound, match="allowed: root, a"):
        await bench.sessions.read_thread(bench.call(), "nobody", 1, 1)
    await bench.say("a")
    await bench.sessions.done(bench.call("a"), "x")
    for first, last in ((2, 1), (2, 5)):
        with pytest.raises(InvalidRequest, match=r"got \[.*finished steps 1 to 1"):
            await bench.sessions.read_thread(bench.call(), "a", first, last)
    assert episode.root.head_id == head


async def test_rewound_steps_stay_visible_to_their_readers_alone() -> None:
    bench = Bench()
    episode = await bench.open()
    await bench.say()
    await bench.fork("a", "b", "c")
    await bench.say("a", "lost <tool_call>")
    await bench.say("a", "kept <tool_call>")
    await bench.sessions.read_thread(bench.call("b"), "a", 1, 1)
    lost = {node.cursor for node in episode.thread("a").steps[1].nodes}
    await bench.sessions.rewind(bench.call("a"), 0)
    assert isinstance(bench.engine, ScriptedEngine)
    assert lost.isdisjoint(bench.engine.evicted), "b still reads them"
    await bench.say("a", "anew <tool_call>")
    await bench.say("a", "anew <tool_call>")
    await bench.sessions.read_thread(bench.call("c"), "a", 1, 1)
    assert lost == {mount.source for mount in episode.thread("b").mounts}
    assert lost.isdisjoint(mount.source for mount in episode.thread("c").mounts)
    # They do not come back to their own thread through its reader either.
    await bench.say("b")
    await bench.sessions.done(bench.call("b"), "x")
    await bench.sessions.read_thread(bench.call("a"), "b", 1, 1)
    assert lost.isdisjoint(mount.source for mount in episode.thread("a").mounts)


async def test_wait_streams_each_as_it_ends_and_appends_a_note() -> None:
    bench = Bench()
    episode = await bench.open()
    await bench.say()
    await bench.fork("a", "b")
    await bench.say("b", "found it <tool_call>")
    waiting = asyncio.ensure_future(bench.wait())
    await asyncio.sleep(0.01)
    assert episode.root.status is ThreadStatus.WAITING
    await bench.sessions.done(bench.call("b"), "B!", "because")
    await bench.sessions.cancel(bench.call("a"), "no time")
    first, second, reply = await waiting
    assert isinstance(first, BranchResult) and isinstance(second, BranchResult)
    assert (first.thread_id, first.status, first.answer) == ("b", "done", "B!")
    assert (second.status, second.summary) == (ThreadStatus.CANCELLED, "no time")
    assert first.steps[0].step == 1 and first.steps[0].summary == "bad call"
    assert isinstance(reply, WaitReply)
    assert [result.thread_id for result in reply.results] == ["a", "b"]
    assert episode.root.status is ThreadStatus.RUNNING
    await bench.say("root", "x")
    assert "[wait] a cancelled\n[wait] b done; answer: B!; evidence: because" in path_text(episode)
    record = await bench.close()
    assert [node.joined for node in record.nodes if node.joined] == [("a", "b")]
    told = next(node for node in record.nodes if node.joined)
    assert "[wait] a cancelled" in text(record, told.node_id)


async def test_what_the_end_finds_at_work_is_cancelled() -> None:
    bench = Bench()
    await bench.open()
    await bench.say()
    await bench.fork("a", "b")
    await bench.fork("aa", thread="a")
    await bench.sessions.done(bench.call("b"), "B!")
    await bench.sessions.done(bench.call("root"), "R!")
    record = await bench.close()
    ends = {thread.thread_id: thread.status for thread in record.threads}
    assert ends == {"root": "done", "a": "cancelled", "b": "done", "aa": "cancelled"}


@pytest.mark.parametrize(
    ("kind", "status"), [("ToolError", "failed"), ("Cancelled", "cancelled"), ("", "cancelled")]
)
async def test_a_root_without_an_end_takes_the_episodes(kind: str, status: str) -> None:
    bench = Bench()
    await bench.open()
    await bench.say()
    assert [each.status for each in (await bench.close(error_kind=kind)).threads] == [status]


async def test_wait_gives_up_at_its_deadline() -> None:
    bench = Bench()
    await bench.open()
    await bench.say()
    await bench.fork("a", "b")
    await bench.sessions.done(bench.call("a"), "x")
    ended, reply = await bench.wait(timeout_s=0.02)
    assert isinstance(ended, BranchResult) and ended.thread_id == "a"
    assert isinstance(reply, WaitReply)
    assert [result.status for result in reply.results] == ["done", "running"]


async def test_wait_is_for_descendants_alone() -> None:
    bench = Bench()
    await bench.open()
    await bench.say()
    with pytest.raises(InvalidRequest, match="nobody to wait for"):
        await bench.wait()
    await bench.fork("a", "b")
    await bench.fork("aa", thread="a")
    events = bench.sessions.wait(bench.call("a"), ["b"])
    with pytest.raises(InvalidRequest, match="descendants alone; got b; allowed: aa"):
        _ = [event async for event in events]
    await bench.sessions.done(bench.call("aa"), "x")
    assert len(await bench.wait("aa")) == 2, "grandchildren are descendants"


async def test_cancel_ends_a_thread_and_its_descendants_once() -> None:
    bench = Bench()
    await bench.open()
    await bench.say()
    await bench.fork("a")
    await bench.fork("aa", thread="a")
    assert await bench.sessions.cancel(bench.call("a", expected_head=0)) == ("a", "aa")
    assert await bench.sessions.cancel(bench.call("a")) == ()
    with pytest.raises(ThreadEnded):
        await bench.say("aa")
    await bench.fork("b")
    for _ in range(2):
        # The client drops a thread's tasks by this reply, so a repeat must not lose it.
        assert await bench.sessions.cancel(bench.call("b", idempotency_key="k")) == ("b",)
    await bench.say("root", "I go on")
    record = await bench.close()
    assert [t.status for t in record.threads] == ["cancelled"] * 4
    assert record.stop_reason == "agent_ended"
    assert [n.rewound for n in record.nodes if n.thread_id == "a"] == [True]


async def test_a_read_flushes_what_was_pending_first() -> None:
    bench = Bench()
    episode = await bench.open()
    await bench.say()
    await bench.fork("a")
    await bench.say("a")
    await bench.say("a")
    await bench.sessions.read_thread(bench.call(), "a", 1, 1)
    await bench.sessions.turn(
        bench.call(), [Message(role="tool", content="late")], demonstration="x"
    )
    record = await bench.close()
    observed = [text(record, n.node_id) for n in record.nodes if n.thread_id == "root"][2:5]
    assert "[fork] a" in observed[0] and observed[0].startswith("\n<|im_start|>")
    assert observed[1].startswith("<|im_start|>user\n<tool_response>\n[read] a steps 1-1")
    assert "late" in observed[2] and "[readable] a 1-1" in observed[2]
    kinds = [n.kind for n in record.nodes if n.thread_id == "root"]
    assert kinds[2:5] == [NodeKind.NOTE, NodeKind.STUB, NodeKind.NOTE]
    assert [n.step for n in record.nodes if n.thread_id == "root"] == [0, 1, 1, 1, 1, 2]
    assert len(episode.root.steps[1].mounted) == 2
