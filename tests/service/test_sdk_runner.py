"""`octopus run` and `octopus eval`, and the library behind them, against the real service."""

from __future__ import annotations

import asyncio
import json
import signal
import sys
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from harness_sdk import Limits, OctopusClient, SamplingOptions, Thread
from harness_sdk.agents import Agent, load_agent
from harness_sdk.cli.embedded import ValkeyServer
from harness_sdk.cli.processes import free_port
from harness_sdk.control import permits_key, running_key
from harness_sdk.errors import ClientClosed, ConfigError, ServiceError, ToolError, Unavailable
from harness_sdk.permits import redis_permits
from harness_sdk.replicas import Replicas
from harness_sdk.runner import GroupOutcome, Runner, RunOptions, new_group_id
from harness_sdk.summary import summarise
from tests.service.sdk_service import Running, calls, scripted
from tests.unit.scripted_server import until
from tests.valkey import embedded_valkey

AGENT = """
from answers import ANSWERS
from harness_sdk import Limits, SamplingOptions, Thread, ToolLoop

LIMITS = Limits(max_turns=4)
SAMPLING = SamplingOptions(max_tokens=200)

def tasks():
    for name in ANSWERS:
        yield {"id": name, "question": f"say {name}"}

async def run(thread: Thread, task: dict) -> None:
    await ToolLoop().run(thread, task["question"])

def score(task: dict, answer: str) -> float:
    return float(answer == ANSWERS[task["id"]])

def metrics(task: dict, answer: str) -> dict[str, float]:
    return {"length": float(len(answer))}
"""


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    """An agent folder with a sibling module; nothing of it stays imported."""
    path = tmp_path / "speaker"
    path.mkdir()
    (path / "agent.py").write_text(AGENT)
    (path / "answers.py").write_text('ANSWERS = {"a": "a", "b": "b", "c": "not c"}\n')
    before, modules = list(sys.path), set(sys.modules)
    yield path
    sys.path[:] = before
    for name in set(sys.modules) - modules:
        del sys.modules[name]


def speaker(text: str) -> str | None:
    """Says what it is asked to say; asked to hang, it does."""
    word = text.rsplit("say ", 1)[1].split("<")[0]
    return None if word == "hang" else calls(("done", {"answer": word}))


@pytest.fixture
async def service() -> AsyncIterator[Running]:
    async with scripted(speaker) as service:
        yield service


@pytest.fixture
async def client(service: Running) -> AsyncIterator[OctopusClient]:
    async with OctopusClient.connect(service.address) as client:
        yield client


def agent(run: Any, *, tasks: Any = ("a", "b"), score: Any = None) -> Agent:
    """An agent without a folder."""
    return Agent(
        name="inline",
        tasks=lambda: [{"id": name} for name in tasks],
        run=run,
        score=score or (lambda task, answer: float(answer == task["id"])),
        primitives=(),
    )


async def say(thread: Thread, task: dict[str, str]) -> str:
    """One turn; its answer is what is returned."""
    await thread.generate(f"say {task['id']}")
    return task["id"]


async def test_groups_share_a_task_and_their_records_carry_rewards(
    service: Running, client: OctopusClient, folder: Path
) -> None:
    ended: list[str] = []
    runner = Runner(
        Replicas([client]),
        load_agent(folder),
        RunOptions(group_size=2, num_groups=4, concurrency=3),
        on_group=lambda group: ended.append(group.task_id),
    )
    groups = await runner.run()
    assert sorted(ended) == ["a", "a", "b", "c"]
    assert [group.rewards for group in groups] == [[1, 1], [1, 1], [0, 0], [1, 1]]
    assert len({group.group_id for group in groups}) == 4
    records = service.records.written
    assert len(records) == 8
    for group in groups:
        mine = [record for record in records if record.group_id == group.group_id]
        assert [record.reward for record in mine] == group.rewards
        assert {record.task_id for record in mine} == {group.task_id}
    assert groups[0].episodes[0].metrics == {"length": 1.0}


