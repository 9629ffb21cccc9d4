"""deploy/kubernetes_tls, as kustomize renders it: schemas, secrets, and the settings of compose."""

from __future__ import annotations

import base64
import re
import shutil
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import grpc
import kubernetes_validate
import pytest
import yaml
from cryptography import x509

from harness_sdk.cli.__main__ import main
from harness_sdk.cli.run_config import RunConfig
from rollout_service.config import RolloutConfig
from rollout_service.rpc.health import HEALTH, health_handler
from tests.composed import ROOT, composed
from tests.manifests import container_config
from trainer_service.config import TrainerConfig

pytestmark = pytest.mark.skipif(shutil.which("kubectl") is None, reason="kubectl is not installed")

FOLDER = "deploy/kubernetes_tls"
WORKLOADS = [
    ("StatefulSet", "valkey"), ("StatefulSet", "mosquitto"), ("StatefulSet", "rollout"),
    ("Job", "trainer"), ("Job", "agent"),
]  # fmt: skip
MOUNT = "/run/secrets"
SERVING = b"\x08\x01"

Objects = dict[tuple[str, str], Any]


@pytest.fixture(scope="module")
def deploy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the folder of deployments, secrets drawn as its file says."""
    root = tmp_path_factory.mktemp("root")
    shutil.copytree(ROOT / "deploy", root / "deploy")
    text = (ROOT / FOLDER / "secrets" / "kustomization.yaml").read_text()
    command = re.search(r"# octopus (secrets) (\S+) (.*)", text)
    assert command is not None
    words = [command[1], str(root / command[2]), *command[3].replace("'", "").split()]
    assert main(words) == 0
    return root


@pytest.fixture(scope="module")
def objects(deploy: Path) -> Objects:
    documents = [*_rendered(deploy / FOLDER), *_rendered(deploy / FOLDER / "secrets")]
    documents.append(yaml.safe_load((ROOT / FOLDER / "agent.yaml").read_text()))
    return {(each["kind"], each["metadata"]["name"]): each for each in documents}


@pytest.fixture(scope="module")
def base() -> Objects:
    documents = list(_rendered(ROOT / "deploy" / "kubernetes"))
    documents.append(yaml.safe_load((ROOT / "deploy/kubernetes/agent.yaml").read_text()))
    return {(each["kind"], each["metadata"]["name"]): each for each in documents}


@pytest.fixture(scope="module")
def services() -> dict[str, Any]:
    return composed({"MODEL": "/models/m"})["services"]


def _rendered(folder: Path) -> Iterator[Any]:
    told = subprocess.run(["kubectl", "kustomize", str(folder)], capture_output=True, check=False)
    assert told.returncode == 0, told.stderr.decode()
    yield from yaml.safe_load_all(told.stdout)


def _pod(objects: Objects, kind: str, name: str) -> Any:
    return objects[kind, name]["spec"]["template"]["spec"]


def _container(objects: Objects, kind: str, name: str) -> Any:
    (container,) = _pod(objects, kind, name)["containers"]
    return container


def _mounted(objects: Objects, kind: str, name: str) -> dict[str, bytes]:
    """What the pod finds in its folder of secrets, by the name of the file."""
    (mount,) = (
        m for m in _container(objects, kind, name)["volumeMounts"] if m["name"] == "secrets"
    )
    assert mount == {"name": "secrets", "mountPath": MOUNT, "readOnly": True}
    (volume,) = (v for v in _pod(objects, kind, name)["volumes"] if v["name"] == "secrets")
    # Others than the pod's group read nothing, and the group is the container's.
    assert volume["projected"]["defaultMode"] == 0o440
    assert "fsGroup" in _pod(objects, kind, name)["securityContext"]
    files: dict[str, bytes] = {}
    for source in (each["secret"] for each in volume["projected"]["sources"]):
        data = objects["Secret", source["name"]]["data"]
        items = source.get("items", [{"key": key, "path": key} for key in data])
        files |= {item["path"]: base64.b64decode(data[item["key"]]) for item in items}
    return files


def _config(objects: Objects, folder: Path, name: str, kind: str, pod: str) -> Any:
    """What the service makes of its command and of the files that are mounted."""
    for file, data in _mounted(objects, kind, pod).items():
        (folder / file).write_bytes(data)
    container = _container(objects, kind, pod)
    given = {each["name"]: each.get("value", "rollout-2") for each in container["env"]}
    environment = {key: value.replace(MOUNT, str(folder)) for key, value in given.items()}
    files = objects["ConfigMap", "octopus"]["data"]
    return container_config(name, container, environment, files, folder)


def test_everything_is_what_kubernetes_knows(objects: Objects) -> None:
    assert set(WORKLOADS) < set(objects)
    for each in objects.values():
        assert each["metadata"].get("namespace", "octopus") == "octopus"
        kubernetes_validate.validate(each, "1.37", strict=True)


@pytest.mark.parametrize(("kind", "name"), WORKLOADS)
def test_pods_find_the_secrets_that_they_name_and_no_others(
    objects: Objects, kind: str, name: str
) -> None:
    container = _container(objects, kind, name)
    named = yaml.safe_dump([container.get(part) for part in ("command", "env", "readinessProbe")])
    if name == "mosquitto":
        named += objects["ConfigMap", "mosquitto"]["data"]["mosquitto.conf"]
    files = _mounted(objects, kind, name)
    named += "".join(files[file].decode() for file in files if file.startswith(("redis", "mqtt")))
    assert set(re.findall(rf"{MOUNT}/([\w.]+)", named)) == set(files)


def test_secrets_are_drawn_ones_and_each_is_used(deploy: Path, objects: Objects) -> None:
    drawn = deploy / FOLDER / "secrets" / "drawn"
    held: set[bytes] = set()
    for kind, name in WORKLOADS:
        held |= set(_mounted(objects, kind, name).values())
    given = [each for (kind, _), each in objects.items() if kind == "Secret"]
    assert {base64.b64decode(d) for each in given for d in each["data"].values()} == held
    apart = {"ca.key", "token.admin", "grafana.admin", "redis.monitor", "mqtt.monitor"}
    assert {p.name for p in drawn.iterdir() if p.read_bytes() not in held} == apart
    for each in given:
        if each["metadata"]["name"].endswith("-tls"):
            assert each["type"] == "kubernetes.io/tls"
            assert set(each["data"]) == {"ca.crt", "tls.crt", "tls.key"}


def test_settings_of_the_servers_are_those_of_compose(
    objects: Objects, services: dict[str, Any]
) -> None:
    for name in ("valkey", "mosquitto"):
        container = _container(objects, "StatefulSet", name)
        for probe in ("readinessProbe", "livenessProbe"):
            asked = container[probe]["exec"]["command"]
            assert ["CMD", *asked] == services[name]["healthcheck"]["test"]
            assert set(container[probe]) == {"exec", "periodSeconds", "timeoutSeconds"} | (
                {"failureThreshold"} if (name, probe) == ("valkey", "livenessProbe") else set()
            )
    valkey = _container(objects, "StatefulSet", "valkey")
    assert valkey["command"] == services["valkey"]["command"]
    given = objects["ConfigMap", "mosquitto"]["data"]
    assert given["mosquitto.conf"] == (ROOT / "docker/mosquitto.conf").read_text()
    assert given["health.acl"] == (ROOT / "docker/mosquitto-health.acl").read_text()


def test_a_replica_speaks_tls_and_asks_for_a_token(
    tmp_path: Path, objects: Objects, services: dict[str, Any]
) -> None:
    config: RolloutConfig = _config(objects, tmp_path, "rollout", "StatefulSet", "rollout")
    assert config.server.token is None
    used = (config.server.tokens, config.server.tls_cert, config.server.tls_key)
    assert used == tuple(Path(MOUNT) / name for name in ("tokens", "rollout.pem", "rollout.key"))
    assert config.server.advertise == "rollout-2.rollout.octopus.svc:7040"
    ready = _container(objects, "StatefulSet", "rollout")["readinessProbe"]
    assert "grpc" not in ready
    assert ["CMD", *ready["exec"]["command"]] == services["rollout"]["healthcheck"]["test"]


@pytest.mark.parametrize(
    ("name", "kind", "pod"),
    [("rollout", "StatefulSet", "rollout"), ("trainer", "Job", "trainer"), ("run", "Job", "agent")],
)
def test_servers_are_reached_at_their_services_with_tls_and_a_user(
    tmp_path: Path, objects: Objects, name: str, kind: str, pod: str
) -> None:
    config: Any = _config(objects, tmp_path, name, kind, pod)
    if isinstance(config, RunConfig):
        assert config.tls_ca == Path(MOUNT) / "ca.pem" and config.address == ()
        redis, mqtt = config.redis_url, config.mqtt_url
    else:
        redis, mqtt = config.redis.url, config.mqtt.url
    ports = {
        each: objects["Service", each]["spec"]["ports"][0]["port"]
        for each in ("valkey", "mosquitto")
    }
    ca = rf"\?ssl_ca_certs={MOUNT}/ca\.pem"
    assert re.fullmatch(rf"rediss://{pod}:[^@]+@valkey:{ports['valkey']}/0{ca}", redis or "")
    assert re.fullmatch(rf"mqtts://{pod}:[^@]+@mosquitto:{ports['mosquitto']}{ca}", mqtt or "")


def test_beside_tls_nothing_is_changed(tmp_path: Path, objects: Objects, base: Objects) -> None:
    secrets = {key for key in objects if key[0] == "Secret"}
    assert set(objects) - secrets == set(base)
    for kind, name in (("StatefulSet", "rollout"), ("Job", "trainer"), ("Job", "agent")):
        ours, theirs = (_container(each, kind, name) for each in (objects, base))
        apart = {"command", "env", "readinessProbe", "volumeMounts"}
        assert {k: v for k, v in ours.items() if k not in apart} == {
            k: v for k, v in theirs.items() if k not in apart
        }
        kept = [word for word in theirs["command"] if "--server.advertise" not in word]
        assert [word for word in ours["command"] if word in kept] == kept
        assert not {each["name"] for each in ours["env"]} & {
            "OCTOPUS_TOKEN", "OCTOPUS_REDIS_URL", "OCTOPUS_MQTT_URL",
        }  # fmt: skip
    trainer: TrainerConfig = _config(objects, tmp_path, "trainer", "Job", "trainer")
    assert trainer.run == "nodes"


@pytest.mark.parametrize("name", ["valkey", "mosquitto", "rollout"])
def test_services_have_pods_that_listen_and_certificates_of_their_names(
    objects: Objects, name: str
) -> None:
    (port,) = objects["Service", name]["spec"]["ports"]
    listening = _container(objects, "StatefulSet", name)["ports"][0]
    assert listening["containerPort"] == port["port"]
    data = objects["Secret", f"{name}-tls"]["data"]["tls.crt"]
    certificate = x509.load_pem_x509_certificate(base64.b64decode(data))
    names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    # The probe of each asks localhost.
    assert {name, "localhost"} <= set(names.get_values_for_type(x509.DNSName))


async def test_every_replica_proves_the_name_that_it_advertises(
    tmp_path: Path, objects: Objects
) -> None:
    files = _mounted(objects, "StatefulSet", "rollout")
    config: RolloutConfig = _config(objects, tmp_path, "rollout", "StatefulSet", "rollout")
    host = (config.server.advertise or "").rpartition(":")[0]
    assert await _proved(files, "rollout", host) == SERVING
    with pytest.raises(grpc.RpcError, match="Hostname Verification"):
        await _proved(files, "rollout", "rollout-2.rollout.other.svc")


async def _proved(files: Mapping[str, bytes], name: str, host: str) -> bytes:
    """What a server with these files says of its health to who takes it for `host`."""
    server = grpc.aio.server()
    server.add_generic_rpc_handlers((health_handler(lambda: True),))
    pair = (files[f"{name}.key"], files[f"{name}.pem"])
    port = server.add_secure_port("127.0.0.1:0", grpc.ssl_server_credentials([pair]))
    await server.start()
    channel = grpc.aio.secure_channel(
        f"127.0.0.1:{port}",
        grpc.ssl_channel_credentials(files["ca.pem"]),
        options=[("grpc.ssl_target_name_override", host)],
    )
    try:
        return await channel.unary_unary(f"/{HEALTH}/Check")(b"", timeout=10)
    finally:
        await channel.close()
        await server.stop(None)
