"""The runner of groups and episodes, against the real service."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import pytest

from harness_sdk import OctopusClient, Thread
from harness_sdk.errors import ConfigError, ServiceError, ToolError, Unavailable
from harness_sdk.replicas import Replicas
from harness_sdk.runner import Runner, RunOptions, group_name
from harness_sdk.summary import summarise
from tests.service.sdk_service import Running, scripted
from tests.service.speaking import agent, say, speaker


@pytest.fixture
async def service() -> AsyncIterator[Running]:
    async with scripted(speaker) as service:
        yield service


@pytest.fixture
async def client(service: Running) -> AsyncIterator[OctopusClient]:
    async with OctopusClient.connect(service.address) as client:
        yield client


async def test_failed_episode_is_an_outcome_and_a_record_not_a_crash(
    service: Running, client: OctopusClient
) -> None:
    async def flaky(thread: Thread, task: dict[str, str]) -> str:
        if task["id"] == "b":
            raise ToolError("the search engine is down")
        return await say(thread, task)

    runner = Runner(Replicas([client]), agent(flaky), RunOptions(group_size=2))
    good, bad = await runner.run()
    assert good.rewards == [1.0, 1.0]
    assert bad.rewards == []
    assert {each.error for each in bad.episodes} == {"ToolError: the search engine is down"}
    reasons = [record.stop_reason for record in service.records.written]
    assert sorted(reasons) == ["done", "done", "tool_error", "tool_error"]
    summary = summarise([good, bad])
    assert (summary.accuracy, summary.tasks, summary.failed) == (1.0, 1, {"ToolError": 2})


async def test_an_agents_own_failure_on_a_replica_that_drains_is_not_run_again(
    service: Running, client: OctopusClient
) -> None:
    begun: list[str] = []

    async def failing(thread: Thread, task: dict[str, str]) -> str:
        begun.append(task["id"])
        # It says goodbye while the episode runs, and serves it to its end.
        replicas.leave(service.address)
        raise ToolError("the search engine is down")

    async with scripted(speaker) as second, OctopusClient.connect(second.address) as other:
        replicas = Replicas([client, other])
        runner = Runner(replicas, agent(failing, tasks=("a",)), RunOptions(group_size=1))
        (group,) = await runner.run()
        assert second.records.written == []
    (failed,) = group.episodes
    assert (failed.address, failed.lost, group.replaced) == (service.address, False, [])
    assert begun == ["a"]
    assert [record.stop_reason for record in service.records.written] == ["tool_error"]


async def test_an_agents_own_unavailable_service_loses_no_episode(
    service: Running, client: OctopusClient
) -> None:
    async def failing(thread: Thread, task: dict[str, str]) -> str:
        raise Unavailable("the search engine is down")

    async with scripted(speaker) as second, OctopusClient.connect(second.address) as other:
        replicas = Replicas([client, other])
        options = RunOptions(group_size=1)
        (group,) = await Runner(replicas, agent(failing, tasks=("a",)), options).run()
        # Neither run again on the other replica, nor held against this one.
        assert second.records.written == []
    (failed,) = group.episodes
    assert (failed.error, failed.lost) == ("Unavailable: the search engine is down", False)
    assert group.replaced == []
    (record,) = service.records.written
    assert (record.stop_reason, record.error_kind) == ("tool_error", "ToolError")
    assert record.error_message == "Unavailable: the search engine is down"
    assert all(each.avoided_until_s == 0.0 for each in replicas.present)


async def test_agent_that_lets_a_cancellation_of_its_own_out_fails_its_episode_alone(
    client: OctopusClient,
) -> None:
    async def stumble(thread: Thread, task: dict[str, str]) -> str:
        if task["id"] == "a":
            helper = asyncio.create_task(asyncio.sleep(60))
            helper.cancel()
            await helper
        return await say(thread, task)

    async with asyncio.timeout(30):
        groups = await Runner(Replicas([client]), agent(stumble), RunOptions(group_size=1)).run()
    assert [group.is_complete for group in groups] == [True, True]
    (failed,), (passed,) = (group.episodes for group in groups)
    assert (failed.reward, failed.error) == (None, "CancelledError: ")
    assert passed.reward == 1.0


async def test_metrics_that_fail_cost_no_episode(
    client: OctopusClient, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(task: Any, answer: str) -> dict[str, float]:
        return {"length": 1.0 / (task["id"] == "b")}

    groups = await Runner(
        Replicas([client]), replace(agent(say), metrics=broken), RunOptions(group_size=1)
    ).run()
    assert [group.rewards for group in groups] == [[1.0], [1.0]]
    assert [group.episodes[0].metrics for group in groups] == [{}, {"length": 1.0}]
    assert "metrics failed for task a" in caplog.text


async def test_what_any_thread_reports_stands_beside_the_metrics(client: OctopusClient) -> None:
    async def reporting(thread: Thread, task: dict[str, str]) -> None:
        thread.report(found=0.0, length=9.0)
        await thread.generate(f"say {task['id']}")
        (child,) = (await thread.fork({"child": "go on"})).values()
        child.report(found=0.5)
        await thread.done(task["id"])

    with_metrics = replace(agent(reporting), metrics=lambda task, answer: {"length": 1.0})
    groups = await Runner(Replicas([client]), with_metrics, RunOptions(group_size=1)).run()
    assert [group.episodes[0].metrics for group in groups] == [{"found": 0.5, "length": 1.0}] * 2


async def test_returned_text_is_scored_in_place_of_the_answer(
    service: Running, client: OctopusClient
) -> None:
    async def working(thread: Thread, task: dict[str, str]) -> str | None:
        await thread.generate(f"say {task['id']}")
        await thread.done("it is repaired")
        return task["id"] if task["id"] == "a" else None

    groups = await Runner(Replicas([client]), agent(working), RunOptions(group_size=1)).run()
    assert [group.rewards for group in groups] == [[1.0], [0.0]]
    assert [record.answer for record in service.records.written] == ["it is repaired"] * 2


async def test_policy_failure_scores_zero_and_is_no_failure(
    service: Running, client: OctopusClient
) -> None:
    async def long_winded(thread: Thread, task: dict[str, str]) -> None:
        for _ in range(60):
            await thread.generate(f"say {task['id']}")

    (group,) = await Runner(
        Replicas([client]), agent(long_winded, tasks=("a",)), RunOptions(group_size=1)
    ).run()
    assert group.rewards == [0.0]
    assert group.episodes[0].error == ""
    assert service.records.written[0].stop_reason == "max_turns"


async def test_failures_in_a_row_stop_the_run(client: OctopusClient) -> None:
    async def broken(thread: Thread, task: dict[str, str]) -> None:
        raise Unavailable("nothing works")

    many = agent(broken, tasks=[str(i) for i in range(100)])
    runner = Runner(
        Replicas([client]), many, RunOptions(group_size=1, max_failures=3, concurrency=1)
    )
    with pytest.raises(ServiceError, match="nothing works"):
        await runner.run()
    assert len(runner.groups) < 10


async def test_concurrency_is_bounded(client: OctopusClient) -> None:
    running = most = 0

    async def counted(thread: Thread, task: dict[str, str]) -> str:
        nonlocal running, most
        running += 1
        most = max(most, running)
        await asyncio.sleep(0.02)
        running -= 1
        return await say(thread, task)

    await Runner(Replicas([client]), agent(counted), RunOptions(group_size=4, concurrency=3)).run()
    assert most == 3


async def test_agent_without_tasks_is_refused(client: OctopusClient) -> None:
    with pytest.raises(ConfigError, match="no tasks"):
        await Runner(Replicas([client]), agent(say, tasks=()), RunOptions(num_groups=1)).run()


def test_group_names_are_short_whatever_the_task_is_called() -> None:
    name = group_name("What is\nthe " + "long " * 400 + "question?", "permit")
    assert name.startswith("What isthe long ") and name.isprintable()
    assert name.endswith("/permit") and len(name) == 128 + 7
