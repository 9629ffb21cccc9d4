"""Trainer and replica, real servers between them: adapter slots that episodes hold, restarts."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiomqtt
import pytest

from harness_sdk import Episode, OctopusClient, SamplingOptions, control
from harness_sdk.cli.embedded import embedded_broker
from harness_sdk.control import ReplicaState
from harness_sdk.record import record_to_bytes
from rollout_service.bus import read_bus_state
from rollout_service.config import RolloutConfig
from rollout_service.service import RolloutService
from tests.records import small_record
from tests.valkey import embedded_valkey
from trainer_service.config import TrainerConfig
from trainer_service.loop import train
from trainer_service.metrics import read_metrics
from trainer_service.run_keys import permits
from trainer_service.run_state import Progress
from trainer_service.stream import RedisLink

RUN, NUM_SLOTS, LAG = "slots", 4, 1


@dataclass(slots=True, kw_only=True)
class _World:
    """A replica of four slots and whatever its trainer needs."""

    config: TrainerConfig
    client: OctopusClient
    link: RedisLink
    mqtt_url: str
    holders: list[Episode] = field(default_factory=list)
    """Open episodes, each under a version of its own, oldest first."""
    num_groups: int = 0

    async def step(self, *, sampled_by: int, **fields: Any) -> None:
        """Finish a group, which is a step's worth, and wait until it has been made.

        Args:
            sampled_by: Policy version of its tokens.
            fields: Of its records, as `small_record` takes them.
        """
        self.num_groups += 1
        for index in range(2):
            record = small_record(
                f"{self.num_groups}-{index}", group_id=f"g{self.num_groups}",
                reward=float(index), policy_version=sampled_by, **fields,
            )  # fmt: skip
            entry: dict[Any, Any] = {control.RECORD_FIELD: record_to_bytes(record)}
            await self.link.client.xadd(control.episodes_key(RUN), entry)
        while len(self.metrics()) < self.num_groups:
            await asyncio.sleep(0.02)

    async def hold_all(self) -> None:
        """Four versions, each with an episode that stays open."""
        for version in range(1, NUM_SLOTS + 1):
            await self.step(sampled_by=version - 1)
            await self.replica_until(lambda state, v=version: v in state.versions)
            episode = await self.client.episode(task_id=f"t{version}").__aenter__()
            turn = await episode.root.generate("a", sampling=SamplingOptions(max_tokens=2))
            assert turn.policy_version == version
            self.holders.append(episode)

    def metrics(self) -> list[dict[str, Any]]:
        path = self.config.folder / "metrics.jsonl"
        return read_metrics(path) if path.exists() else []

    async def granted(self) -> int:
        return (await permits(self.link, RUN))[0]

    async def until_granted(self, number: int) -> None:
        while await self.granted() != number:
            await asyncio.sleep(0.02)

    async def replica_until(self, holds: Callable[[ReplicaState], bool]) -> ReplicaState:
        while True:
            (state,) = (await read_bus_state(self.mqtt_url, RUN, listen_s=0.1)).replicas
            if holds(state):
                return state


@pytest.fixture
async def world(chat_folder: Path, tmp_path: Path) -> AsyncIterator[_World]:
    async with contextlib.AsyncExitStack() as stack:
        redis_url = await stack.enter_async_context(embedded_valkey(tmp_path / "valkey"))
        mqtt_url = await stack.enter_async_context(embedded_broker())
        common = {
            "run": RUN, "run_folder": tmp_path / "runs", "model": {"path": chat_folder},
            "redis": {"url": redis_url}, "mqtt": {"url": mqtt_url},
        }  # fmt: skip
        rollout = RolloutConfig.model_validate(
            {**common, "replica_id": "r", "server": {"port": 0, "grace_s": 1},
             "adapters": {"max_versions": NUM_SLOTS}}
        )  # fmt: skip
        config = TrainerConfig.model_validate(
            {**common, "lora": {"rank": 2, "alpha": 4.0}, "optim": {"lr": 1e-2},
             "batch": {"groups_per_step": 1, "group_size": 2, "max_policy_lag": LAG},
             # What waits for a slot counts: it is there and will serve.
             "publish": {"min_replicas": 1, "ack_timeout_s": 20.0}}
        )  # fmt: skip
        service = await stack.enter_async_context(RolloutService(rollout))
        applying = asyncio.create_task(service.run())
        client = await stack.enter_async_context(OctopusClient.connect(service.address))
        link = RedisLink(redis_url)
        yield _World(config=config, client=client, link=link, mqtt_url=mqtt_url)
        await link.close()
        applying.cancel()
        await asyncio.gather(applying, return_exceptions=True)


@contextlib.asynccontextmanager
async def _training(config: TrainerConfig) -> AsyncIterator[asyncio.Task[Progress]]:
    """A trainer that must live until the block ends, and then end in order."""
    stop = asyncio.Event()
    task = asyncio.create_task(train(config, stop))

    def ended(_: object) -> None:
        # Whatever the block waits for does not come without a trainer.
        waiting.reschedule(0.0)

    try:
        async with asyncio.timeout(60) as waiting:
            task.add_done_callback(ended)
            try:
                yield task
            finally:
                task.remove_done_callback(ended)
    finally:
        assert not task.done(), f"the trainer ended: {task.exception()!r}"
        stop.set()
        await task


async def test_publish_waits_for_a_slot_and_the_newest_version_takes_it(
    world: _World, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO):
        async with _training(world.config) as training:
            await world.hold_all()
            await world.until_granted(4 + 2)
            # Four versions are held: the fifth has no slot. New episodes begin one version behind,
            # so no more groups are granted than before.
            await world.step(sampled_by=4)
            state = await world.replica_until(lambda state: state.waiting_version == 5)
            assert (state.versions, state.error) == ((0, 1, 2, 3, 4), "")
            assert state.waiting_for.startswith("open episodes hold versions 1, 2, 3 and 4 is")
            assert await world.granted() == 5 + 1
            # The lag allows one more step; its version takes the place of the fifth.
            await world.step(sampled_by=4)
            state = await world.replica_until(lambda state: state.waiting_version == 6)
            assert (state.versions, state.error) == ((0, 1, 2, 3, 4), "")
            # Now training waits: a group that began now would be two versions behind.
            await asyncio.sleep(1.2)
            assert await world.granted() == 6 + 0
            assert not training.done()
            await world.holders.pop(0).close(reward=0.0)
            state = await world.replica_until(lambda state: state.waiting_version == 0)
            assert (state.versions, state.error) == ((0, 2, 3, 4, 6), "")
            await world.until_granted(6 + 2)
            # And on: the next version waits like any other, for 2, 3 and 4 are held.
            await world.step(sampled_by=6)
            await world.replica_until(lambda state: state.waiting_version == 7)
            for episode in world.holders:
                await episode.close(reward=0.0)
            state = await world.replica_until(lambda state: 7 in state.versions)
            assert state.waiting_version == 0
            await world.until_granted(7 + 2)
    lines = world.metrics()
    assert [line["publish/waiting"] for line in lines] == [0, 0, 0, 0, 1, 1, 1]
    assert [line["publish/behind"] for line in lines] == [0, 0, 0, 0, 1, 2, 1]
    assert [line["publish/silent"] for line in lines] == [0] * 7
    assert max(line["policy/lag_max"] for line in lines) == LAG
    # An episode of no group, which held a slot, has nothing to teach; nothing was too old.
    assert {name for line in lines for name in line if name.startswith("dropped/")} <= {
        "dropped/total", "dropped/ungrouped",
    }  # fmt: skip
    told = [r.getMessage() for r in caplog.records if r.name == "trainer_service.publish"]
    waits = "replica r waits for a slot for version {}: open episodes hold versions {} and"
    assert len(told) == 4
    assert told[0].startswith(waits.format(5, "1, 2, 3"))
    assert told[1] == "replica r serves version 6"
    assert told[2].startswith(waits.format(7, "2, 3, 4"))
    assert told[3] == "replica r serves version 7"


async def test_trainer_restarts_while_a_version_waits(world: _World) -> None:
    async with _training(world.config):
        await world.hold_all()
        await world.step(sampled_by=4)
        await world.step(sampled_by=4)
        await world.replica_until(lambda state: state.waiting_version == 6)
    for _ in range(2):
        async with _training(world.config) as training:
            await asyncio.sleep(2.0)
            # It knows that the replica waits before it grants anything.
            assert (await world.granted(), training.done()) == (6, False)
    async with _training(world.config):
        await world.holders[1].close(reward=0.0)
        state = await world.replica_until(lambda state: state.waiting_version == 0)
        assert state.versions == (0, 1, 3, 4, 6)
        await world.until_granted(6 + 2)
        assert len(world.metrics()) == 6
    for episode in (world.holders[0], *world.holders[2:]):
        await episode.close(reward=0.0)


async def test_trainer_restarts_after_a_skipped_step_with_the_probe_of_the_version(
    world: _World,
) -> None:
    async with _training(world.config):
        await world.step(sampled_by=0)
        proved = await world.replica_until(lambda state: 1 in state.versions)
        # Not finite: there is no new version, and these tokens are the probe of none.
        await world.step(sampled_by=1, token_ids=(8, 7, 6, 5), logprob=-1e30)
    async with _training(world.config):
        await world.step(sampled_by=1)
        state = await world.replica_until(lambda state: 2 in state.versions)
    lines = world.metrics()
    assert [line["policy/version"] for line in lines] == [1.0, 1.0, 2.0]
    assert lines[-1]["publish/acknowledged"] == 1.0
    assert len(state.probe_logprobs) == len(proved.probe_logprobs) == 3


async def test_replica_that_dies_while_a_version_waits_holds_nothing_up(
    world: _World,
) -> None:
    async with _training(world.config):
        await world.hold_all()
        await world.step(sampled_by=4)
        await world.step(sampled_by=4)
        await world.replica_until(lambda state: state.waiting_version == 6)
        assert await world.granted() == 6
        topic = control.replica_topic(RUN, "r")
        gone = ReplicaState(replica_id="r", alive=False).to_json()
        async with aiomqtt.Client("127.0.0.1", int(world.mqtt_url.rpartition(":")[2])) as bus:
            await bus.publish(topic, gone, 1, True)
        await world.until_granted(6 + 2)
    for episode in world.holders:
        await episode.close(reward=0.0)
