"""Several replicas as processes, found through the control bus, one of which is killed; a trainer
of several processes beside them."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from harness_sdk import Limits, OctopusClient, SamplingOptions, Thread
from harness_sdk.agents import Agent
from harness_sdk.cli.discovery import discovered
from harness_sdk.cli.stack import LocalStack
from harness_sdk.cli.stack_config import StackConfig
from harness_sdk.records_file import write_records
from harness_sdk.replicas import Replicas
from harness_sdk.runner import GroupOutcome, Runner, RunOptions
from tests.chat_tokenizers import VOCAB_SIZE
from tests.random_records import random_record
from trainer_service.metrics import read_metrics

NUM_GROUPS, GROUP_SIZE = 6, 2


class _Play:
    """Episodes of two turns; between them the first ones wait until a replica was killed."""

    def __init__(self) -> None:
        self.begun = 0
        self.all_begun = asyncio.Event()
        self.killed = asyncio.Event()

    def agent(self) -> Agent:
        return Agent(
            name="two-turns",
            tasks=lambda: [{"id": f"t{number}"} for number in range(NUM_GROUPS)],
            run=self._run,
            score=lambda task, answer: 1.0,
            primitives=(),
            limits=Limits(thread_budget=400, answer_reserve=50),
            sampling=SamplingOptions(max_tokens=4, seed=0),
        )

    async def _run(self, thread: Thread, task: dict[str, str]) -> str:
        await thread.generate("hello")
        self.begun += 1
        if self.begun == 2 * GROUP_SIZE:
            self.all_begun.set()
        await self.killed.wait()
        return (await thread.generate("again")).raw_text


def _addresses(group: GroupOutcome) -> set[str]:
    return {each.address for each in group.episodes}


@pytest.mark.slow
async def test_a_killed_replica_costs_no_group_and_joins_again(
    tmp_path: Path, chat_folder: Path
) -> None:
    config = StackConfig(
        model=chat_folder, run="many", folder=tmp_path, replicas=2, with_trainer=False, threads=1
    )
    play = _Play()
    options = RunOptions(group_size=GROUP_SIZE, concurrency=2 * GROUP_SIZE, max_failures=3)
    async with asyncio.timeout(150), LocalStack(config) as stack:
        supervising = asyncio.create_task(stack.supervise())
        async with discovered(stack.mqtt_url, "many", OctopusClient.connect) as replicas:
            await _until_present(replicas, 2)
            running = asyncio.create_task(Runner(replicas, play.agent(), options).run())
            await play.all_begun.wait()
            # Two groups, one on each replica.
            assert [each.num_assigned for each in replicas.present] == [GROUP_SIZE] * 2
            dead = stack.addresses[0]
            os.kill(stack.processes["rollout-0"].pid, signal.SIGKILL)
            await _until_gone(replicas, dead)
            play.killed.set()
            groups = await running
            assert [group.rewards for group in groups] == [[1.0] * GROUP_SIZE] * NUM_GROUPS
            # Lost episodes started again elsewhere, and no group is on two replicas at its end.
            moved = [each for group in groups for each in group.replaced]
            assert [(each.address, each.lost) for each in moved] == [(dead, True)] * GROUP_SIZE
            assert all(len(_addresses(group)) == 1 for group in groups)
            assert all(_addresses(group) != {dead} for group in groups)
            await _until_present(replicas, 2)
            assert stack.num_starts == {"rollout-0": 2, "rollout-1": 1}
            again = await Runner(replicas, play.agent(), options).run()
            places = [address for group in again for address in _addresses(group)]
            assert set(places) == {each.address for each in replicas.present}
            assert len(places) == NUM_GROUPS
        assert not supervising.done()
        supervising.cancel()
        await asyncio.gather(supervising, return_exceptions=True)


async def _until_present(replicas: Replicas, count: int) -> None:
    while len(replicas.present) < count:
        await asyncio.sleep(0.05)


async def _until_gone(replicas: Replicas, address: str) -> None:
    while any(each.address == address for each in replicas.present):
        await asyncio.sleep(0.05)


@pytest.mark.slow
async def test_the_stack_starts_a_trainer_of_two_processes_that_share_the_weights(
    tmp_path: Path, chat_folder: Path
) -> None:
    records = tmp_path / "r.records"
    write_records(
        records,
        [
            random_record(
                np.random.default_rng(index), VOCAB_SIZE, num_events=4, mount_layers=(2, 5)
            )
            for index in range(2)
        ],
    )
    trainer: dict[str, Any] = {
        "objective": "sft",
        "lora": {"rank": 2},
        "batch": {"records": str(records), "episodes_per_step": 2},
        "ranks": {"sharding": "fsdp"},
    }
    config = StackConfig(
        model=chat_folder, run="two", folder=tmp_path, with_rollout=False, trainer_processes=2,
        threads=1, trainer=trainer,
    )  # fmt: skip
    async with asyncio.timeout(150), LocalStack(config) as stack:
        await stack.until_ended("trainer")
    (line,) = read_metrics(tmp_path / "two" / "metrics.jsonl")
    assert line["ranks/size"] == 2.0
