"""The model-driven loop against a scripted gRPC server."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from harness_sdk import (
    LoopEvent,
    LoopResult,
    OctopusClient,
    ThreadStatus,
    ToolLoop,
    ToolLoopOptions,
    current_thread,
)
from harness_sdk.errors import (
    BudgetExhausted,
    ConfigError,
    EngineError,
    InvalidRequest,
    StepNotFound,
    ToolError,
)
from tests.unit.scripted_server import Hang, ScriptedServer, call, reply, serving, until


@pytest.fixture
async def server() -> AsyncIterator[ScriptedServer]:
    yield ScriptedServer()


@pytest.fixture
async def client(server: ScriptedServer) -> AsyncIterator[OctopusClient]:
    async with serving(server) as address, OctopusClient.connect(address) as client:
        yield client


async def double(x: int) -> int:
    """Twice `x`."""
    return 2 * x


async def run_root(client: OctopusClient, loop: ToolLoop, **options: Any) -> LoopResult:
    async with client.episode(**options) as episode:
        return await loop.run(episode.root, "go")


def observations(server: ScriptedServer, thread: str = "root") -> list[str]:
    """Tool messages sent with each of a thread's turns, in order."""
    return [
        message.content
        for request in server.of("Generate")
        if request.call.thread_id == thread
        for message in request.messages
        if message.role == "tool"
    ]


DONE = reply(call("done", {"answer": "42"}))


async def test_calls_run_in_order_and_their_results_are_told(
    server: ScriptedServer, client: OctopusClient
) -> None:
    ran: list[int] = []

    async def note(x: int) -> str:
        """Note."""
        await asyncio.sleep(0.02 if x == 1 else 0)
        ran.append(x)
        return f"noted {x}"

    server.turns["root"] = [
        reply(call("note", {"x": 1}, "c0"), call("note", {"x": 2}, "c1")),
        reply(call("done", {"answer": 42, "evidence": ["p1"]})),
    ]
    result = await run_root(client, ToolLoop([note]))
    assert ran == [1, 2]
    assert (result.status, result.answer, result.evidence) == (ThreadStatus.DONE, "42", '["p1"]')
    assert (result.num_turns, result.num_calls, result.num_failed_calls) == (2, 3, 0)
    first, second = server.of("Generate")
    assert '"note"' in first.tools_json
    assert second.tools_json == ""
    assert [(m.name, m.tool_call_id, m.content) for m in second.messages] == [
        ("note", "c0", "noted 1"),
        ("note", "c1", "noted 2"),
    ]


@pytest.mark.parametrize(
    ("bad", "told"),
    [
        (call("", {}, error="no JSON at byte 9"), "no JSON at byte 9"),
        (call("doubel", {"x": 1}), "unknown tool `doubel`; allowed: double, fork"),
        (call("d" * 9_000, {}), f"unknown tool `{'d' * 100}`; allowed: double, fork"),
        (call("double", {"x": 1, "y" * 9_000: 1}), f"no argument `{'y' * 100}`; allowed: x"),
        (call("double", {"x": 1e400}), "has the wrong type; got Infinity"),
        (call("double", {"x": "one"}), 'argument `x` of double has the wrong type; got "one"'),
        (call("double", {}), "needs the argument `x`"),
        (call("fork", {"branches": ["a"]}), "fork.branches has the wrong type"),
        (call("rewind", {}), "no step; allowed: step, note"),
        (call("read_thread", {"branch": "a", "steps": [1]}), "array of 2 items"),
        (call("done", {"answer": None}), "done.answer has the wrong type; got null"),
        (call("done", {"result": "x"}), "no answer, result"),
    ],
)
async def test_bad_call_becomes_an_observation(
    server: ScriptedServer, client: OctopusClient, bad: Any, told: str
) -> None:
    server.turns["root"] = [reply(bad), DONE]
    result = await run_root(client, ToolLoop([double]))
    assert result.status is ThreadStatus.DONE
    assert result.num_failed_calls == 1
    (observation,) = observations(server)
    assert observation.startswith("error: ")
    assert told in observation


@pytest.mark.parametrize(
    ("method", "good", "error"),
    [
        ("Rewind", call("rewind", {"step": 9}), StepNotFound("no such step", value=9, limit="0-2")),
        ("Fork", call("fork", {"branches": {"a": "b"}}), BudgetExhausted("too many threads")),
        ("ReadThread", call("read_thread", {"branch": "x", "steps": 1}), InvalidRequest("itself")),
    ],
)
async def test_primitive_refused_by_the_rules_becomes_an_observation(
    server: ScriptedServer, client: OctopusClient, method: str, good: Any, error: Any
) -> None:
    server.failures[method] = [error]
    server.turns["root"] = [reply(good), DONE]
    result = await run_root(client, ToolLoop())
    assert result.status is ThreadStatus.DONE
    assert observations(server) == [f"error: {error}"]


