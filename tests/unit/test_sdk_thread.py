"""Threads against a scripted gRPC server: turns, streams, heads, children."""

from __future__ import annotations

import asyncio
import contextlib
import inspect

import pytest

import harness_sdk._waiting
from harness_sdk import (
    Message,
    OctopusClient,
    SamplingOptions,
    Thread,
    ThreadStatus,
    TokenDelta,
    Turn,
)
from harness_sdk.errors import ClientClosed, InvalidRequest, ThreadEnded
from tests.unit.scripted_server import Hang, ScriptedServer, call, reply, until


async def test_generate_sends_the_new_messages_and_returns_the_turn(
    server: ScriptedServer, client: OctopusClient
) -> None:
    server.turns["root"] = [reply(call("search", {"query": "x"}), text="hm")]

    async def search(query: str) -> str:
        """Search."""
        return query

    async with client.episode(sampling=SamplingOptions(temperature=0.5)) as episode:
        turn = await episode.root.generate(
            [Message(role="system", content="be brief"), "hello"], tools=[search]
        )
        assert (turn.step, turn.text, turn.token_ids) == (1, "hm", (7, 8))
        assert turn.sampled_logprobs == (-0.5, -0.25)
        assert turn.tool_calls[0].arguments == {"query": "x"}
        assert episode.root.budget is not None
        assert episode.root.budget.tokens_left == 1000
    (request,) = server.of("Generate")
    assert [(m.role, m.content) for m in request.messages] == [
        ("system", "be brief"),
        ("user", "hello"),
    ]
    assert '"name": "search"' in request.tools_json
    assert request.sampling.temperature == 0.5
    assert not request.HasField("demonstration")


async def test_stream_yields_deltas_then_the_turn(
    server: ScriptedServer, client: OctopusClient
) -> None:
    server.turns["root"] = [reply(text="ab")]
    async with client.episode() as episode:
        events = [event async for event in episode.root.stream("hello")]
    assert [event.text for event in events if isinstance(event, TokenDelta)] == ["a", "b"]
    assert isinstance(events[-1], Turn)


async def test_leaving_a_stream_early_cancels_the_turn(
    server: ScriptedServer, client: OctopusClient
) -> None:
    server.turns["root"] = [Hang()]
    async with client.episode() as episode:
        async with contextlib.aclosing(episode.root.stream("hello")) as events:
            async for _ in events:
                break
        await until(lambda: server.cancelled_calls == ["Generate root"])


async def test_second_call_on_a_busy_thread_is_refused(
    server: ScriptedServer, client: OctopusClient
) -> None:
    server.turns["root"] = [Hang()]
    async with client.episode() as episode:
        running = episode.spawn(episode.root.generate("a"))
        await until(lambda: server.of("Generate"))
        with pytest.raises(InvalidRequest, match="got generate"):
            await episode.root.fork({"a": "b"})
        running.cancel()


async def test_fork_wait_read_and_done_move_the_heads(
    server: ScriptedServer, client: OctopusClient
) -> None:
    server.turns.update({"root": [reply(), reply()], "a": [reply()], "b": [reply()]})
    seen: list[str] = []

    async def work(child: Thread) -> None:
        await child.generate()
        await child.done(child.prompt.upper())

    async with client.episode() as episode:
        root = episode.root
        await root.generate("split")
        children = await root.fork({"a": "do a", "b": "do b"}, run=work)
        results = await root.wait(["a", children["b"]], on_ended=lambda r: seen.append(r.thread_id))
        assert [result.answer for result in results] == ["DO A", "DO B"]
        assert children["a"].status is ThreadStatus.DONE
        assert children["a"].answer == "DO A"
        assert seen == ["a", "b"]
        read = await root.read_thread(children["a"], (1, 2))
        assert (read.branch, read.tokens_mounted) == ("a", 12)
        await root.generate()
        await root.done("both")
        assert root.ended
        with pytest.raises(ThreadEnded, match="fork before the thread ends"):
            await root.generate("more")


async def test_children_of_children_are_found_by_their_name(
    server: ScriptedServer, client: OctopusClient
) -> None:
    server.turns["root"] = [reply()]
    async with client.episode() as episode:
        child = (await episode.root.fork({"a": "x"}))["a"]
        grandchild = (await child.fork({"a": "y"}))["a"]
        assert grandchild.thread_id == "a.a"
        await episode.root.read_thread("a", (1, 1))
        await child.read_thread("a", (1, 1))
        await child.read_thread("root", (1, 1))
    assert [request.branch for request in server.of("ReadThread")] == ["a", "a.a", "root"]