async def test_agent_folder_brings_its_limits_and_sampling(folder: Path) -> None:
    loaded = load_agent(folder)
    assert loaded.name == "speaker"
    assert loaded.limits == Limits(max_turns=4)
    assert loaded.sampling == SamplingOptions(max_tokens=200)
    assert "fork" in loaded.primitives


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "folder with agent.py"),
        ("def tasks(): ...\nasync def run(t, k): ...\n", r"does not define score\(\)"),
        ("def tasks(): ...\ndef run(t, k): ...\ndef score(k, a): ...\n", "not async"),
        (
            "SAMPLING = {}\ndef tasks(): ...\nasync def run(t, k): ...\ndef score(k, a): ...\n",
            r"SAMPLING .*got dict .*harness_sdk\.SamplingOptions",
        ),
        ("x = (\n", r"imported; got SyntaxError.*agent\.py:1"),
        ("\nimport no_such_module\n", r"imported; got ModuleNotFoundError.*agent\.py:2"),
    ],
)
def test_folder_that_is_no_agent_is_refused(tmp_path: Path, text: str | None, message: str) -> None:
    if text is not None:
        (tmp_path / "agent.py").write_text(text)
    with pytest.raises(ConfigError, match=message):
        load_agent(tmp_path)


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


async def test_runner_starts_no_group_beyond_its_permits(
    client: OctopusClient, tmp_path: Path
) -> None:
    import redis.asyncio

    ended: list[GroupOutcome] = []
    async with (
        embedded_valkey(tmp_path / "valkey") as url,
        redis_permits(url, "r") as permits,
        redis.asyncio.Redis.from_url(url) as redis_client,
    ):
        options = RunOptions(group_size=1, num_groups=3)
        runner = Runner(
            Replicas([client]), agent(say), options, permits=permits, on_group=ended.append
        )
        await redis_client.hset(permits_key("r"), "granted", "2")
        task = asyncio.create_task(runner.run())
        await until(lambda: len(ended) == 2)
        await asyncio.sleep(0.1)
        assert len(runner.groups) == 2 or not runner.groups[2].episodes
        await redis_client.hset(permits_key("r"), "granted", "3")
        await redis_client.lpush("octopus:r:permits:wake", "3")
        await task
        assert len(ended) == 3
        assert await redis_client.hget(permits_key("r"), "taken") == b"3"
        assert not await redis_client.exists(running_key("r"))


async def test_groups_that_are_cut_off_run_no_more(client: OctopusClient, tmp_path: Path) -> None:
    import redis.asyncio

    async with (
        embedded_valkey(tmp_path / "valkey") as url,
        redis_permits(url, "r") as permits,
        redis.asyncio.Redis.from_url(url) as redis_client,
    ):
        await redis_client.hset(permits_key("r"), "granted", "2")
        hanging = agent(say, tasks=("hang", "hang"))
        runner = Runner(Replicas([client]), hanging, RunOptions(group_size=1), permits=permits)
        task = asyncio.create_task(runner.run())
        async with asyncio.timeout(20):
            while await redis_client.scard(running_key("r")) < 2:
                await asyncio.sleep(0.01)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        assert not await redis_client.exists(running_key("r"))


async def test_waiting_for_a_permit_outlives_a_restart_of_redis(tmp_path: Path) -> None:
    import redis.asyncio

    server = ValkeyServer(tmp_path / "valkey")
    await server.start()
    try:
        async with redis_permits(server.url, "r") as permits, asyncio.timeout(20):
            taking = asyncio.create_task(permits.take("g"))
            await asyncio.sleep(0.1)
            await server.stop()
            await asyncio.sleep(0.3)
            await server.start()
            assert not taking.done()
            async with redis.asyncio.Redis.from_url(server.url) as client:
                await client.hset(permits_key("r"), "granted", "1")
            await taking
    finally:
        await server.stop()


async def test_groups_of_another_size_than_the_trainers_are_refused(tmp_path: Path) -> None:
    import redis.asyncio

    async with (
        embedded_valkey(tmp_path / "valkey") as url,
        redis_permits(url, "r", group_size=4) as permits,
        redis.asyncio.Redis.from_url(url) as redis_client,
    ):
        await redis_client.hset(permits_key("r"), mapping={"granted": "9", "group_size": "8"})
        with pytest.raises(ConfigError, match="got 4; allowed: 8; --group-size 8"):
            await permits.take("g")
        assert await permits.counts() == (9, 0)
        await redis_client.hset(permits_key("r"), "group_size", "4")
        await permits.take("g")
        assert await permits.counts() == (9, 1)


async def test_redis_that_stays_away_is_told_with_its_remedy() -> None:
    async with redis_permits(f"redis://127.0.0.1:{free_port()}", "r", patience_s=0) as permits:
        with pytest.raises(Unavailable, match="--redis-url"):
            await permits.take("g")


async def test_permit_of_a_group_that_never_opened_is_given_back(
    client: OctopusClient, tmp_path: Path
) -> None:
    import redis.asyncio

    async with (
        embedded_valkey(tmp_path / "valkey") as url,
        redis_permits(url, "r") as permits,
        redis.asyncio.Redis.from_url(url) as redis_client,
    ):
        await redis_client.hset(permits_key("r"), "granted", "9")
        await client.close()
        runner = Runner(Replicas([client]), agent(say), RunOptions(group_size=2), permits=permits)
        with pytest.raises(ClientClosed):
            await runner.run()
        assert await redis_client.hget(permits_key("r"), "taken") == b"0"


