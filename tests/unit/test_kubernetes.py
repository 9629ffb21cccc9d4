"""deploy/kubernetes: schemas, and commands, ports, keys and settings that are ours."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from harness_sdk.cli.doctor.servers import DURABLE
from harness_sdk.cli.run_config import RunConfig
from rollout_service.config import RolloutConfig
from tests.manifests import container_config
from trainer_service.config import TrainerConfig

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "deploy" / "kubernetes"

_KEPT = {"persistence", "persistence_location", "autosave_interval", "message_size_limit"}
"""Settings of Mosquitto that are those of compose; users and TLS are not."""


def _documents() -> Iterator[Any]:
    for path in sorted(FOLDER.glob("*.yaml")):
        for document in yaml.safe_load_all(path.read_text()):
            if document["kind"] != "Kustomization":
                yield document


OBJECTS = {(each["kind"], each["metadata"]["name"]): each for each in _documents()}


def _pod(kind: str, name: str) -> Any:
    return OBJECTS[kind, name]["spec"]["template"]["spec"]


def _container(kind: str, name: str) -> Any:
    (container,) = _pod(kind, name)["containers"]
    return container


def _environment(container: Any) -> dict[str, str]:
    """What the container sees; secrets as `sesame`."""
    given = {each["name"]: each.get("value", "sesame") for each in container["env"]}
    return {**given, "POD_NAME": "rollout-2"} if "POD_NAME" in given else given


def _config(folder: Path, name: str, container: Any) -> Any:
    """What the service makes of the container's command, its files from the config map."""
    files = OBJECTS["ConfigMap", "octopus"]["data"]
    return container_config(name, container, _environment(container), files, folder)


@pytest.mark.parametrize("name", sorted(OBJECTS), ids="/".join)
def test_manifest_is_what_kubernetes_knows(name: tuple[str, str]) -> None:
    kubernetes_validate.validate(OBJECTS[name], "1.37", strict=True)


def test_kustomization_lists_every_file_but_the_agents() -> None:
    found = yaml.safe_load((FOLDER / "kustomization.yaml").read_text())
    files = {path.name for path in FOLDER.glob("*.yaml")} - {"kustomization.yaml", "agent.yaml"}
    assert set(found["resources"]) == files
    assert found["namespace"] == "octopus" and ("Namespace", "octopus") in OBJECTS
    images = {
        _container(*each)["image"] for each in (("StatefulSet", "rollout"), ("Job", "trainer"))
    }
    assert {each["name"] for each in found["images"]} == images


@pytest.mark.parametrize("name", ["rollout", "trainer"])
def test_config_map_holds_the_presets(name: str) -> None:
    preset = ROOT / "deploy" / "presets" / f"nodes_{name}.toml"
    assert OBJECTS["ConfigMap", "octopus"]["data"][f"{name}.toml"] == preset.read_text()


def test_replica_serves_where_it_says_and_is_probed(tmp_path: Path) -> None:
    container = _container("StatefulSet", "rollout")
    config: RolloutConfig = _config(tmp_path, "rollout", container)
    assert (config.replica_id, config.server.advertise) == ("rollout-2", "rollout-2.rollout:7040")
    service = OBJECTS["Service", "rollout"]["spec"]
    assert OBJECTS["StatefulSet", "rollout"]["spec"]["serviceName"] == "rollout"
    assert service["clusterIP"] == "None"
    port, _ = container["ports"]
    assert port["containerPort"] == service["ports"][0]["port"] == config.server.port == 7040
    for probe in ("startupProbe", "livenessProbe"):
        assert container[probe]["tcpSocket"]["port"] == port["name"]
    assert container["readinessProbe"]["grpc"]["port"] == port["containerPort"]
    assert config.server.token is not None
    assert config.server.token.get_secret_value() == "sesame"
    assert _pod("StatefulSet", "rollout")["terminationGracePeriodSeconds"] > config.server.grace_s
    gpus = str(config.engine.vllm.tensor_parallel_size)
    for bound in container["resources"].values():
        assert bound["nvidia.com/gpu"] == gpus


def test_trainer_has_a_gpu_for_each_of_its_processes(tmp_path: Path) -> None:
    container = _container("Job", "trainer")
    config: TrainerConfig = _config(tmp_path, "trainer", container)
    assert config.ranks.sharding == "fsdp"
    words = container["command"]
    stop = _pod("Job", "trainer")["terminationGracePeriodSeconds"] - 10
    assert words[: words.index("-m")] == [
        "torchrun", "--standalone", "--nproc-per-node=4", f"--shutdown-timeout={stop}",
    ]  # fmt: skip
    for bound in container["resources"].values():
        assert bound["nvidia.com/gpu"] == "4"
    rollout: RolloutConfig = _config(tmp_path, "rollout", _container("StatefulSet", "rollout"))
    assert rollout.run == config.run
    assert config.publish.min_replicas <= OBJECTS["StatefulSet", "rollout"]["spec"]["replicas"]
    assert rollout.adapters.max_versions > config.max_policy_lag


