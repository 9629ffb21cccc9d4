"""Episodes against a scripted gRPC server: how they close, fail, and are admitted."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import weakref

import pytest

from harness_sdk import (
    Limits,
    OctopusClient,
    StopReason,
    Timeouts,
)
from harness_sdk.errors import (
    Cancelled,
    ClientClosed,
    DeadlineExceeded,
    EpisodeNotFound,
    HarnessError,
    InvalidRequest,
    Unavailable,
)
from tests.unit.scripted_server import Hang, ScriptedServer, reply, until


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


@pytest.mark.parametrize(
    ("answer", "told"), [(EpisodeNotFound("the episode is closed"), 0), (InvalidRequest("no"), 1)]
)
async def test_failed_episode_that_is_closed_already_is_no_fault_to_tell(
    answer: HarnessError,
    told: int,
    server: ScriptedServer,
    client: OctopusClient,
    caplog: pytest.LogCaptureFixture,
) -> None:
    server.failures["CloseEpisode"] = [answer]
    with pytest.raises(KeyError):
        async with client.episode():
            raise KeyError("the agent's own fault")
    assert [record.levelname for record in caplog.records] == ["WARNING"] * told


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


@pytest.mark.parametrize(
    ("reason", "error"), [("cancelled", EpisodeNotFound), ("engine_error", Unavailable)]
)
async def test_episode_closed_by_the_service_is_told_as_such(
    reason: str, error: type[HarnessError], server: ScriptedServer, client: OctopusClient
) -> None:
    server.drop_reason = reason
    with pytest.raises(error, match=f"the service closed the episode; got {reason}"):
        async with client.episode() as episode:
            server.drop_episode.set()
            await until(lambda: not server.open_episodes)
            await asyncio.sleep(0.05)
            await episode.root.generate("x")
    assert server.of("CloseEpisode") == []


async def test_a_closed_episode_keeps_no_call_for_the_collector(
    server: ScriptedServer, client: OctopusClient
) -> None:
    """A full collection is rare in a large process, and a call holds its messages."""

    def calls() -> list[object]:
        # By name: `isinstance` asks every object for its class, and some warn of themselves.
        return [each for each in gc.get_objects() if type(each).__name__ == "UnaryStreamCall"]

    # Those of earlier tests, whose loops are gone.
    earlier = calls()
    gc.disable()
    try:
        async with client.episode() as episode:
            server.turns["root"] = [reply(text="x"), Hang()]
            await episode.root.generate("x")
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(0.05):
                    await episode.root.generate("y")
            own = [weakref.ref(each) for each in calls() if each not in earlier]
            assert own
        await until(lambda: not any(ref() for ref in own))
    finally:
        gc.enable()


@pytest.mark.parametrize("method", ["OpenEpisode", "Generate", "Done"])
async def test_an_error_of_the_episodes_own_calls_is_told_from_an_agents(
    method: str, server: ScriptedServer, client: OctopusClient
) -> None:
    # A service whose network drops says nothing of the episode that called.
    server.failures[method] = [Unavailable("restarting") for _ in range(9)]
    server.turns["root"] = [reply(text="x")]
    episode = client.episode()
    with pytest.raises(Unavailable, match="restarting") as raised:
        async with episode:
            await episode.root.generate("x")
            await episode.root.done("x")
    assert episode.has_raised(raised.value)
    assert not client.episode().has_raised(raised.value)
    assert not episode.has_raised(Unavailable("restarting"))
    assert [request.error_kind for request in server.of("CloseEpisode")] == (
        [] if method == "OpenEpisode" else ["Unavailable"]
    )


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


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"primitives": ("clone",)}, "clone"),
        ({"version_policy": "newest"}, "keep, refresh"),
        ({"limits": Limits(max_threads=-1)}, "from 0 to 4294967295"),
        ({"limits": Limits(max_turns=2**32)}, "max_turns cannot be used; got 4294967296"),
        ({"limits": Limits(max_turns=1.5)}, r"got 1\.5; allowed: a whole number"),  # type: ignore[arg-type]
        ({"limits": Limits(max_turns="9")}, "got '9'"),  # type: ignore[arg-type]
        ({"limits": Limits(thread_budget=-5)}, "-5"),
    ],
)
async def test_wrong_episode_option_is_refused_before_it_is_sent(
    client: OctopusClient, options: dict, message: str
) -> None:
    with pytest.raises(InvalidRequest, match=message):
        client.episode(**options)