async def test_agent_without_tasks_is_refused(client: OctopusClient) -> None:
    with pytest.raises(ConfigError, match="no tasks"):
        await Runner(Replicas([client]), agent(say, tasks=()), RunOptions(num_groups=1)).run()


async def octopus(*words: str) -> asyncio.subprocess.Process:
    """The command with SIGINT ignored, as a script's `command &` starts it; its output piped."""
    return await asyncio.create_subprocess_exec(
        "sh",
        "-c",
        'trap "" INT; exec "$0" "$@"',
        sys.executable,
        "-m",
        "harness_sdk.cli",
        *words,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )


async def test_eval_command_scores_each_task_once_and_writes_figures(
    service: Running, folder: Path, tmp_path: Path
) -> None:
    figures = tmp_path / "made" / "figures.json"
    process = await octopus(
        "eval", str(folder), "--address", service.address, "--json", str(figures)
    )
    out, err = await process.communicate()
    assert process.returncode == 0, err.decode()
    found = json.loads(figures.read_text())
    assert found["accuracy"] == pytest.approx(2 / 3)
    assert found["stderr"] == pytest.approx(1 / 3)
    assert (found["tasks"], found["episodes"], found["turns"]) == (3, 3, 1.0)
    assert found["metrics"] == {"length": 1.0}
    assert {result["task_id"] for result in found["results"]} == {"a", "b", "c"}
    assert b"accuracy  0.6667 +- 0.3333 over 3 tasks" in out
    assert {record.group_id for record in service.records.written} == {""}


async def test_eval_command_takes_the_tasks_that_are_for_it(
    service: Running, folder: Path, tmp_path: Path
) -> None:
    with (folder / "agent.py").open("a") as file:
        file.write('\n\ndef eval_tasks():\n    return [t for t in tasks() if t["id"] == "b"]\n')
    figures = tmp_path / "figures.json"
    for words in (
        ("run", str(folder), "--address", service.address, "--group-size", "1"),
        ("eval", str(folder), "--address", service.address, "--json", str(figures)),
    ):
        process = await octopus(*words)
        _, err = await process.communicate()
        assert process.returncode == 0, err.decode()
    assert [result["task_id"] for result in json.loads(figures.read_text())["results"]] == ["b"]
    assert sorted(record.task_id for record in service.records.written) == ["a", "b", "b", "c"]


async def test_run_command_prints_groups_and_a_summary(service: Running, folder: Path) -> None:
    process = await octopus(
        "run", str(folder), "--address", service.address, "--group-size", "2", "--groups", "5"
    )
    out, err = await process.communicate()
    assert process.returncode == 0, err.decode()
    assert out.count(b"group ") == 5
    assert b"10 episodes" in out
    assert len(service.records.written) == 10


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
async def test_run_command_stops_cleanly_at_a_signal(
    service: Running, folder: Path, number: signal.Signals
) -> None:
    (folder / "answers.py").write_text('ANSWERS = {"a": "a", "hang": ""}\n')
    process = await octopus(
        "run", str(folder), "--address", service.address, "--group-size", "1", "--groups", "2"
    )
    assert process.stdout is not None
    await process.stdout.readline()
    process.send_signal(number)
    out, err = await process.communicate()
    assert process.returncode == 130, err.decode()
    assert b"accuracy  1.0000" in out
    assert b"Traceback" not in err
    await until(lambda: len(service.records.written) == 2)
    assert service.records.written[1].stop_reason == "cancelled"


async def test_command_without_a_service_says_what_to_give(folder: Path) -> None:
    process = await octopus("run", str(folder))
    _, err = await process.communicate()
    assert process.returncode == 1
    assert b"give --address host:port" in err


async def test_command_takes_a_model_or_an_address(folder: Path) -> None:
    process = await octopus("run", str(folder), "--address", "localhost:1", "--model", "smollm2")
    _, err = await process.communicate()
    assert process.returncode == 1
    assert b"got model smollm2 and address localhost:1; give one of them" in err


def test_group_names_are_short_whatever_the_task_is_called() -> None:
    first, second = (new_group_id("What is\nthe " + "long " * 400 + "question?") for _ in range(2))
    assert first != second
    assert first.startswith("What isthe long ") and first.isprintable()
    assert len(first) == 128 + 13
