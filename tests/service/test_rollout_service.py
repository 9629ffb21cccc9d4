"""The wired replica: an announced version goes live under running episodes."""

from __future__ import annotations

import asyncio
import hashlib
import os
import signal
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import aiomqtt
import peft
import pytest
import redis.asyncio
import torch
import transformers
from safetensors.torch import load_file

from harness_sdk import control
from harness_sdk.cli.embedded import embedded_broker
from harness_sdk.cli.settings import validate_config
from harness_sdk.client import OctopusClient
from harness_sdk.control import PolicyAnnouncement, ReplicaState
from harness_sdk.errors import ConfigError, EpisodeNotFound, InvalidRequest, Unavailable
from harness_sdk.fingerprints import model_hash
from harness_sdk.options import RetryPolicy
from harness_sdk.record import record_from_bytes
from harness_sdk.types import SamplingOptions
from rollout_service.bus import read_bus_state
from rollout_service.config import ADDRESS_FILE, RolloutConfig
from rollout_service.service import RolloutService, run_service
from tests.chat_tokenizers import save_chat_tokenizer
from tests.tiny_models import LORA_TARGETS, save_tiny_model
from tests.valkey import embedded_valkey

# peft 0.21 reads the name that transformers 5.24 deprecates.
pytestmark = pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing.:FutureWarning")

SAMPLING = SamplingOptions(max_tokens=3, seed=1)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_chat_tokenizer(save_tiny_model(tmp_path_factory.mktemp("model"), "qwen3_5"))


@pytest.fixture
async def settings(model: Path, tmp_path: Path) -> AsyncIterator[dict[str, Any]]:
    async with embedded_valkey(tmp_path / "valkey") as redis_url, embedded_broker() as mqtt_url:
        yield {
            "run": "live", "replica_id": "r", "run_folder": str(tmp_path / "runs"),
            "model": {"path": str(model)}, "server": {"port": 0, "grace_s": 1},
            "redis": {"url": redis_url}, "mqtt": {"url": mqtt_url},
            "adapters": {"max_versions": 2},
        }  # fmt: skip


def _save_adapter(model: Path, folder: Path, seed: int) -> Path:
    base = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    config = peft.LoraConfig(
        r=4, lora_alpha=8, target_modules=LORA_TARGETS["qwen3_5"], task_type="CAUSAL_LM"
    )
    torch.manual_seed(seed)
    peft.get_peft_model(base, config).save_pretrained(str(folder))
    return folder


async def _announce(url: str, model: Path, version: int, folder: Path) -> None:
    data = (folder / control.ADAPTER_FILE).read_bytes()
    announcement = PolicyAnnouncement(
        version=version,
        sha256=hashlib.sha256(data).hexdigest(),
        num_tensors=len(load_file(folder / control.ADAPTER_FILE)),
        rank=4,
        alpha=8.0,
        uri=folder.as_uri(),
        base_model=model_hash(str(model)),
        probe_token_ids=(1, 2, 3),
    )
    async with aiomqtt.Client("127.0.0.1", int(url.rpartition(":")[2])) as client:
        await client.publish(control.policy_topic("live"), announcement.to_json(), 1, True)


async def _state_until(url: str, holds: Callable[[ReplicaState], bool]) -> ReplicaState:
    async with asyncio.timeout(20):
        while True:
            bus = await read_bus_state(url, "live", listen_s=0.1)
            if bus.replicas and holds(bus.replicas[0]):
                return bus.replicas[0]