def test_prometheus_finds_and_reaches_the_figures(tmp_path: Path) -> None:
    rollout = _container("StatefulSet", "rollout")
    replica: RolloutConfig = _config(tmp_path, "rollout", rollout)
    trainer: TrainerConfig = _config(tmp_path, "trainer", _container("Job", "trainer"))
    assert replica.metrics.host == trainer.report.prometheus_host == "0.0.0.0"
    port = replica.metrics.port
    assert port == trainer.report.prometheus_port and port is not None
    for each in ("StatefulSet", "rollout"), ("Job", "trainer"):
        assert {"name": "metrics", "containerPort": port} in _container(*each)["ports"]
        notes = OBJECTS[each]["spec"]["template"]["metadata"]["annotations"]
        assert notes == {"prometheus.io/scrape": "true", "prometheus.io/port": str(port)}
    ours, others = OBJECTS["NetworkPolicy", "octopus"]["spec"]["ingress"]
    assert ours == {"from": [{"podSelector": {}}]}
    assert others == {"from": [{"namespaceSelector": {}}], "ports": [{"port": port}]}


def test_agent_finds_the_replicas_of_the_same_run(tmp_path: Path) -> None:
    config: RunConfig = _config(tmp_path, "run", _container("Job", "agent"))
    trainer: TrainerConfig = _config(tmp_path, "trainer", _container("Job", "trainer"))
    assert (config.run, config.address) == (trainer.run, ())
    assert config.mqtt_url == trainer.mqtt.url and config.redis_url == trainer.redis.url
    assert config.group_size == trainer.batch.group_size


@pytest.mark.parametrize(
    ("kind", "name"), [("StatefulSet", "rollout"), ("Job", "trainer"), ("Job", "agent")]
)
def test_servers_are_reached_at_their_services(kind: str, name: str) -> None:
    environment = _environment(_container(kind, name))
    redis, mqtt = (OBJECTS["Service", each]["spec"] for each in ("valkey", "mosquitto"))
    assert environment["OCTOPUS_REDIS_URL"] == f"redis://valkey:{redis['ports'][0]['port']}/0"
    assert environment["OCTOPUS_MQTT_URL"] == f"mqtt://mosquitto:{mqtt['ports'][0]['port']}"


@pytest.mark.parametrize("name", ["valkey", "mosquitto", "rollout"])
def test_services_select_pods_that_listen(name: str) -> None:
    service, workload = OBJECTS["Service", name]["spec"], OBJECTS["StatefulSet", name]["spec"]
    labels = workload["template"]["metadata"]["labels"]
    assert service["selector"] == workload["selector"]["matchLabels"] == labels
    listening = _container("StatefulSet", name)["ports"][0]
    assert listening["containerPort"] == service["ports"][0]["port"]


def test_every_mounted_volume_is_declared() -> None:
    for (kind, name), each in OBJECTS.items():
        if kind not in ("StatefulSet", "Job"):
            continue
        spec = each["spec"]
        held = {volume["name"] for volume in spec["template"]["spec"].get("volumes", ())}
        held |= {claim["metadata"]["name"] for claim in spec.get("volumeClaimTemplates", ())}
        mounted = {m["name"] for m in _container(kind, name).get("volumeMounts", ())}
        assert mounted == held, name
        assert _pod(kind, name)["securityContext"]["runAsNonRoot"]


def test_valkey_and_mosquitto_keep_what_they_acknowledged() -> None:
    words = _container("StatefulSet", "valkey")["command"]
    flags = dict(zip(words[1::2], words[2::2], strict=True))
    for key, value in DURABLE.items():
        assert flags[f"--{key}"] == value
    given = OBJECTS["ConfigMap", "mosquitto"]["data"]["mosquitto.conf"]
    ours = (ROOT / "docker" / "mosquitto.conf").read_text()
    kept = {name: value for name, value in _settings(ours).items() if name in _KEPT}
    assert kept.keys() == _KEPT
    assert kept.items() <= _settings(given).items()


def test_pods_run_as_the_images_user() -> None:
    dockerfile = (ROOT / "docker" / "Dockerfile").read_text()
    found = re.search(r"useradd --uid (\d+)", dockerfile)
    assert found is not None
    for kind, name in (("StatefulSet", "rollout"), ("Job", "trainer"), ("Job", "agent")):
        assert _pod(kind, name)["securityContext"]["runAsUser"] == int(found[1])


def _settings(text: str) -> dict[str, str]:
    lines = (line.strip() for line in text.splitlines())
    return dict(line.split(" ", 1) for line in lines if line and line[0] != "#")  # type: ignore[misc]
