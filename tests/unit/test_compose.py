"""compose.yaml: the services are there, and their commands are ones that we understand."""

from __future__ import annotations

import argparse
import importlib
import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml
from pydantic import BaseModel

from harness_sdk.cli.doctor.servers import DURABLE
from harness_sdk.cli.settings import load_config, parse_arguments
from rollout_service.config import RolloutConfig
from trainer_service.config import TrainerConfig

ROOT = Path(__file__).parents[2]
CONFIGS: dict[str, type[BaseModel]] = {"rollout": RolloutConfig, "trainer": TrainerConfig}
VARIABLES = {"MODEL": "/models/m", "OCTOPUS_TOKEN": "sesame"}


@pytest.fixture(scope="module")
def services() -> dict[str, Any]:
    text = (ROOT / "compose.yaml").read_text()
    return yaml.safe_load(re.sub(r"\$\{(\w+)(:[-?])?([^}]*)\}", _value, text))["services"]


def _value(match: re.Match[str]) -> str:
    name, operator, rest = match.groups()
    if operator == ":?":
        # A variable without a default must be one that the head of the file names.
        return VARIABLES[name]
    return VARIABLES.get(name, rest)


def test_the_four_services_are_there(services: dict[str, Any]) -> None:
    assert set(services) == {"valkey", "mosquitto", "rollout", "trainer"}
    known = set(
        tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    )
    for name in CONFIGS:
        assert services[name]["build"]["dockerfile"] == "docker/Dockerfile"
        extras = services[name]["build"]["args"]["EXTRAS"].split(",")
        assert name in extras and known.issuperset(extras)
        assert set(services[name]["depends_on"]) == {"valkey", "mosquitto"}
        assert services[name]["volumes"][0] == "/models/m:/model:ro"
        (device,) = services[name]["deploy"]["resources"]["reservations"]["devices"]
        assert device == {"driver": "nvidia", "count": 1, "capabilities": ["gpu"]}


@pytest.mark.parametrize("name", list(CONFIGS))
def test_command_is_a_configuration(services: dict[str, Any], name: str) -> None:
    program, command, *flags = services[name]["command"]
    assert (program, command) == ("octopus", name)
    parser = argparse.ArgumentParser()
    importlib.import_module(f"harness_sdk.cli.{name}").add_arguments(parser)
    args = parse_arguments(parser, flags)
    config: Any = load_config(
        CONFIGS[name], args.config, args.overrides, services[name]["environment"]
    )
    assert config.redis.url == "redis://valkey:6379/0"
    assert config.mqtt.url == "mqtt://mosquitto:1883"
    assert config.model.path == Path("/model")
    assert config.model.device == "cuda"
    assert config.run == "default"


def test_rollout_serves_with_vllm_which_its_image_holds(services: dict[str, Any]) -> None:
    rollout = services["rollout"]
    config = load_config(
        RolloutConfig, None, rollout["command"][2:], environment=rollout["environment"]
    )
    assert config.engine.name == "vllm"
    assert "vllm" in services["rollout"]["build"]["args"]["EXTRAS"].split(",")


def test_rollout_is_published_on_loopback_and_asks_for_the_token(services: dict[str, Any]) -> None:
    rollout = services["rollout"]
    config = load_config(
        RolloutConfig, None, rollout["command"][2:], environment=rollout["environment"]
    )
    assert config.server.token is not None
    assert config.server.token.get_secret_value() == "sesame"
    assert rollout["ports"] == [f"127.0.0.1:{config.server.port}:{config.server.port}"]
    assert config.server.advertise == f"rollout:{config.server.port}"


def test_every_port_is_published_on_loopback_alone(services: dict[str, Any]) -> None:
    ports = [port for each in services.values() for port in each.get("ports", ())]
    assert ports == [f"127.0.0.1:{n}:{n}" for n in (6379, 1883, 7040)]


def test_valkey_is_as_durable_as_the_embedded_server(services: dict[str, Any]) -> None:
    words = services["valkey"]["command"]
    flags = dict(zip(words[1::2], words[2::2], strict=True))
    for key, value in DURABLE.items():
        assert flags[f"--{key}"] == value


def test_mosquitto_keeps_retained_messages_over_a_restart(services: dict[str, Any]) -> None:
    source, target, mode = services["mosquitto"]["volumes"][0].split(":")
    assert (target, mode) == ("/mosquitto/config/mosquitto.conf", "ro")
    lines = (ROOT / source).read_text().splitlines()
    settings = dict(line.split(" ", 1) for line in lines if line and not line.startswith("#"))
    assert settings["listener"] == "1883"
    assert settings["persistence"] == "true"


def test_dockerfile_copies_what_it_installs() -> None:
    text = (ROOT / "docker/Dockerfile").read_text()
    for source in re.findall(r"^COPY (.+) \S+$", text, re.MULTILINE):
        for path in source.split():
            assert (ROOT / path).exists(), path