async def test_version_goes_live_under_a_running_episode(
    settings: dict[str, Any], model: Path, tmp_path: Path
) -> None:
    mqtt_url = settings["mqtt"]["url"]
    folders = [
        _save_adapter(model, tmp_path / "runs" / "live" / f"a{seed}", seed) for seed in (1, 2, 3)
    ]
    async with RolloutService(validate_config(RolloutConfig, settings)) as service:
        applying = asyncio.create_task(service.run())
        async with (
            OctopusClient.connect(service.address) as client,
            client.episode(task_id="old") as old,
        ):
            assert (await old.root.generate("a", sampling=SAMPLING)).policy_version == 0
            await _announce(mqtt_url, model, 1, folders[0])
            state = await _state_until(mqtt_url, lambda state: 1 in state.versions)
            assert (state.address, state.alive, state.error) == (service.address, True, "")
            assert len(state.probe_logprobs) == 2
            # It keeps the version that it began with; a new one begins with the newest.
            assert (await old.root.generate("b", sampling=SAMPLING)).policy_version == 0
            async with client.episode(task_id="new") as new:
                assert (await new.root.generate("a", sampling=SAMPLING)).policy_version == 1
                await _announce(mqtt_url, model, 2, folders[1])
                await _state_until(mqtt_url, lambda state: 2 in state.versions)
                # Version 1 is held by `new` and 2 is the newest: there is no room for 3.
                await _announce(mqtt_url, model, 3, folders[2])
                state = await _state_until(mqtt_url, lambda state: state.waiting_version == 3)
                assert "open episodes hold versions 1 and 2 is the newest" in state.waiting_for
                assert (await new.root.generate("b", sampling=SAMPLING)).policy_version == 1
            # Its end is enough: nobody announces version 3 again.
            state = await _state_until(mqtt_url, lambda state: 3 in state.versions)
            assert (state.versions, state.error) == ((0, 2, 3), "")
            assert (state.waiting_version, state.waiting_for) == (0, "")
            assert (await client.status()).policy_versions == (0, 2, 3)
        applying.cancel()
    assert not (await _state_until(mqtt_url, lambda state: not state.alive)).versions


async def test_limits_of_the_configuration_are_those_of_its_episodes(
    settings: dict[str, Any],
) -> None:
    settings["limits"] = {"max_visible_tokens": 300, "allow_truncated_sampling": True}
    truncated = SamplingOptions(max_tokens=3, top_p=0.5)
    async with (
        RolloutService(validate_config(RolloutConfig, settings)) as service,
        OctopusClient.connect(service.address) as client,
        client.episode(primitives=()) as episode,
    ):
        assert client.info.limits.thread_budget == 300
        assert (await episode.root.generate("a", sampling=truncated)).token_ids
    settings["limits"] = {}
    async with (
        RolloutService(validate_config(RolloutConfig, settings)) as service,
        OctopusClient.connect(service.address) as client,
        client.episode(primitives=()) as episode,
    ):
        with pytest.raises(InvalidRequest, match=r"--limits\.allow-truncated-sampling"):
            await episode.root.generate("a", sampling=truncated)


async def test_port_that_is_taken_is_a_configuration_error(settings: dict[str, Any]) -> None:
    async with RolloutService(validate_config(RolloutConfig, settings)) as service:
        port = int(service.address.rpartition(":")[2])
        second = {**settings, "replica_id": "r2", "server": {"port": port}}
        with pytest.raises(ConfigError, match="cannot bind"):
            async with RolloutService(validate_config(RolloutConfig, second)):
                pass


async def _until(path: Path) -> str:
    async with asyncio.timeout(60):
        while not path.exists():
            await asyncio.sleep(0.02)
    return path.read_text("utf-8")


@pytest.mark.parametrize("twice", [False, True], ids=["lets episodes end", "a second signal"])
async def test_drained_service_takes_no_episode_and_lets_its_own_end(
    settings: dict[str, Any], twice: bool
) -> None:
    settings["server"] |= {"drain_s": 60.0}
    config = validate_config(RolloutConfig, settings)
    serving = asyncio.create_task(run_service(config))
    address = await _until(config.folder / ADDRESS_FILE)
    async with OctopusClient.connect(address, retry=RetryPolicy(max_attempts=1)) as client:
        try:
            async with client.episode(primitives=()) as episode:
                await episode.root.generate("a", sampling=SAMPLING)
                os.kill(os.getpid(), signal.SIGTERM)
                await _state_until(settings["mqtt"]["url"], lambda state: not state.alive)
                with pytest.raises(Unavailable, match="connect to another replica"):
                    async with client.episode():
                        pass
                if twice:
                    os.kill(os.getpid(), signal.SIGTERM)
                    await asyncio.wait_for(asyncio.shield(serving), 10)
                await episode.root.generate("b", sampling=SAMPLING)
                await episode.root.done("b")
                await episode.close(reward=1.0)
        except (EpisodeNotFound, Unavailable):
            assert twice
    await asyncio.wait_for(serving, 10)
    async with redis.asyncio.Redis.from_url(settings["redis"]["url"]) as store:
        entries: Any = await store.xrange(control.episodes_key("live"))
    ((_, fields),) = entries
    record = record_from_bytes(fields[b"record"])
    assert (record.stop_reason, record.reward) == (("cancelled", None) if twice else ("done", 1.0))
