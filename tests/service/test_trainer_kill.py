"""SIGKILL of a trainer that publishes, in the middle of a version and at any executed line, several
times a run: nothing tells it afterwards.

Every function is as likely as any other, however few lines of it run.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import random
import signal
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiomqtt
import pytest

from harness_sdk import control
from harness_sdk.broker_address import broker_address
from harness_sdk.cli.embedded import embedded_broker
from rollout_service.bus import read_bus_state
from tests.tiny_models import save_tiny_model
from tests.trainer_process import COUNT_FILE, PUBLISH_POINTS, run_trainer
from tests.trainer_runs import assert_equal, fill, final, stream_config
from tests.valkey import embedded_valkey
from trainer_service.config import TrainerConfig
from trainer_service.run_keys import permits
from trainer_service.stream import RedisLink

RUN, NUM_VERSIONS = "r", 3
Final = tuple[bytes, dict[str, Any], dict[str, Any]]
Lines = dict[str, int]
"""Executed lines by function."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("model"), "qwen3_5")


@contextlib.asynccontextmanager
async def _world(folder: Path, model: Path) -> AsyncIterator[tuple[TrainerConfig, RedisLink]]:
    """Servers, a full stream, and a trainer that publishes; no replica listens."""
    async with (
        embedded_valkey(folder / "valkey") as redis_url,
        embedded_broker() as mqtt_url,
    ):
        config = stream_config(
            folder, model, RUN, redis_url,
            mqtt={"url": mqtt_url}, publish={"enabled": True, "ack_timeout_s": 1.0},
        )  # fmt: skip
        link = RedisLink(redis_url)
        await fill(link, RUN)
        yield config, link
        await link.close()


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory, model: Path) -> tuple[Final, Lines]:
    """Where the run leads that nothing interrupts, and the lines that takes."""

    async def run_once(folder: Path) -> tuple[Final, Lines]:
        async with _world(folder, model) as (config, _):
            assert await run_trainer(config, crash_line=("", 0)) == 0
            return final(config), json.loads((config.folder / COUNT_FILE).read_text())

    return asyncio.run(run_once(tmp_path_factory.mktemp("undisturbed")))


async def _announced(config: TrainerConfig, link: RedisLink) -> int:
    """Version that is announced, 0 for none; what it names is in Redis, whole."""
    policy = (await read_bus_state(config.mqtt.url, RUN, listen_s=0.2)).policy
    if policy is None:
        return 0
    meta = await link.client.hgetall(control.adapter_meta_key(RUN, policy.version))
    chunks = [
        await link.client.get(control.adapter_chunk_key(RUN, policy.version, index))
        for index in range(int(meta[b"num_chunks"]))
    ]
    assert hashlib.sha256(b"".join(chunks)).hexdigest() == policy.sha256
    return policy.version


def _durable(config: TrainerConfig) -> int:
    """Version of the newest checkpoint that is whole."""
    folder = config.folder / "checkpoints"
    if not folder.exists() or not any(path.name.isdigit() for path in folder.iterdir()):
        return 0
    return final(config)[2]["progress"]["version"]


async def _assert_ended_as(wanted: Final, config: TrainerConfig, link: RedisLink) -> None:
    adapter, tensors, state = wanted
    assert await _announced(config, link) == NUM_VERSIONS
    found, found_tensors, found_state = final(config)
    assert found == adapter
    assert_equal(found_tensors, tensors)
    assert found_state["progress"] == state["progress"]
    for name in ("dropped_episodes", "dropped_groups"):
        assert found_state["feed"][name] == state["feed"][name]
    assert set(found_state["feed"]["recent"]) == set(state["feed"]["recent"])
    assert await permits(link, RUN) == (3 + 1 + 11, 0)
    # What the last step used is acknowledged; what no step wanted is still there.
    pending = await link.client.xpending(control.episodes_key(RUN), "trainer")
    assert pending["pending"] == 0


@contextlib.asynccontextmanager
async def _heard(url: str) -> AsyncIterator[list[int]]:
    """Versions as they are announced."""
    versions: list[int] = []
    address = broker_address(url)
    async with aiomqtt.Client(address.hostname, address.port) as client:

        async def listen() -> None:
            async for message in client.messages:
                assert isinstance(message.payload, bytes)
                versions.append(control.PolicyAnnouncement.from_json(message.payload).version)

        await client.subscribe(control.policy_topic(RUN), qos=1)
        async with asyncio.TaskGroup() as tasks:
            listening = tasks.create_task(listen())
            yield versions
            listening.cancel()


@pytest.mark.parametrize(
    ("crash_at", "stored", "announced"),
    [*zip(PUBLISH_POINTS, (1, 2, 2), (1, 1, 2), strict=True)],
)
async def test_trainer_killed_within_a_version_publishes_it_again_and_goes_on(
    tmp_path: Path,
    model: Path,
    undisturbed: tuple[Final, Lines],
    crash_at: str,
    stored: int,
    announced: int,
) -> None:
    async with _world(tmp_path, model) as (config, link), _heard(config.mqtt.url or "") as versions:
        code = await run_trainer(config, crash_at=crash_at, crash_step=2)
        assert (code, _durable(config)) == (-signal.SIGKILL, 2)
        assert await _announced(config, link) == announced
        assert await link.client.exists(control.adapter_meta_key(RUN, 2)) == (stored == 2)
        assert await run_trainer(config) == 0
        await _assert_ended_as(undisturbed[0], config, link)
        assert versions == [*range(1, announced + 1), 2, 3]


async def _check(
    folder: Path, model: Path, undisturbed: tuple[Final, Lines], seed: int, num_kills: int
) -> None:
    lines = undisturbed[1]
    rng = random.Random(seed)
    async with _world(folder, model) as (config, link):
        announced, kills = 0, 0
        for _ in range(num_kills):
            function = rng.choice(sorted(lines))
            number = rng.randint(1, max(1, lines[function] // (kills + 1)))
            code = await run_trainer(config, crash_line=(function, number))
            assert code in (0, -signal.SIGKILL)
            kills += code != 0
            before, announced = announced, await _announced(config, link)
            # Versions only rise, and none is told of that a restart could lose.
            assert before <= announced <= _durable(config)
            if code == 0:
                break
        assert await run_trainer(config) == 0
        await _assert_ended_as(undisturbed[0], config, link)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(2))
async def test_trainer_killed_at_random_lines_ends_as_if_nothing_happened(
    tmp_path: Path, model: Path, undisturbed: tuple[Final, Lines], seed: int
) -> None:
    await _check(tmp_path, model, undisturbed, seed, num_kills=3)


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(100, 140))
async def test_trainer_killed_again_and_again_ends_as_if_nothing_happened(
    tmp_path: Path, model: Path, undisturbed: tuple[Final, Lines], seed: int
) -> None:
    await _check(tmp_path, model, undisturbed, seed, num_kills=6)
