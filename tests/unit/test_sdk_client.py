"""Client, episode and thread against a scripted gRPC server."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

import pytest

from harness_sdk import (
    Limits,
    Message,
    OctopusClient,
    RetryPolicy,
    SamplingOptions,
    StopReason,
    Thread,
    ThreadStatus,
    Timeouts,
    TokenDelta,
    Turn,
)
from harness_sdk.errors import (
    AuthError,
    BudgetExhausted,
    Cancelled,
    ClientClosed,
    ConfigError,
    DeadlineExceeded,
    EpisodeNotFound,
    InvalidRequest,
    ProtocolError,
    ResourceExhausted,
    ThreadEnded,
    Unavailable,
)
from tests.unit.scripted_server import Hang, ScriptedServer, call, reply, serving, until

FAST = RetryPolicy(max_attempts=3, initial_backoff_s=0.01, max_backoff_s=0.02)


@pytest.fixture
async def server() -> AsyncIterator[ScriptedServer]:
    yield ScriptedServer()


@pytest.fixture
async def address(server: ScriptedServer) -> AsyncIterator[str]:
    async with serving(server) as address:
        yield address


@pytest.fixture
async def client(address: str) -> AsyncIterator[OctopusClient]:
    async with OctopusClient.connect(address, retry=FAST) as client:
        yield client


async def test_handshake_tells_what_the_replica_is(client: OctopusClient) -> None:
    assert client.info.replica_id == "scripted"
    assert client.info.limits.thread_budget == 1000
    assert (await client.status()).open_episodes == 0


async def test_other_protocol_version_is_refused(server: ScriptedServer, address: str) -> None:
    server.protocol_version = 99
    with pytest.raises(ProtocolError, match="got 99; allowed: 1"):
        async with OctopusClient.connect(address):
            pass


async def test_token_is_sent_and_a_wrong_one_refused(server: ScriptedServer, address: str) -> None:
    server.token = "right"
    async with OctopusClient.connect(address, token="right") as client:
        await client.status()
    with pytest.raises(AuthError):
        async with OctopusClient.connect(address, token="left"):
            pass


async def test_unreachable_service_is_unavailable_after_the_retries() -> None:
    with pytest.raises(Unavailable):
        async with OctopusClient.connect("127.0.0.1:1", retry=FAST):
            pass


async def test_empty_address_is_refused() -> None:
    with pytest.raises(ConfigError, match="host:port"):
        async with OctopusClient.connect(""):
            pass


async def test_closed_or_unopened_client_says_what_to_do(address: str) -> None:
    client = OctopusClient.connect(address)
    with pytest.raises(ClientClosed, match="async with"):
        await client.status()
    async with client:
        pass
    with pytest.raises(ClientClosed, match="async with"):
        await client.status()
    with pytest.raises(ClientClosed, match="async with"):
        client.episode()


async def test_retry_repeats_with_the_same_idempotency_key(
    server: ScriptedServer, client: OctopusClient
) -> None:
    server.failures["Done"] = [Unavailable("restarting"), Unavailable("restarting")]
    async with client.episode() as episode:
        await episode.root.done("42")
    keys = [request.call.idempotency_key for request in server.of("Done")]
    assert len(keys) == 3
    assert len(set(keys)) == 1


async def test_every_call_has_a_key_of_its_own(
    server: ScriptedServer, client: OctopusClient
) -> None:
    server.turns["root"] = [reply(), reply()]
    async with client.episode() as episode:
        await episode.root.generate("a")
        await episode.root.generate("b")
        await episode.root.rewind(1)
        await episode.root.done("42")
    keys = [
        request.call.idempotency_key
        for name, request in server.requests
        if name in ("Generate", "Rewind", "Done")
    ]
    assert len(set(keys)) == len(keys) == 4


async def test_error_that_is_not_retryable_is_raised_at_once(
    server: ScriptedServer, client: OctopusClient
) -> None:
    server.failures["Fork"] = [
        BudgetExhausted("no thread left", value=11, limit=10, remedy="wait", episode_id="e1")
    ]
    async with client.episode() as episode:
        with pytest.raises(BudgetExhausted) as caught:
            await episode.root.fork({"a": "do a"})
        assert caught.value.context() == {
            "value": "11",
            "limit": "10",
            "remedy": "wait",
            "episode_id": "e1",
            "thread_id": "",
        }
        await episode.root.done("still open")
    assert len(server.of("Fork")) == 1


async def test_deadline_of_a_call_is_an_error(server: ScriptedServer, address: str) -> None:
    server.turns["root"] = [Hang()]
    timeouts = Timeouts(generate_s=0.2)
    async with (
        OctopusClient.connect(address, timeouts=timeouts) as client,
        client.episode() as episode,
    ):
        with pytest.raises(DeadlineExceeded):
            await episode.root.generate("a")
        await until(lambda: server.cancelled_calls == ["Generate root"])


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


async def test_child_whose_agent_returns_without_done_is_cancelled(
    server: ScriptedServer, client: OctopusClient
) -> None:
    async def idle(child: Thread) -> None:
        return None

    async with client.episode() as episode:
        await episode.root.fork({"a": "x"}, run=idle)
        (result,) = await episode.root.wait(["a"])
        assert result.status is ThreadStatus.CANCELLED


async def test_negative_step_is_refused_before_it_is_sent(client: OctopusClient) -> None:
    async with client.episode() as episode:
        with pytest.raises(InvalidRequest, match="-1"):
            await episode.root.rewind(-1)


async def test_leaving_closes_the_episode_and_its_threads(
    server: ScriptedServer, client: OctopusClient
) -> None:
    async with client.episode(task_id="t", group_id="g", limits=Limits(max_turns=3)) as episode:
        root = episode.root
        assert episode.policy_version == 4
    assert episode.result is not None
    assert episode.result.stop_reason is StopReason.DONE
    (opened,) = server.of("OpenEpisode")
    assert (opened.task_id, opened.group_id, opened.limits.max_turns) == ("t", "g", 3)
    (closed,) = server.of("CloseEpisode")
    assert (closed.error_kind, closed.HasField("reward")) == ("", False)
    with pytest.raises(ClientClosed, match="inside its episode"):
        await root.generate("late")
    await until(lambda: not server.open_episodes)


async def test_reward_travels_with_close_and_is_sent_once(
    server: ScriptedServer, client: OctopusClient
) -> None:
    async with client.episode() as episode:
        with pytest.raises(InvalidRequest, match="0 to 1"):
            await episode.close(reward=1.5)
        result = await episode.close(reward=0.0)
        assert result.entry_id == "1-0"
        with pytest.raises(ClientClosed):
            await episode.close(reward=1.0)
    (closed,) = server.of("CloseEpisode")
    assert closed.HasField("reward")
    assert closed.reward == 0.0


async def test_error_inside_closes_the_episode_as_failed(
    server: ScriptedServer, client: OctopusClient
) -> None:
    with pytest.raises(KeyError):
        async with client.episode():
            raise KeyError("the agent's own fault")
    (closed,) = server.of("CloseEpisode")
    assert closed.error_kind == "ToolError"
    assert "the agent's own fault" in closed.error_message


async def test_cancellation_inside_closes_the_episode_as_cancelled(
    server: ScriptedServer, client: OctopusClient
) -> None:
    server.turns["root"] = [Hang()]

    async def agent() -> None:
        async with client.episode() as episode:
            await episode.root.generate("x")

    task = asyncio.create_task(agent())
    await until(lambda: server.of("Generate"))
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    (closed,) = server.of("CloseEpisode")
    assert closed.error_kind == "Cancelled"
    assert server.cancelled_calls == ["Generate root"]
    await until(lambda: not server.open_episodes)


async def test_leaving_cancels_the_tasks_still_running(
    server: ScriptedServer, client: OctopusClient
) -> None:
    server.turns["a"] = [Hang()]
    async with client.episode() as episode:
        child = (await episode.root.fork({"a": "x"}))["a"]
        task = child.spawn(child.generate())
        await until(lambda: server.of("Generate"))
    assert task.cancelled()
    assert server.cancelled_calls == ["Generate a"]
    assert server.of("CloseEpisode")[0].error_kind == ""


async def test_first_failure_of_a_task_fails_the_episode_and_the_rest_is_noted(
    server: ScriptedServer, client: OctopusClient
) -> None:
    async def fail(message: str) -> None:
        try:
            await asyncio.sleep(0.01 if message == "first" else 5)
        finally:
            raise LookupError(message)

    with pytest.raises(LookupError, match="first") as caught:
        async with client.episode() as episode:
            episode.spawn(fail("first"))
            episode.spawn(fail("second"))
            await asyncio.sleep(5)
    assert caught.value.__notes__ == ["also failed: LookupError: second"]
    assert "first" in server.of("CloseEpisode")[0].error_message


async def test_task_spawned_while_the_episode_falls_is_refused_without_a_trace(
    client: OctopusClient,
) -> None:
    refused: list[BaseException] = []

    async def nothing() -> None:
        return None

    with pytest.raises(LookupError, match="first"):
        async with client.episode() as episode:

            async def late() -> None:
                try:
                    await asyncio.sleep(5)
                finally:
                    try:
                        episode.spawn(nothing())
                    except Cancelled as error:
                        refused.append(error)

            async def fail() -> None:
                raise LookupError("first")

            episode.spawn(late())
            await asyncio.sleep(0)
            episode.spawn(fail())
            await asyncio.sleep(5)
    assert len(refused) == 1


async def test_episode_closed_by_the_service_is_told_as_such(
    server: ScriptedServer, client: OctopusClient
) -> None:
    with pytest.raises(EpisodeNotFound, match="engine_error"):
        async with client.episode() as episode:
            server.drop_episode.set()
            await until(lambda: not server.open_episodes)
            await asyncio.sleep(0.05)
            await episode.root.generate("x")
    assert server.of("CloseEpisode") == []


async def test_waiting_for_admission_is_told(server: ScriptedServer, client: OctopusClient) -> None:
    server.hold_admission_s = 0.05
    told: list[int] = []
    async with client.episode(on_queued=lambda event: told.append(event.ahead)):
        pass
    assert told == [3]


async def test_admission_has_its_deadline(server: ScriptedServer, address: str) -> None:
    server.hold_admission_s = 30
    timeouts = Timeouts(admission_s=0.1)
    async with OctopusClient.connect(address, timeouts=timeouts) as client:
        with pytest.raises(DeadlineExceeded, match="not admitted"):
            async with client.episode():
                pass


async def test_message_over_the_service_limit_names_side_size_and_limit(
    server: ScriptedServer, client: OctopusClient
) -> None:
    async with client.episode() as episode:
        with pytest.raises(ResourceExhausted) as caught:
            await episode.root.generate("x" * (2 << 20))
        assert "server" in caught.value.message
        assert caught.value.limit == f"{1 << 20} bytes"
        assert int(caught.value.value.split()[0]) > 2 << 20
        server.turns["root"] = [reply()]
        await episode.root.generate("x" * (1 << 19))
    assert len(server.of("Generate")) == 1


async def test_message_over_the_client_limit_names_the_client(address: str) -> None:
    async with (
        OctopusClient.connect(address, max_message_bytes=4096) as client,
        client.episode() as episode,
    ):
        with pytest.raises(ResourceExhausted, match="client"):
            await episode.root.generate("x" * 8192)


async def test_closing_the_client_stops_calls_with_a_clear_error(
    server: ScriptedServer, address: str
) -> None:
    server.turns["root"] = [Hang()]
    client = OctopusClient.connect(address)

    async def agent() -> None:
        async with client.episode() as episode:
            await episode.root.generate("x")

    async with client:
        task = asyncio.create_task(agent())
        await until(lambda: server.of("Generate"))
    with pytest.raises(ClientClosed):
        await task
    await until(lambda: not server.open_episodes)


async def test_two_clients_of_one_process_do_not_disturb_each_other(
    server: ScriptedServer, address: str
) -> None:
    server.turns["root"] = [reply(text="still here")]
    async with OctopusClient.connect(address) as first, first.episode() as episode:
        async with OctopusClient.connect(address) as second:
            await second.status()
        turn = await episode.root.generate("x")
        assert turn.text == "still here"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"primitives": ("clone",)}, "clone"),
        ({"version_policy": "newest"}, "keep, refresh"),
        ({"limits": Limits(max_threads=0)}, "leave `fork` out"),
        ({"limits": Limits(thread_budget=-5)}, "-5"),
    ],
)
async def test_wrong_episode_option_is_refused_before_it_is_sent(
    client: OctopusClient, options: dict, message: str
) -> None:
    with pytest.raises(InvalidRequest, match=message):
        client.episode(**options)