async def test_engine_failure_fails_the_episode(
    server: ScriptedServer, client: OctopusClient
) -> None:
    server.failures["Generate"] = [EngineError("out of memory")]
    with pytest.raises(EngineError, match="out of memory"):
        await run_root(client, ToolLoop())
    assert server.of("CloseEpisode")[0].error_kind == "EngineError"


async def test_tool_exception_is_told_or_raised_as_asked(
    server: ScriptedServer, client: OctopusClient
) -> None:
    async def broken(x: int) -> str:
        """Broken."""
        raise ValueError(f"cannot take {x}")

    server.turns["root"] = [reply(call("broken", {"x": 3})), DONE]
    await run_root(client, ToolLoop([broken]))
    assert observations(server) == ["error: ValueError: cannot take 3"]

    server.heads.clear()
    server.turns["root"] = [reply(call("broken", {"x": 3}))]
    with pytest.raises(ToolError, match="cannot take 3"):
        await run_root(client, ToolLoop([broken], ToolLoopOptions(raise_tool_failures=True)))
    assert server.of("CloseEpisode")[-1].error_kind == "ToolError"


async def test_tool_error_always_fails_the_episode(
    server: ScriptedServer, client: OctopusClient
) -> None:
    async def down() -> str:
        """Down."""
        raise ToolError("the search engine is down")

    server.turns["root"] = [reply(call("down", {}))]
    with pytest.raises(ToolError, match="search engine"):
        await run_root(client, ToolLoop([down]))
    assert server.of("CloseEpisode")[0].error_kind == "ToolError"


async def test_slow_tool_is_stopped_and_told(server: ScriptedServer, client: OctopusClient) -> None:
    stopped = asyncio.Event()

    async def slow() -> str:
        """Slow."""
        try:
            await asyncio.sleep(30)
        finally:
            stopped.set()
        return ""

    server.turns["root"] = [reply(call("slow", {})), DONE]
    await run_root(client, ToolLoop([slow], ToolLoopOptions(tool_timeout_s=0.05)))
    assert stopped.is_set()
    assert observations(server) == ["error: slow took longer than 0.05 s"]


async def test_fork_runs_child_loops_at_once_and_wait_joins_them(
    server: ScriptedServer, client: OctopusClient
) -> None:
    together = asyncio.Barrier(2)

    async def meet() -> str:
        """Meet the other branch."""
        async with asyncio.timeout(5):
            await together.wait()
        return "met"

    server.turns.update(
        {
            "root": [
                reply(call("fork", {"branches": {"a": "x", "b": "y"}}), call("wait", {})),
                reply(call("wait", {"branches": "a"}), call("wait", {"branches": ["b"]})),
                DONE,
            ],
            "a": [reply(call("meet", {})), reply(call("done", {"answer": "A"}))],
            "b": [reply(call("meet", {})), reply(call("done", {"answer": "B"}))],
        }
    )
    result = await run_root(client, ToolLoop([meet]))
    assert {name: child.answer for name, child in result.children.items()} == {"a": "A", "b": "B"}
    assert observations(server) == []
    assert [list(request.branches) for request in server.of("Wait")] == [[], ["a"], ["b"]]


async def test_tool_learns_which_thread_calls_it_and_can_await_a_sibling(
    server: ScriptedServer, client: OctopusClient
) -> None:
    def who() -> str:
        """Which thread this is."""
        return current_thread().thread_id

    async def after_a() -> str:
        """How the sibling ended."""
        parent = current_thread().parent
        assert parent is not None
        return await parent.children["a"].until_ended()

    server.turns.update(
        {
            "root": [
                reply(call("fork", {"branches": {"a": "x", "b": "y"}}), call("who", {})),
                reply(call("wait", {"branches": ["a", "b"]})),
                DONE,
            ],
            "a": [reply(call("who", {})), reply(call("done", {"answer": "A"}))],
            "b": [reply(call("after_a", {})), reply(call("done", {"answer": "B"}))],
        }
    )
    await run_root(client, ToolLoop([who, after_a]))
    assert [observations(server, name) for name in ("root", "a", "b")] == [
        ["root"],
        ["a"],
        ["done"],
    ]
    with pytest.raises(LookupError):
        current_thread()


async def test_children_fork_further_and_results_nest(
    server: ScriptedServer, client: OctopusClient
) -> None:
    server.turns.update(
        {
            "root": [reply(call("fork", {"branches": {"a": "x"}})), reply(call("wait", {})), DONE],
            "a": [
                reply(call("fork", {"branches": {"b": "y"}}), call("wait", {"branches": ["b"]})),
                reply(call("done", {"answer": "A"})),
            ],
            "a.b": [reply(call("done", {"answer": "B"}))],
        }
    )
    server.turns["root"][1] = reply(call("wait", {"branches": ["a"]}))
    result = await run_root(client, ToolLoop())
    assert result.children["a"].children["a.b"].answer == "B"