async def test_rewind_cancels_the_tasks_of_cancelled_children(
    server: ScriptedServer, client: OctopusClient
) -> None:
    server.turns.update({"root": [reply()], "a": [Hang()]})
    server.rewind_cancels = ("a",)
    async with client.episode() as episode:
        await episode.root.generate("x")
        child = (await episode.root.fork({"a": "x"}))["a"]
        task = child.spawn(child.generate())
        await until(lambda: len(server.of("Generate")) == 2)
        result = await episode.root.rewind(0, note="dead end")
        assert (result.cancelled_threads, episode.root.step) == (("a",), 0)
        assert task.cancelled()
        assert child.status is ThreadStatus.CANCELLED
    assert server.cancelled_calls == ["Generate a"]


async def test_tasks_that_never_begin_leave_no_trace(
    server: ScriptedServer, client: OctopusClient
) -> None:
    server.turns["root"] = [reply()]

    async def work() -> None:
        raise AssertionError("it is cancelled before its first step")

    early, late = work(), work()
    async with client.episode() as episode:
        await episode.root.generate("x")
        child = (await episode.root.fork({"a": "x"}))["a"]
        task = child.spawn(early)
        task.cancel()
        await episode.close(reward=0.0)
        with pytest.raises(ClientClosed):
            child.spawn(late)
    assert task.cancelled()
    # A coroutine that is left behind would warn once it is collected.
    assert {inspect.getcoroutinestate(each) for each in (early, late)} == {inspect.CORO_CLOSED}


async def test_child_whose_agent_returns_without_done_is_cancelled(
    server: ScriptedServer, client: OctopusClient
) -> None:
    async def idle(child: Thread) -> None:
        return None

    async with client.episode() as episode:
        await episode.root.fork({"a": "x"}, run=idle)
        (result,) = await episode.root.wait(["a"])
        assert result.status is ThreadStatus.CANCELLED


async def _wait_a_while(thread: Thread, *branches: str) -> None:
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(0.7):
            await thread.wait(branches)


@pytest.fixture
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(harness_sdk._waiting, "UNRUN_S", 0.2)


@pytest.mark.usefixtures("soon")
async def test_wait_for_children_that_nobody_runs_names_them_once(
    client: OctopusClient, caplog: pytest.LogCaptureFixture
) -> None:
    async def idle(child: Thread) -> None:
        await child.until_ended()

    async with client.episode() as episode:
        await episode.root.fork({"left": "x", "right": "y"})
        await episode.root.fork({"run": "z"}, run=idle)
        await _wait_a_while(episode.root, "left", "right", "run")
        await episode.root.children["run"].cancel()
    told = [r for r in caplog.records if r.name == "harness_sdk._waiting"]
    assert [r.levelname for r in told] == ["WARNING"] * 2
    assert told[0].getMessage().startswith("thread root waits for left, which nobody runs: for 0 s")
    assert told[1].getMessage().startswith("thread root waits for right, which nobody runs")
    assert "give fork run=, or child.spawn its agent" in told[0].getMessage()
    assert "timeout_s" in told[0].getMessage()
    assert vars(told[0])["episode_id"] == episode.episode_id


@pytest.mark.usefixtures("soon")
async def test_wait_for_a_child_that_is_being_called_says_nothing(
    server: ScriptedServer, client: OctopusClient, caplog: pytest.LogCaptureFixture
) -> None:
    server.turns["a"] = [Hang()]
    async with client.episode() as episode:
        child = (await episode.root.fork({"a": "x"}))["a"]
        # Not a task of the episode: the caller's own.
        turn = asyncio.create_task(child.generate())
        await until(lambda: server.of("Generate"))
        await _wait_a_while(episode.root, "a")
        assert "nobody runs" not in caplog.text
        turn.cancel()
        await asyncio.gather(turn, return_exceptions=True)
        # Its caller has gone and nobody took over.
        await _wait_a_while(episode.root, "a")
    assert caplog.text.count("thread root waits for a, which nobody runs") == 1


@pytest.mark.usefixtures("soon")
async def test_wait_for_every_child_knows_them_and_forgets_the_ended(
    server: ScriptedServer, client: OctopusClient, caplog: pytest.LogCaptureFixture
) -> None:
    async with client.episode() as episode:
        children = await episode.root.fork({"a": "x", "b": "y"})
        await children["a"].fork({"deep": "z"})
        await children["b"].done("b")
        assert episode.root._idle_s(()).keys() == {"a"}
        assert episode.root._idle_s(("a.deep", "b")).keys() == {"deep (a.deep)"}
        server.ended["a"].clear()
        await _wait_a_while(episode.root, "a")
    assert "waits for a, which" in caplog.text
    assert "waits for b" not in caplog.text and "waits for deep" not in caplog.text


async def test_negative_step_is_refused_before_it_is_sent(client: OctopusClient) -> None:
    async with client.episode() as episode:
        with pytest.raises(InvalidRequest, match="-1"):
            await episode.root.rewind(-1)
