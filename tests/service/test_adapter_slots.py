"""Versions that wait for a slot, and what happens to them meanwhile."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest

import rollout_service.adapters
from harness_sdk.control import ReplicaState
from rollout_service.adapters import Adapters
from tests.adapter_cases import PROBE, Replica, drop_tensor, open_replica

# peft 0.21 reads the name that transformers 5.24 deprecates.
pytestmark = pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing.:FutureWarning")


@pytest.fixture
async def replica(chat_folder: Path, tmp_path: Path) -> AsyncGenerator[Replica]:
    async with open_replica(chat_folder, tmp_path) as replica:
        yield replica


async def test_version_without_a_slot_waits_until_one_frees(replica: Replica) -> None:
    folders = [replica.adapter(seed) for seed in range(1, 5)]
    for version in (1, 2):
        await replica.adapters.apply(replica.announce(version, folders[version - 1]))
    replica.pinned.update({0, 1})
    state = await replica.adapters.apply(replica.announce(3, folders[2]))
    # 1 is held by an episode and 2 is the newest: nothing may go, and nothing is wrong.
    assert (state.versions, state.error) == ((0, 1, 2), "")
    assert state.waiting_version == 3
    assert state.waiting_for == (
        "open episodes hold versions 1 and 2 is the newest; adapters.max_versions is 2"
    )
    # A repeat, as trainers send them, changes nothing.
    assert await replica.adapters.apply(replica.announce(3, folders[2])) is state
    reports: list[ReplicaState] = []
    async with _serving(replica.adapters, reports):
        await asyncio.sleep(0.2)
        assert (reports, replica.adapters.newest()) == ([], 2)
        replica.pinned.discard(1)
        async with asyncio.timeout(5):
            while not reports:
                await asyncio.sleep(0.01)
    assert reports == [replica.adapters.state]
    assert (reports[0].versions, reports[0].waiting_version, reports[0].waiting_for) == (
        (0, 2, 3), 0, "",
    )  # fmt: skip
    assert sorted(path.name for path in (replica.folder / "cache").iterdir()) == [
        "version-2", "version-3",
    ]  # fmt: skip
    assert reports[0].probe_logprobs == await replica.engine.score(PROBE, policy_version=3)
    with pytest.raises(Exception, match="not loaded"):
        await replica.engine.score(PROBE, policy_version=1)


async def test_version_that_waits_says_so_again_and_again(
    replica: Replica, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rollout_service.adapters, "HEARTBEAT_S", 0.1)
    await _until_full(replica)
    reports: list[ReplicaState] = []
    async with _serving(replica.adapters, reports), asyncio.timeout(5):
        while len(reports) < 3:
            await asyncio.sleep(0.01)
    assert [state.waiting_version for state in reports[:3]] == [3] * 3
    waited = [state.waiting_s for state in reports[:3]]
    assert waited == sorted(waited)
    assert waited[0] >= 0.1


async def test_newer_version_takes_the_place_of_the_one_that_waits(replica: Replica) -> None:
    await _until_full(replica)
    folders = [replica.adapter(seed) for seed in (4, 5)]
    assert (await replica.adapters.apply(replica.announce(5, folders[1]))).waiting_version == 5
    cached = sorted(path.name for path in (replica.folder / "cache").iterdir())
    assert cached == ["version-1", "version-2", "version-5"]
    # An older one comes too late, a bad one changes nothing: 5 waits on.
    state = await replica.adapters.apply(replica.announce(4, folders[0]))
    assert ("not newer" in state.error, state.error_version, state.waiting_version) == (True, 4, 5)
    bad = replace(replica.announce(6, folders[0]), sha256="0" * 64)
    state = await replica.adapters.apply(bad)
    assert (state.error_version, state.waiting_version) == (6, 5)
    replica.pinned.clear()
    reports: list[ReplicaState] = []
    async with _serving(replica.adapters, reports), asyncio.timeout(5):
        while not reports:
            await asyncio.sleep(0.01)
    assert (reports[0].versions, reports[0].waiting_version) == ((0, 2, 5), 0)
    assert reports[0].error == ""


async def test_version_that_the_engine_refuses_once_a_slot_is_free_is_refused(
    replica: Replica,
) -> None:
    await _until_full(replica)
    bad = replica.edited("bad", drop_tensor)
    assert (await replica.adapters.apply(replica.announce(4, bad))).waiting_version == 4
    replica.pinned.clear()
    reports: list[ReplicaState] = []
    async with _serving(replica.adapters, reports), asyncio.timeout(5):
        while not reports:
            await asyncio.sleep(0.01)
    assert "layers.0.mlp.up_proj.lora_A.weight" in reports[0].error
    assert (reports[0].error_version, reports[0].waiting_version) == (4, 0)
    assert reports[0].versions == (0, 2)


async def _until_full(replica: Replica) -> None:
    """1 and 2 serve, 1 is held, and 3 waits."""
    for version in (1, 2, 3):
        replica.pinned.add(1)
        state = await replica.adapters.apply(replica.announce(version, replica.adapter(version)))
    assert state.waiting_version == 3


@contextlib.asynccontextmanager
async def _serving(adapters: Adapters, reports: list[ReplicaState]) -> AsyncIterator[None]:
    task = asyncio.create_task(adapters.serve_waiting(reports.append))
    try:
        yield
    finally:
        assert not task.done()
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