async def test_loops_still_running_are_cancelled_when_the_root_is_done(
    server: ScriptedServer, client: OctopusClient
) -> None:
    async def see() -> str:
        """Return once the branch generates."""
        await until(lambda: "a" in [request.call.thread_id for request in server.of("Generate")])
        return "seen"

    fork = call("fork", {"branches": {"a": "x"}})
    server.turns.update({"root": [reply(fork, call("see", {})), DONE], "a": [Hang()]})
    async with client.episode() as episode:
        result = await ToolLoop([see]).run(episode.root, "go")
        assert result.children["a"].status is ThreadStatus.CANCELLED
        await until(lambda: server.cancelled_calls == ["Generate a"])


async def test_failure_in_a_child_fails_the_episode(
    server: ScriptedServer, client: OctopusClient
) -> None:
    async def down() -> str:
        """Down."""
        raise ToolError("the search engine is down")

    server.turns.update(
        {
            "root": [
                reply(call("fork", {"branches": {"a": "x"}}), call("wait", {"branches": "a"}))
            ],
            "a": [reply(call("down", {}))],
        }
    )
    with pytest.raises(ToolError, match="search engine"):
        await run_root(client, ToolLoop([down]))
    assert server.cancelled_calls == ["Wait"]


async def test_rewind_drops_the_rest_of_the_turn(
    server: ScriptedServer, client: OctopusClient
) -> None:
    server.turns["root"] = [
        reply(
            call("double", {"x": 1}, "c0"),
            call("rewind", {"step": 0, "note": "dead end"}, "c1"),
            call("double", {"x": 2}, "c2"),
        ),
        DONE,
    ]
    result = await run_root(client, ToolLoop([double]))
    assert observations(server) == []
    assert result.num_calls == 3
    assert server.of("Rewind")[0].note == "dead end"


async def test_thread_ended_by_a_guardrail_ends_the_loop(
    server: ScriptedServer, client: OctopusClient
) -> None:
    server.turns["root"] = [
        reply(text="I think it is 42"),
        reply(call("double", {"x": 1}), ended="max_turns"),
    ]
    result = await run_root(client, ToolLoop([double]))
    assert result.status is ThreadStatus.MAX_TURNS
    assert result.num_calls == 0


async def test_near_the_reserve_tools_are_refused_and_done_is_not(
    server: ScriptedServer, client: OctopusClient
) -> None:
    server.turns["root"] = [reply(call("double", {"x": 1}), reserve=True), DONE]
    result = await run_root(client, ToolLoop([double]))
    assert result.status is ThreadStatus.DONE
    assert observations(server) == ["error: the answer reserve is reached: no double; call done"]


async def test_observation_that_does_not_fit_is_replaced_by_the_reason(
    server: ScriptedServer, client: OctopusClient
) -> None:
    server.turns["root"] = [reply(call("double", {"x": 1})), DONE]

    async def fail_second_turn(event: LoopEvent) -> None:
        if event.call is not None and event.call.name == "double":
            server.failures["Generate"] = [BudgetExhausted("the messages do not fit", value=9000)]

    result = await run_root(client, ToolLoop([double], on_event=fail_second_turn))
    assert result.status is ThreadStatus.DONE
    assert observations(server) == ["2", "error: the messages do not fit; got 9000"]


async def test_budget_that_allows_no_turn_ends_the_loop_as_budget(
    server: ScriptedServer, client: OctopusClient
) -> None:
    server.failures["Generate"] = [BudgetExhausted("the messages do not fit")]
    result = await run_root(client, ToolLoop())
    assert (result.status, result.num_turns) == (ThreadStatus.BUDGET, 0)


async def test_without_done_a_turn_without_calls_is_the_answer(
    server: ScriptedServer, client: OctopusClient
) -> None:
    server.turns["root"] = [reply(call("double", {"x": 1})), reply(text="it is 2")]
    result = await run_root(client, ToolLoop([double]), primitives=())
    assert (result.status, result.answer) == (ThreadStatus.DONE, "it is 2")
    server.heads.clear()
    server.turns["root"] = [reply(call("fork", {"branches": {"a": "x"}})), reply(text="no")]
    await run_root(client, ToolLoop([double]), primitives=())
    assert observations(server)[-1] == "error: unknown tool `fork`; allowed: double"


async def test_hook_sees_turns_calls_and_ends(
    server: ScriptedServer, client: OctopusClient
) -> None:
    server.turns["root"] = [reply(call("double", {"x": 1})), DONE]
    events: list[LoopEvent] = []
    await run_root(client, ToolLoop([double], on_event=events.append))
    shown = [
        "turn" if event.turn else event.call.name if event.call else event.status
        for event in events
    ]
    assert shown == ["turn", "double", "turn", "done", ThreadStatus.DONE]
    assert events[1].observation == "2"
    assert events[3].observation is None


async def test_tool_named_like_a_primitive_is_refused(
    server: ScriptedServer, client: OctopusClient
) -> None:
    async def wait(seconds: int) -> str:
        """Wait."""
        return ""

    with pytest.raises(ConfigError, match="got wait"):
        await run_root(client, ToolLoop([wait]))
