"""Every command of compose.yaml starts, becomes healthy by its own check, and stops in its time.

Processes in network namespaces in place of an engine. Valkey, Mosquitto and Prometheus run as
themselves where they are installed, and the first two by stand-ins with the same secrets elsewhere.
"""

from __future__ import annotations

import asyncio
import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from harness_sdk.cli.__main__ import main
from tests.composed import composed
from tests.containers import CAN_RUN, Container, Engine, engine

pytestmark = pytest.mark.skipif(not CAN_RUN, reason="namespaces need root, and iproute2")
CPU = {
    "ROLLOUT_DEVICE": "cpu", "TRAINER_DEVICE": "cpu", "ROLLOUT_ENGINE": "transformers",
    "DTYPE": "float32",
}  # fmt: skip
PROGRAMS = {
    "valkey": {"valkey-server": "redis-server", "valkey-cli": "redis-cli"},
    "mosquitto": {"mosquitto": "mosquitto", "mosquitto_sub": "mosquitto_sub"},
}
"""What an image holds, and what a machine may have in its place."""


def tiny_model(folder: Path) -> Path:
    from tests.chat_tokenizers import save_chat_tokenizer
    from tests.tiny_models import save_tiny_model

    return save_chat_tokenizer(save_tiny_model(folder / "model", "llama"))


def drawn_and_composed(folder: Path, model: Path) -> dict[str, Any]:
    secrets = folder / "secrets"
    assert main(["secrets", str(secrets), "--outside", "rollout"]) == 0
    return composed({"MODEL": str(model), "SECRETS": str(secrets), **CPU})


async def start_server(running: Engine, name: str, programs: Path) -> Container:
    """As the image runs it, or its stand-in."""
    found = {inside: shutil.which(inside) or shutil.which(ours)
             for inside, ours in PROGRAMS[name].items()}  # fmt: skip
    if not all(found.values()):
        server = await running.start(name, ["python", "-m", "tests.stand_ins", name])
        port = {"valkey": 6379, "mosquitto": 8883}[name]
        reach = f"import socket; socket.create_connection(('localhost', {port}), 2)"
        await server.healthy(60, ["python", "-c", reach])
        return server
    for inside, path in found.items():
        (programs / inside).symlink_to(str(path))
    server = await running.start(name)
    await server.healthy(60)
    return server


async def test_the_servers_start_are_healthy_and_stop(tmp_path: Path) -> None:
    whole = drawn_and_composed(tmp_path, tmp_path)
    async with engine(whole, tmp_path / "engine") as running:
        programs = tmp_path / "engine" / "bin"
        for name in ("valkey", "mosquitto"):
            server = await start_server(running, name, programs)
            assert await server.stop() == 0, server.log


# Two interpreters with torch and dozens without: half a minute of computing.
@pytest.mark.soak
@pytest.mark.timeout(900)
async def test_every_command_starts_is_healthy_and_stops(tmp_path: Path) -> None:
    model = await asyncio.to_thread(tiny_model, tmp_path)
    whole = drawn_and_composed(tmp_path, model)
    async with engine(whole, tmp_path / "engine") as running:
        programs = tmp_path / "engine" / "bin"
        servers = [await start_server(running, name, programs) for name in ("valkey", "mosquitto")]
        services = [await running.start(name) for name in ("rollout", "trainer")]
        rollout, trainer = services
        await asyncio.gather(*(each.healthy(600) for each in services))
        # They have found each other by name, over TLS, each as the user that it was given.
        assert "Redis is away" not in rollout.log + trainer.log
        assert "MQTT broker is away" not in rollout.log + trainer.log
        address = ("--address=rollout:7040", "--tls-ca=/run/secrets/ca.pem", "--json")
        status, told = await trainer.run("octopus", "status", "--run=default", *address)
        assert status == 1 and "carries no bearer token" in told
        words = ("env", "OCTOPUS_TOKEN_FILE=/run/secrets/token.monitor", "octopus", "status")
        quiet = ("env", "-u", "OCTOPUS_REDIS_URL_FILE")
        status, told = await rollout.run(*quiet, *words, "--run=default", *address)
        (replica,) = json.loads(told[told.index("{"):])["replicas"]  # fmt: skip
        assert (replica["replica_id"], replica["alive"]) == ("replica-0", True)
        # The trainer holds none of the rollout service's secrets.
        _, inside = await trainer.run("ls", "/run/secrets")
        assert inside.split() == ["ca.pem", "mqtt.trainer", "redis.trainer"]
        for each in [*services, *servers]:
            assert await each.stop() == 0, each.log
    secrets = [path for path in (tmp_path / "secrets").iterdir() if path.name.startswith("token")]
    for path in secrets:
        assert path.read_text().split()[-1] not in rollout.log + trainer.log


@pytest.mark.skipif(shutil.which("prometheus") is None, reason="prometheus is not installed")
async def test_prometheus_starts_is_ready_and_stops(tmp_path: Path) -> None:
    whole = drawn_and_composed(tmp_path, tmp_path)
    async with engine(whole, tmp_path / "engine") as running:
        command = whole["services"]["prometheus"]["command"]
        prometheus = await running.start("prometheus", ["prometheus", *command])
        ready = "import urllib.request as r; r.urlopen('http://127.0.0.1:9090/-/ready', timeout=2)"
        await prometheus.healthy(60, () if shutil.which("wget") else ["python", "-c", ready])
        assert await prometheus.stop() == 0
