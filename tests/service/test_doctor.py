"""`octopus doctor` and `octopus status` against real servers, good and bad ones."""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import re
import socket
import time
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import aiomqtt
import pytest
import redis.asyncio
from amqtt.broker import Broker

from harness_sdk import OctopusClient, control
from harness_sdk.cli import doctor
from harness_sdk.cli.__main__ import main
from harness_sdk.cli.doctor.machine import check_gpus
from harness_sdk.cli.embedded import embedded_broker
from harness_sdk.cli.processes import free_port
from harness_sdk.control import PolicyAnnouncement, ReplicaState
from tests.chat_tokenizers import save_chat_tokenizer
from tests.engine_cases import save_adapter
from tests.service.sdk_service import scripted
from tests.tiny_models import save_tiny_model
from tests.valkey import embedded_valkey


@pytest.fixture
async def redis_url(tmp_path: Path) -> AsyncIterator[str]:
    async with embedded_valkey(tmp_path / "valkey") as url:
        yield url


def _levels(*flags: str) -> dict[str, doctor.Check]:
    parser = argparse.ArgumentParser()
    doctor.add_arguments(parser)
    return {check.name: check for check in doctor.checks(parser.parse_args(flags))}


async def test_doctor_passes_our_own_servers(
    redis_url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    async with embedded_broker() as mqtt_url:
        flags = ["--redis-url", redis_url, "--mqtt-url", mqtt_url, "--port", str(free_port()),
                 "--folder", str(tmp_path)]  # fmt: skip
        assert await asyncio.to_thread(main, ["doctor", *flags]) == 0
    shown = capsys.readouterr().out
    assert "ok     mqtt: reachable, keeps retained messages" in shown
    assert "Redis is +0.0" in shown or "Redis is -0.0" in shown
    assert "warn   redis" not in shown


async def test_doctor_warns_of_a_server_that_is_weaker(redis_url: str) -> None:
    async with redis.asyncio.Redis.from_url(redis_url) as client:
        await client.config_set("appendfsync", "everysec")
        await client.config_set("maxmemory-policy", "allkeys-lru")
    found = await asyncio.to_thread(_levels, "--redis-url", redis_url)
    assert found["redis appendfsync"].level == "warn"
    assert "CONFIG SET appendfsync always" in found["redis appendfsync"].remedy
    assert found["redis maxmemory-policy"].level == "warn"
    assert "redis appendonly" not in found


def test_doctor_fails_what_cannot_be_reached(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        busy, gone = taken.getsockname()[1], free_port()
        flags = ["--redis-url", f"redis://127.0.0.1:{gone}", "--mqtt-url",
                 f"mqtt://127.0.0.1:{gone}", "--port", str(busy)]  # fmt: skip
        assert main(["doctor", *flags]) == 1
    shown = capsys.readouterr().out
    assert "fail   redis: Redis cannot be reached" in shown
    assert "fail   mqtt: the MQTT broker cannot be reached" in shown
    assert f"warn   port {busy}: Address already in use" in shown


async def test_doctor_fails_a_server_that_evicts(redis_url: str) -> None:
    async with redis.asyncio.Redis.from_url(redis_url) as client:
        await client.config_set("maxmemory", "64mb")
        await client.config_set("maxmemory-policy", "allkeys-lru")
    found = (await asyncio.to_thread(_levels, "--redis-url", redis_url))["redis maxmemory-policy"]
    assert (found.level, "67108864" in found.text) == ("fail", True)
    assert "CONFIG SET maxmemory-policy noeviction" in found.line()


async def test_doctor_fails_a_broker_that_keeps_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    async def forget(*args: Any) -> None:
        pass

    monkeypatch.setattr(Broker, "retain_message", forget)
    async with embedded_broker() as mqtt_url:
        found = (await asyncio.to_thread(_levels, "--mqtt-url", mqtt_url))["mqtt"]
    assert (found.level, "retained" in found.text) == ("fail", True)
    assert "retain_available true" in found.line()


async def test_doctor_warns_of_a_clock_that_is_wrong(
    redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = time.time
    monkeypatch.setattr(time, "time", lambda: now() - 90)
    found = (await asyncio.to_thread(_levels, "--redis-url", redis_url))["clock"]
    assert found.level == "warn" and "run NTP" in found.line()
    assert re.match(r"Redis is \+(89\.[5-9]|90\.[0-5])", found.text)
    monkeypatch.setattr(time, "time", lambda: 0.0)
    assert _levels()["clock"].level == "fail"


def test_doctor_fails_a_folder_that_may_not_be_written(tmp_path: Path) -> None:
    folder = tmp_path / "mine"
    folder.mkdir(mode=0o500)
    folder.chmod(0o500)
    uid = os.geteuid()
    if not uid:
        # Mode bits do not bind root.
        os.seteuid(65_534)
    try:
        found = _levels("--folder", str(folder / "runs"))["permissions"]
    finally:
        os.seteuid(uid)
    assert (found.level, "cannot write" in found.text) == ("fail", True)
    assert "give another --folder" in found.line()


def test_doctor_fails_a_disk_without_room() -> None:
    # A file system that never has any.
    found = _levels("--folder", "/proc/runs")["disk"]
    assert (found.level, found.text) == ("fail", "0.0 GiB free at /proc")


def test_doctor_compares_what_is_installed_with_what_we_ask_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, version in (("redis", "3.5.3"), ("octopus_agents_sdk", "0.1.0")):
        folder = tmp_path / f"{name}-{version}.dist-info"
        folder.mkdir()
        text = f"Metadata-Version: 2.1\nName: {name.replace('_', '-')}\nVersion: {version}\n"
        (folder / "METADATA").write_text(text)
    monkeypatch.syspath_prepend(str(tmp_path))
    found = _levels()
    assert found["redis package"].line() == (
        "warn   redis package: 3.5.3 is untested; fix: pip install 'redis>=6'"
    )
    assert found["octopus-agents-sdk"].level == "warn"


@pytest.mark.parametrize(
    ("answer", "level", "told"),
    [
        ("echo '0, NVIDIA H200, 143000, 143771'", "ok", "143000 of 143771 MiB free"),
        ("echo '0, NVIDIA H200, 70000, 143771'", "warn", "--engine.vllm.gpu-memory-fraction 0.47"),
        ("echo '0, NVIDIA H200, 2, 143771'", "fail", "the weights alone are 4 MiB"),
        ("echo '0, NVIDIA GB10, [N/A], [N/A]'", "ok", "memory not told"),
        ("echo 'Driver/library version mismatch' >&2; exit 18", "fail", "version mismatch"),
    ],
)
def test_doctor_reads_the_gpus_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, answer: str, level: str, told: str
) -> None:
    program = tmp_path / "nvidia-smi"
    program.write_text(f"#!/bin/sh\n{answer}\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    with (tmp_path / "model.safetensors").open("wb") as file:
        file.truncate(4 << 20)
    (found,) = check_gpus(tmp_path)
    assert (found.level, told in found.line()) == (level, True)


def test_doctor_names_adapter_targets_that_the_model_lacks(tmp_path: Path) -> None:
    llama = save_tiny_model(tmp_path / "llama", "llama")
    qwen = save_tiny_model(tmp_path / "qwen", "qwen3_5")
    save_adapter(tmp_path / "of_llama", llama, "llama")
    save_adapter(tmp_path / "of_qwen", qwen, "qwen3_5")

    def targets(adapter: str, model: Path) -> doctor.Check:
        flags = ("--adapter", str(tmp_path / adapter), "--model", str(model))
        return _levels(*flags)["adapter targets"]

    assert targets("of_llama", llama).level == "ok"
    assert targets("of_qwen", qwen).level == "ok"
    wrong = targets("of_qwen", llama)
    assert (wrong.level, "in_proj_qkv" in wrong.text) == ("fail", True)
    assert "lora.targets" in wrong.line()
    missing = _levels("--adapter", str(tmp_path))["adapter"]
    assert (missing.level, "adapter_config.json" in missing.remedy) == ("fail", True)


def test_doctor_prints_json_with_the_same_status(capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["doctor", "--redis-url", f"redis://127.0.0.1:{free_port()}", "--json"]
    assert main(flags) == 1
    found = {check["name"]: check for check in json.loads(capsys.readouterr().out)}
    assert found["redis"]["level"] == "fail"
    assert set(found["redis"]) == {"name", "level", "text", "remedy"}
    assert main(["doctor", "--port", str(free_port()), "--json"]) == 0


def test_doctor_says_that_a_model_cannot_be_trained(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "gpt2"}')
    found = _levels("--model", str(tmp_path))["training"]
    assert (found.level, "gpt2" in found.text) == ("warn", True)


def test_doctor_looks_into_the_model_folder(tmp_path: Path) -> None:
    missing = _levels("--model", str(tmp_path))["model"]
    assert (missing.level, "config.json" in missing.text) == ("fail", True)
    found = _levels("--model", str(save_tiny_model(tmp_path, "llama")))
    assert found["model"].level == "ok"
    assert "llama" in found["model"].text
    assert "weights" not in found
    # As a snapshot of a cache of which nothing else is mounted.
    (tmp_path / "model.safetensors").unlink()
    (tmp_path / "model.safetensors").symlink_to("../../blobs/gone")
    unread = _levels("--model", str(tmp_path))["weights"]
    assert unread.level == "fail" and "model.safetensors cannot be read" in unread.text
    assert found["training"].level == "ok"
    assert "q_proj" in found["training"].text
    assert "weights" not in found
    assert found["tokenizer"].level == "fail"
    assert "tokenizer.json" in found["tokenizer"].remedy
    assert "template" not in found
    folder = save_chat_tokenizer(tmp_path)
    found = _levels("--model", str(folder))
    assert (found["tokenizer"].level, found["template"].level) == ("ok", "ok")
    assert "suffix" in found["template"].text
    (folder / "chat_template.jinja").write_text("{{ 1 / 0 }}")
    refused = _levels("--model", str(folder))["template"]
    assert refused.level == "fail" and "ZeroDivisionError" in refused.text


async def test_status_shows_stream_policy_and_replicas(
    redis_url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    announcement = PolicyAnnouncement(
        version=3, sha256="ab" * 32, num_tensors=6, rank=8, alpha=16.0, uri="", base_model="",
        probe_token_ids=(1, 2),
    )  # fmt: skip
    gone = ReplicaState(replica_id="r-1", alive=False)
    lost = ReplicaState(
        replica_id="r-2", alive=True, address=f"127.0.0.1:{free_port()}", versions=(0, 3),
        waiting_version=4, waiting_for="open episodes hold versions 2", waiting_s=12.3,
    )  # fmt: skip
    async with embedded_broker() as mqtt_url, _connect(redis_url) as client:
        async with aiomqtt.Client("127.0.0.1", int(mqtt_url.rpartition(":")[2])) as bus:
            await bus.publish(control.policy_topic("x"), announcement.to_json(), 1, True)
            for state in (gone, lost):
                topic = control.replica_topic("x", state.replica_id)
                await bus.publish(topic, state.to_json(), 1, True)
        await client.xadd(control.episodes_key("x"), {"record": b""})
        await client.xadd(control.dead_key("x"), {"record": b""})
        for number, reward in ((6, 0.25), (7, 0.5)):
            figures = {"step": number, "time_s": time.time(), "reward/mean": reward}
            step = {control.FIGURES_FIELD: json.dumps(figures)}
            await client.xadd(control.steps_key("x"), step)
        flags = ["status", "--run", "x", "--redis-url", redis_url, "--mqtt-url", mqtt_url]
        # A replica that says it lives and does not answer is a fault.
        assert await asyncio.to_thread(main, [*flags, "--json"]) == 1
        state = json.loads(capsys.readouterr().out)
        assert await asyncio.to_thread(main, flags) == 1
        shown = capsys.readouterr().out
    assert state["stream"] == {
        "length": 1,
        "pending": 0,
        "undelivered": 1,
        "dead": 1,
        "dead_trimmed": 0,
    }
    assert state["policy"]["version"] == 3
    assert [replica["alive"] for replica in state["replicas"]] == [False, True]
    assert "policy     version 3, rank 8, 6 tensors" in shown
    assert "1 in the stream, 1 undelivered, 0 pending, 1 dead" in shown
    assert re.search(r"trainer    step 7, reward 0\.5, \d s ago", shown)
    assert "r-1  gone" in shown
    assert "versions 0, 3" in shown
    assert "version 4 waits for a slot, for 12 s and more: open episodes hold" in shown
    assert state["replicas"][1]["waiting_version"] == 4
    assert "error      127.0.0.1:" in shown


async def test_status_of_a_live_replica_counts_its_tokens(
    capsys: pytest.CaptureFixture[str],
) -> None:
    async with scripted(lambda text: "four") as service:
        async with OctopusClient.connect(service.address) as client, client.episode() as episode:
            await episode.root.generate("2 + 2?")
        stats = service.engine.stats
        service.engine.stats = lambda: replace(  # type: ignore[method-assign]
            stats(), tokens_recomputed={"eviction": 7, "refresh": 0}
        )
        flags = ["status", "--address", service.address]
        assert await asyncio.to_thread(main, flags) == 0
        shown = capsys.readouterr().out
        service.engine.stats = lambda: replace(  # type: ignore[method-assign]
            stats(), is_serving=False, restarts=2
        )
        assert await asyncio.to_thread(main, flags) == 1
        ended = capsys.readouterr().out
    assert re.search(r"tokens \d+ computed, \d+ sampled, recomputed 7 by eviction\n", shown)
    assert "its engine has ended and is started again, after 2 restarts before" in ended


def test_status_needs_something_to_ask(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("OCTOPUS_REDIS_URL", raising=False)
    monkeypatch.delenv("OCTOPUS_MQTT_URL", raising=False)
    assert main(["status"]) == 1
    assert "--mqtt-url" in capsys.readouterr().err


def _connect(url: str) -> Any:
    return redis.asyncio.Redis.from_url(url, protocol=2)
