"""Permits of a trainer: no group begins without one, and none is lost, with a real Valkey."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import redis.asyncio

from harness_sdk import OctopusClient
from harness_sdk.cli.embedded import ValkeyServer
from harness_sdk.cli.processes import free_port
from harness_sdk.control import permits_key, running_key
from harness_sdk.errors import ClientClosed, ConfigError, Unavailable
from harness_sdk.permits import redis_permits
from harness_sdk.replicas import Replicas
from harness_sdk.runner import GroupOutcome, Runner, RunOptions
from tests.service.sdk_service import scripted
from tests.service.speaking import agent, say, speaker
from tests.unit.scripted_server import until
from tests.valkey import embedded_valkey


@pytest.fixture
async def client() -> AsyncIterator[OctopusClient]:
    async with scripted(speaker) as service, OctopusClient.connect(service.address) as client:
        yield client


async def test_runner_starts_no_group_beyond_its_permits(
    client: OctopusClient, tmp_path: Path
) -> None:
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


async def test_a_run_goes_on_with_the_task_after_its_last(
    client: OctopusClient, tmp_path: Path
) -> None:
    five = agent(say, tasks="abcde")

    async def run(num_groups: int | None) -> str:
        options = RunOptions(group_size=1, num_groups=num_groups)
        groups = await Runner(Replicas([client]), five, options, permits=permits).run()
        return "".join(group.task_id for group in groups)

    async with (
        embedded_valkey(tmp_path / "valkey") as url,
        redis_permits(url, "r") as permits,
        redis.asyncio.Redis.from_url(url) as redis_client,
    ):
        await redis_client.hset(permits_key("r"), "granted", "99")
        assert [await run(None), await run(2), await run(None)] == ["abcde", "ab", "cde"]
        # What another tried in vain or gave back is no place in the order.
        await redis_client.hset(permits_key("r"), "granted", "10")
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(permits.take("vain"), 0.2)
        await redis_client.hset(permits_key("r"), "granted", "99")
        await permits.take("unopened")
        await permits.give_back("unopened")
        assert await run(6) == "abcdea"
        both = await asyncio.gather(run(7), run(7))
        assert sorted("".join(both)) == sorted("bcde" + "abcde" * 2)


async def test_groups_that_are_cut_off_run_no_more(client: OctopusClient, tmp_path: Path) -> None:
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
