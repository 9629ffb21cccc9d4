"""Calls whose caller left before the reply: the thread goes on, and learns what they did."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from typing import Any

import pytest

from harness_sdk import Episode, OctopusClient, Thread, Turn
from harness_sdk.errors import StaleHead, ThreadEnded
from harness_sdk.types import ThreadStatus
from rollout_service.sessions import SessionOptions
from tests.service.sdk_service import scripted

Act = Callable[[Thread], Awaitable[object]]


@contextlib.asynccontextmanager
async def opened(**options: Any) -> AsyncIterator[Episode]:
    """An episode of a real service whose model says `fine`."""
    async with (
        scripted(lambda text: "fine", options=SessionOptions(**options)) as service,
        OctopusClient.connect(service.address) as client,
        client.episode(primitives=()) as episode,
    ):
        yield episode


@contextlib.contextmanager
def late_replies(episode: Episode) -> Iterator[asyncio.Event]:
    """Hold the replies of calls back; the event tells that one has come."""
    rpc: Any = episode._session._rpc
    unary, came = rpc.unary, asyncio.Event()

    async def late(*call: Any) -> Any:
        reply = await unary(*call)
        came.set()
        await asyncio.Event().wait()
        return reply

    rpc.unary = late
    try:
        yield came
    finally:
        rpc.unary = unary


async def give_up(episode: Episode, call: Awaitable[object]) -> None:
    """Cancel `call` once it has taken effect and before its reply is seen."""
    with late_replies(episode) as came:
        task = asyncio.ensure_future(call)
        await came.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task


async def leave_at_the_last_delta(thread: Thread, content: str) -> None:
    text = ""
    async with contextlib.aclosing(thread.stream(content)) as events:
        async for event in events:
            assert not isinstance(event, Turn)
            text += event.text
            if text == "fine":
                # Long enough for the turn to be committed on the other side.
                await asyncio.sleep(0.1)
                return


async def test_turn_left_at_its_last_delta_is_taken_over() -> None:
    async with opened() as episode:
        root = episode.root
        await leave_at_the_last_delta(root, "hello")
        assert (root.num_turns, root.budget) == (0, None)
        turn = await root.generate("again")
        assert (turn.step, root.step, root.num_turns) == (2, 2, 2)
        assert root.budget is not None and root.budget.turns_left == 48


async def test_children_of_a_fork_that_was_given_up_are_known_and_run() -> None:
    async with opened() as episode:
        root = episode.root
        await root.generate("hello")
        ran: list[str] = []

        async def work(child: Thread) -> None:
            ran.append(child.name)
            await child.generate()
            await child.done("found")

        await give_up(episode, root.fork({"a": "look", "b": "search"}, run=work))
        assert not root.children
        (a, b) = await root.wait()
        assert (a.answer, b.answer) == ("found", "found")
        assert sorted(root.children) == sorted(ran) == ["a", "b"]
        assert (await root.generate("and now")).step == 2


async def test_rewind_that_was_given_up_is_taken_over() -> None:
    async with opened() as episode:
        root = episode.root
        await root.generate("one")
        await root.generate("two")
        child = (await root.fork({"late": "x"}))["late"]
        await give_up(episode, root.rewind(1, note="no"))
        assert (root.step, child.status) == (2, ThreadStatus.RUNNING)
        assert (await root.generate("three")).step == 2
        assert (root.num_rewinds, child.status) == (1, ThreadStatus.CANCELLED)


async def test_end_that_was_given_up_is_known_after_the_next_call() -> None:
    async with opened() as episode:
        root = episode.root
        await root.generate("one")
        await give_up(episode, root.done("42"))
        with pytest.raises(ThreadEnded, match="no generate; got done"):
            await root.generate("more")
        assert (root.status, root.answer) == (ThreadStatus.DONE, "42")


async def test_calls_given_up_one_after_the_other_hide_none() -> None:
    async with opened() as episode:
        root = episode.root
        await root.generate("one")
        await give_up(episode, root.fork({"a": "x"}))
        # Refused as stale, and given up before that is known.
        task = asyncio.ensure_future(root.generate("never sent on"))
        await asyncio.sleep(0)
        task.cancel()
        await asyncio.wait([task])
        assert (await root.generate("two")).step == 2
        assert list(root.children) == ["a"]


async def test_head_is_adopted_where_the_reply_is_gone() -> None:
    async with opened(max_replies=1) as episode:
        root = episode.root
        await root.generate("one")
        child = (await root.fork({"a": "x"}))["a"]
        await give_up(episode, root.fork({"b": "x"}))
        await child.generate()
        assert (await root.generate("two")).step == 2
        assert "b" not in root.children, "its reply was not kept"


async def test_another_writer_is_refused_though_nothing_was_given_up() -> None:
    async with opened() as episode:
        root = episode.root
        await root.generate("one")
        other = Thread(root._session, {}, "root", root._calls.head)
        await root.generate("two")
        with pytest.raises(StaleHead) as caught:
            await other.generate("three")
        assert caught.value.head == root._calls.head
