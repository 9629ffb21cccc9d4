"""A real verifiers environment on the OpenAI endpoint: one record for each of its episodes."""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from harness_sdk.cli.processes import spawn
from harness_sdk.environments.verifiers import (
    VerifiersOptions,
    VerifiersRunner,
    load_environment,
)
from harness_sdk.errors import ConfigError, ServiceError
from harness_sdk.permits import NoPermits
from harness_sdk.runner import GroupOutcome
from rollout_service.access import Access
from tests.service.openai_service import Endpoint, endpoint

TASKSET = "sums_taskset"
DATA = Path(__file__).parents[1] / "data" / "verifiers"
LOCAL = {"agent": {"runtime": {"type": "subprocess"}}}
pytestmark = [
    # What it imports warns of its own affairs.
    pytest.mark.filterwarnings("ignore"),
]


@pytest.fixture
def environment(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(DATA))
    return load_environment(TASKSET, settings=LOCAL)


def second_thoughts(text: str) -> str:
    """A model that is right about 3 + 3 at once, and about 4 + 4 never."""
    return "6" if "3 + 3" in text else "9"


def options(service: Endpoint, **fields: Any) -> VerifiersOptions:
    return VerifiersOptions(url=service.url, rewards=(0.0, 2.0), **fields)


async def test_each_episode_is_one_record_with_its_reward(environment: Any) -> None:
    told: list[GroupOutcome] = []
    async with endpoint(second_thoughts) as service:
        runner = VerifiersRunner(
            environment, options(service, group_size=2, sampling={"max_tokens": 8}),
            on_group=told.append,
        )  # fmt: skip
        groups = await runner.run()
        records = service.records.written
        texts = [service.path(record, record.nodes[-1]) for record in records]
    assert sorted(told, key=id) == sorted(groups, key=id)
    assert [group.task_id for group in groups] == ["sum-3", "sum-4"]
    assert [group.rewards for group in groups] == [[1.0, 1.0], [0.0, 0.0]]
    assert len(records) == 4
    by_group = {group.group_id: group.rewards[0] for group in groups}
    assert len(by_group) == 2
    for record, text in zip(records, texts, strict=True):
        assert record.reward == by_group[record.group_id]
        assert record.group_id.startswith(f"{record.task_id}/")
        # One path, two turns: the history that came back was not appended again.
        assert [node.parent for node in record.nodes] == list(range(-1, len(record.nodes) - 1))
        assert sum(any(node.sampled) for node in record.nodes) == 2
        assert text.count("What is") == text.count("Sure?") == 1
    outcomes = [episode for group in groups for episode in group.episodes]
    assert {each.answer for each in outcomes} == {"6", "9"}
    assert {each.episode_id for each in outcomes} == {record.episode_id for record in records}
    assert all(each.num_turns == 2 and each.num_tokens > 0 for each in outcomes)


async def test_a_failed_episode_carries_no_reward(environment: Any) -> None:
    def broken(text: str) -> str:
        raise RuntimeError("no model today")

    async with endpoint(broken) as service:
        (group,) = await VerifiersRunner(
            environment, options(service, group_size=1, num_groups=1)
        ).run()
        assert not [record for record in service.records.written if record.reward is not None]
    (outcome,) = group.episodes
    assert outcome.reward is None and outcome.error
    assert group.rewards == []


class NotedPermits(NoPermits):
    """Groups that took a permit, and those of which it was said that they run no more."""

    def __init__(self) -> None:
        super().__init__()
        self.taken: list[str] = []
        self.ended: list[str] = []

    async def take(self, permit_id: str) -> int:
        self.taken.append(permit_id)
        return await super().take(permit_id)

    async def end(self, permit_id: str) -> None:
        self.ended.append(permit_id)


async def test_groups_that_are_cut_off_run_no_more(environment: Any) -> None:
    permits = NotedPermits()
    async with endpoint(lambda text: "6" if "3 + 3" in text else None) as service:
        playing = options(service, group_size=1)
        runner = VerifiersRunner(environment, playing, permits=permits)
        task = asyncio.create_task(runner.run())
        async with asyncio.timeout(60):
            while len(permits.ended) < 1 or service.scripted.running_turns < 1:
                await asyncio.sleep(0.01)
        assert len(permits.taken) == 2
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
    assert permits.ended == permits.taken


async def test_a_reward_outside_the_declared_range_names_it(environment: Any) -> None:
    async with endpoint(second_thoughts) as service:
        runner = VerifiersRunner(
            environment, VerifiersOptions(url=service.url, group_size=1, num_groups=1)
        )
        with pytest.raises(ConfigError, match=r"2\.0; allowed: 0\.0 to 1\.0.*--rewards"):
            await runner.run()


async def test_a_wrong_token_is_told_at_once(
    environment: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OCTOPUS_TOKEN", "guess")
    async with endpoint(second_thoughts, api_key="sesame", access=Access("sesame")) as service:
        runner = VerifiersRunner(environment, options(service, group_size=1, num_groups=1))
        with pytest.raises(ServiceError, match="401"):
            await runner.run()


def test_what_cannot_be_loaded_is_named() -> None:
    with pytest.raises(ConfigError, match=r"taskset no-such-taskset.*install"):
        load_environment("no-such-taskset")
    with pytest.raises(ConfigError, match="rewards is no range"):
        VerifiersOptions(url="http://x/v1", rewards=(1.0, 0.0))


async def test_the_command_plays_a_taskset_and_prints_its_groups(tmp_path: Path) -> None:
    log = tmp_path / "log"
    async with endpoint(second_thoughts) as service:
        process = await spawn(
            [sys.executable, "-m", "harness_sdk.cli", "verifiers", TASKSET, "--url", service.url,
             "--group-size", "2", "--rewards", "0,2", "--env", json.dumps(LOCAL)],
            log_path=log,
            environment={"PYTHONPATH": str(DATA)},
        )  # fmt: skip
        assert await asyncio.wait_for(process.wait(), 60) == 0, log.read_text()
        assert len(service.records.written) == 4
    text = log.read_text()
    assert "sum-3  reward 1.000  2 episodes, 0 failed" in text
    assert "sum-4  reward 0.000  2 episodes, 0 failed" in text
