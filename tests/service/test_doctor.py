"""`octopus doctor` and `octopus status` against real servers, good and bad ones."""

from __future__ import annotations

import argparse
import asyncio
import json
import socket
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiomqtt
import pytest
import redis.asyncio

from harness_sdk import control
from harness_sdk.cli import doctor
from harness_sdk.cli.__main__ import main
from harness_sdk.cli.embedded import embedded_broker, embedded_valkey
from harness_sdk.cli.processes import free_port
from harness_sdk.control import PolicyAnnouncement, ReplicaState
from tests.chat_tokenizers import save_chat_tokenizer
from tests.tiny_models import save_tiny_model


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
    assert "r-1  gone" in shown
    assert "versions 0, 3" in shown
    assert "version 4 waits for a slot, for 12 s and more: open episodes hold" in shown
    assert state["replicas"][1]["waiting_version"] == 4
    assert "error      127.0.0.1:" in shown


def test_status_needs_something_to_ask(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("OCTOPUS_REDIS_URL", raising=False)
    monkeypatch.delenv("OCTOPUS_MQTT_URL", raising=False)
    assert main(["status"]) == 1
    assert "--mqtt-url" in capsys.readouterr().err


def _connect(url: str) -> Any:
    return redis.asyncio.Redis.from_url(url, protocol=2)
