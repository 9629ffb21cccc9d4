"""The rollout service as its users start it: real processes, a real client, real servers."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import redis.asyncio

from harness_sdk import control
from harness_sdk.cli.embedded import embedded_broker
from harness_sdk.cli.processes import free_port, spawn, stop
from harness_sdk.cli.stack import LocalStack
from harness_sdk.cli.stack_config import StackConfig
from harness_sdk.client import OctopusClient
from harness_sdk.errors import AuthError, EpisodeNotFound, ServiceError
from harness_sdk.record import record_from_bytes
from rollout_service.bus import read_bus_state
from tests.chat_tokenizers import save_chat_tokenizer
from tests.e2e.rollout_process import ROLLOUT, play_episode, until_gone, until_listening
from tests.tiny_models import save_tiny_model
from tests.valkey import embedded_valkey


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_chat_tokenizer(save_tiny_model(tmp_path_factory.mktemp("model"), "qwen3_5"))


@pytest.fixture
async def servers(tmp_path: Path) -> AsyncIterator[dict[str, str]]:
    async with embedded_valkey(tmp_path / "valkey") as redis_url, embedded_broker() as mqtt_url:
        yield {"OCTOPUS_REDIS_URL": redis_url, "OCTOPUS_MQTT_URL": mqtt_url}


@pytest.mark.slow
async def test_command_serves_a_client_and_stops_at_sigterm(
    model: Path, tmp_path: Path, servers: dict[str, str]
) -> None:
    port, log = free_port(), tmp_path / "rollout.log"
    process = await spawn(
        [*ROLLOUT, "--model.path", str(model), "--run", "e2e", "--replica-id", "r-7",
         "--run-folder", str(tmp_path / "runs"), "--server.port", str(port),
         "--server.grace-s", "2"],
        log_path=log,
        environment={**servers, "OCTOPUS_TOKEN": "sesame", "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    try:
        await until_listening(process, port, log)
        address = f"127.0.0.1:{port}"
        with pytest.raises(AuthError):
            async with OctopusClient.connect(address):
                pass
        async with OctopusClient.connect(address, token="sesame") as client:
            info = client.info
            assert (info.replica_id, info.run, info.engine) == ("r-7", "e2e", "transformers")
            assert info.policy_versions == (0,)
            entry_id = await play_episode(client, "episode-1")
            async with redis.asyncio.Redis.from_url(servers["OCTOPUS_REDIS_URL"]) as store:
                entries: Any = await store.xrange(control.episodes_key("e2e"))
            assert entries[0][0].decode() == entry_id
            record = record_from_bytes(entries[0][1][b"record"])
            assert (record.episode_id, record.reward, record.answer) == ("episode-1", 1.0, "42")
            bus = await read_bus_state(servers["OCTOPUS_MQTT_URL"], "e2e", listen_s=0.2)
            assert [(r.replica_id, r.alive, r.address) for r in bus.replicas] == [
                ("r-7", True, address)
            ]
            # An open episode does not hold the service up, and hears of its end.
            with pytest.raises(EpisodeNotFound, match="the service closed the episode"):
                async with client.episode(task_id="t"):
                    began = time.monotonic()
                    process.send_signal(signal.SIGTERM)
                    assert await asyncio.wait_for(process.wait(), 20) == 0
                    assert time.monotonic() - began < 10
    finally:
        await stop(process, 0)
    bus = await read_bus_state(servers["OCTOPUS_MQTT_URL"], "e2e", listen_s=0.2)
    assert [replica.alive for replica in bus.replicas] == [False]
    text = log.read_text()
    assert "sesame" not in text
    assert 'path = "' in text, "the resolved configuration is in the log"
    assert "Traceback" not in text, text


@pytest.mark.slow
async def test_stop_without_redis_keeps_the_episode_for_the_next_start(
    model: Path, tmp_path: Path
) -> None:
    redis_port, port = free_port(), free_port()
    command = [*ROLLOUT, "--model.path", str(model), "--server.port", str(port),
               "--run-folder", str(tmp_path / "runs"), "--replica-id", "r",
               "--redis.url", f"redis://127.0.0.1:{redis_port}/0",
               "--server.grace-s", "0.5"]  # fmt: skip
    log = tmp_path / "rollout.log"
    process = await spawn(command, log_path=log, environment={"OMP_NUM_THREADS": "1"})
    try:
        await until_listening(process, port, log)
        async with OctopusClient.connect(f"127.0.0.1:{port}") as client:
            closing = asyncio.create_task(play_episode(client, "kept"))
            async with asyncio.timeout(30):
                while "Redis did not take an episode" not in log.read_text():
                    await asyncio.sleep(0.1)
            process.send_signal(signal.SIGTERM)
            assert await asyncio.wait_for(process.wait(), 20) == 0
            with pytest.raises(ServiceError):
                await closing
        async with embedded_valkey(tmp_path / "valkey", redis_port) as url:
            process = await spawn(command, log_path=log, environment={"OMP_NUM_THREADS": "1"})
            await until_listening(process, port, log)
            assert await stop(process, 20) == 0
            async with redis.asyncio.Redis.from_url(url) as store:
                entries: Any = await store.xrange(control.episodes_key("default"))
        assert [record_from_bytes(fields[b"record"]).episode_id for _, fields in entries] == [
            "kept"
        ]
    finally:
        await stop(process, 0)


async def test_bad_settings_end_the_command_with_the_remedy(tmp_path: Path) -> None:
    log = tmp_path / "log"
    for flags, remedy in (
        (
            ["--engine.name", "vllm", "--model.path", "m", "--model.dtype", "float64"],
            "or use --engine.name transformers",
        ),
        (["--model.pat", "m"], "did you mean model.path?"),
        (["--model.path", str(tmp_path)], "tokenizer.json"),
    ):
        process = await spawn([*ROLLOUT, *flags], log_path=log)
        assert await asyncio.wait_for(process.wait(), 60) == 1
        assert remedy in log.read_text()
    assert "Traceback" not in log.read_text()


async def test_stack_serves_and_leaves_no_process_behind(model: Path, tmp_path: Path) -> None:
    config = StackConfig(model=model, run="stack", folder=tmp_path, with_trainer=False)
    async with LocalStack(config) as stack:
        assert stack.valkey is not None
        assert stack.valkey.process is not None
        pids = [stack.valkey.process.pid, stack.processes["rollout"].pid]
        supervisor = asyncio.create_task(stack.supervise())
        async with OctopusClient.connect(stack.address) as client:
            await play_episode(client, "before")
            # The supervisor brings a killed Valkey back, on the same port and data.
            os.kill(pids[0], signal.SIGKILL)
            await asyncio.wait_for(play_episode(client, "after"), 30)
        pids.append(stack.valkey.process.pid)
        async with redis.asyncio.Redis.from_url(stack.redis_url) as store:
            assert await store.xlen(control.episodes_key("stack")) == 2
        os.kill(stack.processes["rollout"].pid, signal.SIGKILL)
        with pytest.raises(ServiceError, match="the rollout service ended"):
            await asyncio.wait_for(supervisor, 10)
    await until_gone(pids)


@pytest.mark.slow
async def test_stack_turns_the_whole_loop(model: Path, tmp_path: Path) -> None:
    config = StackConfig(
        model=model, run="loop", folder=tmp_path,
        trainer={
            "batch": {"groups_per_step": 1, "group_size": 2},
            "lora": {"rank": 4, "alpha": 8}, "publish": {"min_replicas": 1},
        },
    )  # fmt: skip
    async with LocalStack(config) as stack, OctopusClient.connect(stack.address) as client:
        supervisor = asyncio.create_task(stack.supervise())
        rollout = stack.processes["rollout"].pid
        for version in range(3):
            for number in range(2):
                episode_id = f"episode-{version}-{number}"
                await play_episode(client, episode_id, f"group-{version}", float(number))
            async with asyncio.timeout(60):
                while version + 1 not in (await client.status()).policy_versions:
                    assert not supervisor.done(), stack.log_path("trainer").read_text()
                    await asyncio.sleep(0.05)
        state = await read_bus_state(stack.mqtt_url, "loop", listen_s=0.2)
        assert state.policy is not None
        assert state.policy.version == 3
        assert state.replicas[0].error == ""
        assert stack.processes["rollout"].pid == rollout
        assert stack.processes["rollout"].returncode is None
        supervisor.cancel()
    assert "step 3:" in stack.log_path("trainer").read_text()


@pytest.mark.slow
async def test_killed_up_command_leaves_no_process_behind(model: Path, tmp_path: Path) -> None:
    log = tmp_path / "up.log"
    command = [sys.executable, "-m", "harness_sdk.cli", "up", "--model", str(model), "--folder",
               str(tmp_path), "--run", "up", "--with-trainer", "false"]  # fmt: skip
    for ending in (signal.SIGINT, signal.SIGKILL):
        log.unlink(missing_ok=True)
        process = await spawn(command, log_path=log, environment={"OMP_NUM_THREADS": "1"})
        async with asyncio.timeout(120):
            while "Ctrl-C stops everything" not in log.read_text():
                assert process.returncode is None, log.read_text()
                await asyncio.sleep(0.1)
        (page,) = re.findall(r"^page +(\S+)$", log.read_text(), re.MULTILINE)
        async with aiohttp.ClientSession() as session, session.get(page) as response:
            assert "<h1>Run up</h1>" in await response.text()
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        assert len(children) == 2, "Valkey and rollout"
        process.send_signal(ending)
        status = await asyncio.wait_for(process.wait(), 30)
        assert status == (0 if ending == signal.SIGINT else -signal.SIGKILL)
        await until_gone([int(pid) for pid in children])
