"""Groups across replicas and generation beside training, with real servers between them."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import time
import urllib.request
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from harness_sdk import Episode, OctopusClient, SamplingOptions, Thread, control
from harness_sdk.agents import Agent
from harness_sdk.cli.embedded import embedded_broker
from harness_sdk.errors import ToolError
from harness_sdk.permits import Permits, redis_permits
from harness_sdk.record import EpisodeRecord, record_from_bytes
from harness_sdk.replicas import Replicas
from harness_sdk.runner import Runner, RunOptions
from rollout_service.config import RolloutConfig
from rollout_service.service import RolloutService
from tests.valkey import embedded_valkey
from trainer_service import loop
from trainer_service.config import TrainerConfig
from trainer_service.metrics import read_metrics
from trainer_service.run_keys import permits
from trainer_service.step import StepResult
from trainer_service.stream import RedisLink

RUN, GROUP_SIZE = "async", 2
SHORT = SamplingOptions(max_tokens=3, seed=0)


@dataclass(slots=True, kw_only=True)
class _World:
    """Two replicas and whatever their trainer needs."""

    common: dict[str, Any]
    services: list[RolloutService]
    clients: list[OctopusClient]
    link: RedisLink
    steps: list[tuple[float, float]] = field(default_factory=list)
    """Begin and end of each optimiser step, in seconds of the clock."""

    def config(self, *, max_policy_lag: int = 1, **fields: Any) -> TrainerConfig:
        batch = {
            "groups_per_step": 1, "group_size": GROUP_SIZE, "max_policy_lag": max_policy_lag,
            **fields.pop("batch", {}),
        }  # fmt: skip
        publish = {"min_replicas": 2, "ack_timeout_s": 20.0, **fields.pop("publish", {})}
        return TrainerConfig.model_validate(
            {**self.common, "lora": {"rank": 2, "alpha": 4.0}, "optim": {"lr": 1e-2},
             "batch": batch, "publish": publish, **fields}
        )  # fmt: skip

    async def records(self) -> list[EpisodeRecord]:
        entries: Any = await self.link.client.xrange(control.episodes_key(RUN))
        return [record_from_bytes(fields[b"record"]) for _, fields in entries]

    async def until_version(self, version: int) -> None:
        while any(service.adapters.newest() < version for service in self.services):
            await asyncio.sleep(0.02)

    async def run(self, agent: Agent, config: TrainerConfig, num_groups: int) -> Runner:
        """Groups of `agent` through the permits, and the trainer until its last step."""
        url = self.common["redis"]["url"]
        options = RunOptions(group_size=GROUP_SIZE, num_groups=num_groups, concurrency=2)
        async with redis_permits(url, RUN, group_size=GROUP_SIZE) as limit, asyncio.timeout(60):
            runner = Runner(Replicas(self.clients), agent, options, permits=limit)
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(loop.train(config, asyncio.Event()))
                tasks.create_task(runner.run())
        return runner


@pytest.fixture
async def world(
    chat_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[_World]:
    async with contextlib.AsyncExitStack() as stack:
        redis_url = await stack.enter_async_context(embedded_valkey(tmp_path / "valkey"))
        mqtt_url = await stack.enter_async_context(embedded_broker())
        common: dict[str, Any] = {
            "run": RUN, "run_folder": tmp_path / "runs", "model": {"path": chat_folder},
            "redis": {"url": redis_url}, "mqtt": {"url": mqtt_url},
        }  # fmt: skip
        services, clients, applying = [], [], []
        for number in range(2):
            fields = {
                "replica_id": f"r{number}",
                "server": {"port": 0, "grace_s": 1},
                "metrics": {"port": 0},
            }
            config = RolloutConfig.model_validate({**common, **fields})
            service = await stack.enter_async_context(RolloutService(config))
            services.append(service)
            applying.append(asyncio.create_task(service.run()))
            client = OctopusClient.connect(service.address)
            clients.append(await stack.enter_async_context(client))
        link = RedisLink(redis_url)
        world = _World(common=common, services=services, clients=clients, link=link)
        train_step = loop.train_step

        def timed_step(*args: Any, **kwargs: Any) -> StepResult:
            begin = time.time()
            result = train_step(*args, **kwargs)
            # Long enough for an episode that may run beside it.
            time.sleep(0.3)
            world.steps.append((begin, time.time()))
            return result

        monkeypatch.setattr(loop, "train_step", timed_step)
        yield world
        await link.close()
        for each in applying:
            each.cancel()
        await asyncio.gather(*applying, return_exceptions=True)


def _agent(run: Any) -> Agent:
    rewards = iter(range(1_000))
    return Agent(
        name="inline",
        tasks=lambda: [{"id": name} for name in "abcdef"],
        run=run,
        score=lambda task, answer: float(next(rewards) % 2),
        primitives=(),
        sampling=SHORT,
    )


async def _speak(thread: Thread, task: dict[str, str]) -> str:
    await thread.generate(f"say {task['id']}")
    await thread.generate("and again")
    return "x"


async def test_failed_episodes_are_replaced_and_stay_out_of_the_baseline(world: _World) -> None:
    calls = 0

    async def fails_at_first(thread: Thread, task: dict[str, str]) -> str:
        nonlocal calls
        calls += 1
        fails = calls in (1, 2, 5)
        await thread.generate(f"say {task['id']}")
        if fails:
            raise ToolError("the index is away")
        return "x"

    config = world.config(max_steps=2, batch={"incomplete": "refill"})
    runner = await world.run(_agent(fails_at_first), config, 2)
    lines = read_metrics(config.folder / "metrics.jsonl")
    assert [line["batch/episodes"] for line in lines] == [GROUP_SIZE, GROUP_SIZE]
    assert lines[-1]["dropped/tool_error"] == lines[-1]["dropped/total"] == 3.0
    assert sum(len(group.replaced) for group in runner.groups) == 3
    assert all(len(group.rewards) == GROUP_SIZE for group in runner.groups)
    records = await world.records()
    failed = [record for record in records if record.stop_reason == "tool_error"]
    assert (len(records), len(failed)) == (7, 3)
    # A replacement is an episode of the same group, and costs no permit.
    assert {record.group_id for record in records} == {group.group_id for group in runner.groups}
    assert (await permits(world.link, RUN))[1] == 2


async def test_group_is_assembled_from_several_replicas(world: _World) -> None:
    for index, client in enumerate(world.clients):
        async with client.episode(task_id="t", group_id="g", primitives=()) as episode:
            await episode.root.generate("say a", sampling=SHORT)
            await episode.root.done("a")
            await episode.close(reward=float(index))
    config = world.config(max_steps=1)
    await loop.train(config, asyncio.Event())
    (line,) = read_metrics(config.folder / "metrics.jsonl")
    assert (line["batch/groups"], line["batch/replicas"]) == (1.0, 2.0)
    assert line["publish/acknowledged"] == 2.0


@pytest.mark.parametrize("lag", [0, 1])
async def test_episodes_run_beside_a_step_as_far_as_the_lag_allows(world: _World, lag: int) -> None:
    config = world.config(max_steps=4, max_policy_lag=lag)
    await world.run(_agent(_speak), config, 4)
    lines = read_metrics(config.folder / "metrics.jsonl")
    assert [line["policy/version"] for line in lines] == [1.0, 2.0, 3.0, 4.0]
    assert max(line["policy/lag_max"] for line in lines) == lag
    beside = [
        record.episode_id
        for record in await world.records()
        for begin, end in world.steps
        if record.opened_at_s < end and begin < record.closed_at_s
    ]
    assert bool(beside) == bool(lag)
    assert lines[-1]["dropped/total"] == 0.0


async def _open(world: _World, group_id: str, policies: tuple[str, ...]) -> list[Episode]:
    """A group of one episode on each replica, each with a turn behind it."""
    episodes = []
    for client, policy in zip(world.clients, policies, strict=True):
        episode = client.episode(
            task_id="t", group_id=group_id, primitives=(), version_policy=policy
        )
        await episode.__aenter__()
        await episode.root.generate("say a", sampling=SHORT)
        episodes.append(episode)
    return episodes


async def _close(episodes: list[Episode]) -> None:
    for index, episode in enumerate(episodes):
        await episode.root.generate("and again", sampling=SHORT)
        await episode.root.done("a")
        await episode.close(reward=float(index))
        await episode.__aexit__(None, None, None)


async def test_open_episodes_cross_a_publish_and_every_token_tells_its_version(
    world: _World,
) -> None:
    config = world.config(max_steps=2)
    crossing = await _open(world, "crossing", ("keep", "refresh"))
    await _close(await _open(world, "first", ("keep", "keep")))
    async with asyncio.timeout(60):
        training = asyncio.create_task(loop.train(config, asyncio.Event()))
        await world.until_version(1)
        await _close(crossing)
        await training
    records = [record for record in await world.records() if record.group_id == "crossing"]
    versions = {
        record.replica_id: [n.policy_version for n in record.nodes if any(n.sampled)]
        for record in records
    }
    assert [set(versions["r0"]), set(versions["r1"])] == [{0}, {0, 1}]
    assert versions["r1"] == sorted(versions["r1"])
    assert {record.stop_reason for record in records} == {"done"}
    line = read_metrics(config.folder / "metrics.jsonl")[1]
    assert (line["batch/episodes"], line["policy/lag_max"]) == (2.0, 1.0)
    assert 0.5 < line["policy/lag_mean"] < 1.0
    # Nothing of the newest version differs from what the trainer computes; the older ones do.
    assert line["divergence_current/dlogp_max"] < 1e-4 < line["divergence/dlogp_max"]


async def _one_trained_while_one_runs(world: _World, limit: Permits) -> list[Episode]:
    """The running group's episodes, once another group's step was computed."""
    for group_id in ("first", "running"):
        await limit.take(group_id)
    running = await _open(world, "running", ("refresh", "refresh"))
    await _close(await _open(world, "first", ("keep", "keep")))
    await limit.end("first")
    while not world.steps:
        await asyncio.sleep(0.02)
    return running


async def test_version_waits_for_the_episodes_that_run_where_they_shall_not_cross(
    world: _World,
) -> None:
    config = world.config(max_steps=1, max_policy_lag=2, publish={"in_flight": "wait"})
    async with (
        redis_permits(world.common["redis"]["url"], RUN) as limit,
        asyncio.timeout(60),
    ):
        training = asyncio.create_task(loop.train(config, asyncio.Event()))
        running = await _one_trained_while_one_runs(world, limit)
        # Three were granted; the one that nobody took begins no group now.
        while await permits(world.link, RUN) != (2, 2):
            await asyncio.sleep(0.02)
        third = asyncio.create_task(limit.take("third"))
        # Whole and without a permit: it is no sign that one with a permit has ended.
        await _close(await _open(world, "free", ("keep", "keep")))
        await asyncio.sleep(1.0)
        assert not third.done()
        assert [service.adapters.newest() for service in world.services] == [0, 0]
        assert (await permits(world.link, RUN))[0] == 2
        await _close(running)
        await limit.end("running")
        await training
        await third
    assert [service.adapters.newest() for service in world.services] == [1, 1]
    for record in await world.records():
        assert {node.policy_version for node in record.nodes if any(node.sampled)} == {0}
    (line,) = read_metrics(config.folder / "metrics.jsonl")
    assert line["seconds/drain"] > 0.5
    assert await permits(world.link, RUN) == (4, 3)


async def test_version_waits_no_longer_than_the_deadline_for_a_group_that_died(
    world: _World,
) -> None:
    batch = {"group_deadline_s": 1.0}
    config = world.config(max_steps=1, max_policy_lag=2, batch=batch, publish={"in_flight": "wait"})
    async with (
        redis_permits(world.common["redis"]["url"], RUN) as limit,
        asyncio.timeout(60),
    ):
        training = asyncio.create_task(loop.train(config, asyncio.Event()))
        # Of three permits one group is taken and never begun.
        for group_id in ("first", "dead"):
            await limit.take(group_id)
        await _close(await _open(world, "first", ("keep", "keep")))
        await limit.end("first")
        await training
    assert [service.adapters.newest() for service in world.services] == [1, 1]
    # Three steps' worth beyond the group that was used and the one that was lost.
    assert await permits(world.link, RUN) == (1 + 1 + 3, 2)


async def test_old_tokens_are_weighed_where_staleness_is_corrected(world: _World) -> None:
    config = world.config(
        max_steps=2,
        max_policy_lag=0,
        batch={"staleness": "correct"},
        loss={"importance_cap": 1.5, "importance": "mask", "importance_level": "geometric"},
    )
    for group in ("first", "second"):
        await _close(await _open(world, group, ("keep", "keep")))
    async with asyncio.timeout(60):
        await loop.train(config, asyncio.Event())
    lines = read_metrics(config.folder / "metrics.jsonl")
    assert [line["policy/lag_max"] for line in lines] == [0.0, 1.0]
    # On policy the weights are 1; a version later they are not.
    assert lines[0]["objective/importance_mean"] == pytest.approx(1.0, abs=1e-4)
    assert abs(lines[1]["objective/importance_mean"] - 1.0) > 1e-4


async def test_dashboard_shows_only_what_the_processes_export(world: _World) -> None:
    config = world.config(report={"prometheus_port": 0})
    stop = asyncio.Event()
    async with asyncio.timeout(60):
        training = asyncio.create_task(loop.train(config, stop))
        await _close(await _open(world, "first", ("keep", "keep")))
        metrics = config.folder / "metrics.jsonl"
        while not (metrics.exists() and read_metrics(metrics)):
            await asyncio.sleep(0.05)
        addresses = [
            (config.folder / "metrics.address").read_text(),
            *(service.metrics_address for service in world.services),
        ]
        pages = [await asyncio.to_thread(_page, address) for address in addresses]
        stop.set()
        await training
    exported = {line.partition("{")[0] for page in pages for line in page.splitlines()}
    text = (Path(__file__).parents[2] / "docker" / "grafana.json").read_text()
    expressions = [
        target["expr"] for panel in json.loads(text)["panels"] for target in panel["targets"]
    ]
    shown = {name for each in expressions for name in re.findall(r"octopus_[a-z_]+(?=\{)", each)}
    assert len(shown) > 40
    assert shown <= exported
    (pattern,) = re.findall(r'__name__=~"([^"]+)"', text.replace('\\"', '"'))
    assert any(re.fullmatch(pattern, name) for name in exported)
    assert 'octopus_rollout_open_episodes{replica="r0",run="async"} 0.0' in pages[1]
    assert 'octopus_trainer_policy_version{run="async"} 1.0' in pages[0]


def _page(address: str) -> str:
    with urllib.request.urlopen(f"http://{address}/metrics", timeout=10) as reply:
        return reply.read().decode()


async def test_step_longer_than_the_deadline_is_no_sign_that_a_group_died(
    world: _World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is read during a step, which says nothing about the runners."""
    short_step: Any = loop.train_step

    def long_step(*args: Any, **kwargs: Any) -> StepResult:
        time.sleep(3.0)
        return short_step(*args, **kwargs)

    monkeypatch.setattr(loop, "train_step", long_step)
    batch = {"group_deadline_s": 3.0}
    config = world.config(max_steps=1, batch=batch, publish={"in_flight": "wait"})
    async with (
        redis_permits(world.common["redis"]["url"], RUN) as limit,
        asyncio.timeout(60),
    ):
        training = asyncio.create_task(loop.train(config, asyncio.Event()))
        running = await _one_trained_while_one_runs(world, limit)
        await asyncio.sleep(1.2)
        assert [service.adapters.newest() for service in world.services] == [0, 0]
        await _close(running)
        await limit.end("running")
        await training
    (line,) = read_metrics(config.folder / "metrics.jsonl")
    assert line["dropped/total"] == 0.0
    assert (await permits(world.link, RUN))[0] == 3
