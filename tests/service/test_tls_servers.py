"""Redis and MQTT over TLS with users: each may do its work, and nothing else.

The Valkey of the tests' wheel speaks no TLS, so a relay ends it in front of the real server.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import shutil
import ssl
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiomqtt
import pytest
import redis.asyncio
from amqtt.broker import Broker
from pwdlib.hashers.argon2 import Argon2Hasher
from redis.exceptions import AuthenticationError, NoPermissionError

from harness_sdk import control
from harness_sdk.broker_address import broker_address
from harness_sdk.cli.__main__ import main
from harness_sdk.cli.episode_stream import reading
from harness_sdk.cli.processes import free_port
from harness_sdk.cli.secrets.certificates import Authority
from harness_sdk.cli.secrets.users import BROKER_TOPICS
from harness_sdk.cli.watch.board import REDIS, Board, Source
from harness_sdk.cli.watch.episodes import Episodes
from harness_sdk.cli.watch.sources import follow_streams
from harness_sdk.control import PolicyAnnouncement, ReplicaState
from harness_sdk.errors import ConfigError, Unavailable
from harness_sdk.permits import redis_permits
from rollout_service.bus import ControlBus as ReplicaBus
from rollout_service.bus import read_bus_state
from rollout_service.redis_state import read_server_settings, read_stream_state
from rollout_service.stream import EpisodeStream
from tests.records import small_record
from tests.tls import server_context, tls_relay, valkey_with_users
from trainer_service.bus import ControlBus as TrainerBus
from trainer_service.run_keys import (
    claim_run,
    delete_adapter,
    forget_running_groups,
    grant_permits,
    permits,
    running_groups,
    send_figures,
    upload_adapter,
    withhold_permits,
)
from trainer_service.stream import EpisodeStream as TrainerStream
from trainer_service.stream import RedisLink

RUN = "r"

# amqtt 0.12 deprecates the only name that its configuration takes.
pytestmark = pytest.mark.filterwarnings("ignore:The 'acl' option is deprecated:DeprecationWarning")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What `octopus secrets` draws for one run."""
    folder = tmp_path_factory.mktemp("drawn") / "secrets"
    assert main(["secrets", str(folder), "--run", RUN, "--mount", str(folder)]) == 0
    return folder


def moved(drawn: Path, port: int) -> str:
    """The address that was drawn, at a port of this machine."""
    return re.sub(r"@[^/?]+", f"@localhost:{port}", drawn.read_text().strip())


@pytest.fixture
async def urls(folder: Path, tmp_path: Path) -> AsyncIterator[dict[str, str]]:
    """Address of a real Valkey behind TLS, for each user."""
    shutil.copy(folder / "valkey.acl", tmp_path)
    async with (
        valkey_with_users(tmp_path) as port,
        tls_relay(port, server_context(folder, "valkey")) as tls_port,
    ):
        yield {
            name: moved(folder / f"redis.{name}", tls_port)
            for name in ("rollout", "trainer", "agent", "monitor")
        }


def raw(url: str) -> Any:
    return redis.asyncio.Redis.from_url(url, protocol=2)


def episode_ids(url: str) -> list[str]:
    with reading(url, RUN) as episodes:
        return [record.episode_id for record in episodes.all()]


async def test_every_service_does_its_work_as_its_own_user(
    urls: dict[str, str], tmp_path: Path
) -> None:
    (tmp_path / control.ADAPTER_FILE).write_bytes(b"x" * 100)
    (tmp_path / control.ADAPTER_CONFIG_FILE).write_text("{}")
    fetched = tmp_path / "fetched"
    fetched.mkdir()
    link = RedisLink(urls["trainer"])
    async with EpisodeStream(urls["rollout"], RUN) as stream:
        await claim_run(link, RUN, "owner", "place")
        trainer = TrainerStream(link, RUN)
        await trainer.open()
        await stream.write(small_record("e-1"))
        (delivery,) = await trainer.read(max_entries=4, block_s=5)
        await trainer.acknowledge([delivery.entry_id])
        assert await stream.trim() == 0
        await upload_adapter(link, RUN, 1, tmp_path)
        await stream.fetch_adapter(1, fetched, max_bytes=100)
        assert (fetched / control.ADAPTER_FILE).read_bytes() == b"x" * 100
        await delete_adapter(link, RUN, 1)
        await send_figures(link, RUN, '{"step": 1, "time_s": 1.0, "objective": "o"}')
        await grant_permits(link, RUN, 1, 2)
        async with redis_permits(urls["agent"], RUN, group_size=2) as taking:
            await taking.take("group")
            assert await taking.counts() == (1, 1)
            assert await running_groups(link, RUN) == 1
            await taking.end("group")
        await grant_permits(link, RUN, 3, 2)
        await withhold_permits(link, RUN)
        await forget_running_groups(link, RUN)
        assert await permits(link, RUN) == (1, 1)
        state = await read_stream_state(urls["monitor"], RUN)
        assert (state.length, state.pending) == (1, 0)
        assert await asyncio.to_thread(episode_ids, urls["monitor"]) == ["e-1"]
        assert "appendonly" in await read_server_settings(urls["monitor"])
    await link.client.aclose()


async def test_the_live_page_follows_as_the_monitor(urls: dict[str, str]) -> None:
    board = Board(run=RUN, episodes=Episodes(10))
    board.sources[REDIS] = Source(name=REDIS, address="")
    async with EpisodeStream(urls["rollout"], RUN) as stream:
        await stream.write(small_record("e-1"))
        following = asyncio.create_task(follow_streams(board, urls["monitor"]))
        try:
            async with asyncio.timeout(10):
                while board.stream is None or not len(board.episodes.rows(since=0)):
                    await board.changed(board.num_changes, 1.0)
                    assert not following.done(), following.exception()
        finally:
            following.cancel()
            await asyncio.gather(following, return_exceptions=True)


EPISODES, OTHERS = control.episodes_key(RUN), control.episodes_key("other")
ADAPTER, PERMITS = control.adapter_meta_key(RUN, 1), control.permits_key(RUN)
FORBIDDEN: dict[str, list[tuple[Any, ...]]] = {
    # Neither pushes an adapter, grants a permit, reads episodes, nor touches another run.
    "agent": [
        ("SET", control.adapter_chunk_key(RUN, 1, 0), "x"), ("HSET", ADAPTER, "config", "{}"),
        ("XADD", EPISODES, "*", "record", "x"), ("XRANGE", EPISODES, "-", "+"),
        ("XREAD", "STREAMS", EPISODES, "0"), ("XRANGE", OTHERS, "-", "+"),
        ("HGET", control.permits_key("other"), "granted"), ("GET", control.trainer_key(RUN)),
    ],
    "rollout": [
        ("HSET", ADAPTER, "config", "{}"), ("SET", control.adapter_chunk_key(RUN, 1, 0), "x"),
        ("XRANGE", EPISODES, "-", "+"), ("XADD", OTHERS, "*", "record", "x"),
        ("XRANGE", OTHERS, "-", "+"), ("DEL", EPISODES), ("HGET", PERMITS, "granted"),
        ("HMGET", control.adapter_meta_key("other", 1), "config"),
    ],
    "trainer": [
        ("XRANGE", OTHERS, "-", "+"), ("SET", control.trainer_key("other"), "x"),
        ("SET", "elsewhere", "x"),
    ],
    "monitor": [
        ("XADD", EPISODES, "*", "record", "x"), ("XACK", EPISODES, "trainer", "1-0"),
        ("DEL", EPISODES), ("HSET", PERMITS, "granted", "9"), ("XRANGE", OTHERS, "-", "+"),
        ("CONFIG", "SET", "appendonly", "no"),
    ],
}  # fmt: skip
NOBODYS: list[tuple[Any, ...]] = [
    ("FLUSHALL",), ("KEYS", "*"), ("SCAN", "0"), ("EVAL", "return 1", "0"), ("ACL", "LIST"),
    ("SHUTDOWN",), ("CLIENT", "LIST"), ("PUBLISH", "c", "x"),
    ("CONFIG", "SET", "dir", "/"), ("REPLICAOF", "h", "1"), ("MONITOR",),
]  # fmt: skip


async def test_no_user_may_do_anothers_work(urls: dict[str, str]) -> None:
    for user, commands in FORBIDDEN.items():
        async with raw(urls[user]) as client:
            for command in [*commands, *NOBODYS]:
                with pytest.raises(NoPermissionError):
                    await client.execute_command(*command)
                    pytest.fail(f"{user} may {command}")


async def test_redis_lets_in_nobody_else(urls: dict[str, str], folder: Path) -> None:
    password = urls["rollout"].partition("rollout:")[2].partition("@")[0]
    wrong = urls["rollout"].replace(password, "wrong")
    with pytest.raises(ConfigError, match="credentials") as caught:
        async with EpisodeStream(wrong, RUN):
            pass
    assert "wrong@" not in str(caught.value)
    unnamed = urls["rollout"].replace(f"rollout:{password}@", "")
    async with raw(unnamed) as client:
        with pytest.raises(AuthenticationError):
            await client.ping()


async def test_redis_is_not_reached_where_its_certificate_is_anothers(
    urls: dict[str, str], folder: Path, tmp_path: Path
) -> None:
    (tmp_path / "ca.pem").write_bytes(Authority().files()["ca.pem"])
    other_ca = urls["monitor"].replace(str(folder / "ca.pem"), str(tmp_path / "ca.pem"))
    plain = urls["monitor"].replace("rediss://", "redis://").partition("?")[0]
    for url in (other_ca, plain, urls["monitor"].partition("?")[0]):
        with pytest.raises(Unavailable):
            await read_stream_state(url, RUN)


async def test_redis_is_not_reached_under_a_name_that_its_certificate_lacks(
    urls: dict[str, str], folder: Path, tmp_path: Path
) -> None:
    authority = Authority()
    drawn = {**authority.files(), **authority.issue("valkey", ["elsewhere"])}
    for name, data in drawn.items():
        (tmp_path / name).write_bytes(data)
    async with tls_relay(1, server_context(tmp_path, "valkey")) as port:
        url = f"rediss://localhost:{port}/0?ssl_ca_certs={tmp_path / 'ca.pem'}"
        with pytest.raises(Unavailable, match="localhost"):
            await read_stream_state(url, RUN)


ANNOUNCEMENT = PolicyAnnouncement(
    version=1, sha256="a" * 64, num_tensors=2, rank=8, alpha=16.0, uri="redis:x", base_model="b",
    probe_token_ids=(1, 2),
)  # fmt: skip


@contextlib.asynccontextmanager
async def amqtt_broker(folder: Path, tmp_path: Path) -> AsyncIterator[dict[str, str]]:
    """A real broker with TLS, and the users and topics of `octopus secrets`; their addresses."""
    words = {
        name: broker_address((folder / f"mqtt.{name}").read_text().strip()).password or ""
        for name in BROKER_TOPICS
    }
    hasher = Argon2Hasher(time_cost=1, memory_cost=8, parallelism=1)
    hashes = "".join(f"{name}:{hasher.hash(word)}\n" for name, word in words.items())
    (tmp_path / "passwords").write_text(hashes)
    port = free_port()
    plugins = "amqtt.plugins"
    broker = Broker(
        {
            "listeners": {
                "default": {
                    "type": "tcp", "bind": f"127.0.0.1:{port}", "ssl": True,
                    "certfile": str(folder / "mosquitto.pem"),
                    "keyfile": str(folder / "mosquitto.key"),
                }
            },
            "plugins": {
                f"{plugins}.authentication.FileAuthPlugin": {
                    "password_file": str(tmp_path / "passwords")
                },
                f"{plugins}.topic_checking.TopicAccessControlListPlugin": {
                    "publish_acl": _topics("write"), "acl": _topics("read"),
                },
            },
        }
    )  # fmt: skip
    await broker.start()
    try:
        yield {name: moved(folder / f"mqtt.{name}", port) for name in BROKER_TOPICS}
    finally:
        await broker.shutdown()


def _topics(kind: str) -> dict[str, list[str]]:
    """What each user may do, in amqtt's form."""
    return {
        name: [rule.split()[1].format(run=RUN) for rule in rules if kind in rule.split()[0]]
        for name, rules in BROKER_TOPICS.items()
    }


async def try_to_announce(url: str) -> None:
    address = broker_address(url)
    with contextlib.suppress(aiomqtt.MqttError):
        async with aiomqtt.Client(
            address.hostname, address.port, username=address.username, password=address.password,
            tls_context=address.tls_context, timeout=1,
        ) as client:  # fmt: skip
            announced = ANNOUNCEMENT.to_json()
            await client.publish(control.policy_topic(RUN), announced, qos=1, retain=True)


async def test_the_trainer_alone_announces_over_tls(folder: Path, tmp_path: Path) -> None:
    state = ReplicaState(replica_id="replica-0", alive=True, versions=(0,))
    async with amqtt_broker(folder, tmp_path) as brokers:
        await asyncio.gather(
            *(try_to_announce(brokers[name]) for name in ("rollout", "agent", "monitor"))
        )
        assert (await read_bus_state(brokers["monitor"], RUN, listen_s=0.2)).policy is None
        async with (
            ReplicaBus(brokers["rollout"], RUN, state) as replica,
            TrainerBus(brokers["trainer"], RUN, patience_s=5) as trainer,
        ):
            await trainer.announce(ANNOUNCEMENT)
            async with asyncio.timeout(5):
                assert await anext(replica.announcements()) == ANNOUNCEMENT
            assert await trainer.wait_until(lambda found: "replica-0" in found, 5)
        for name in ("agent", "monitor"):
            seen = await read_bus_state(brokers[name], RUN, listen_s=0.3)
            assert seen.policy == ANNOUNCEMENT and len(seen.replicas) == 1


# paho leaves a socket whose handshake failed to the garbage collector.
@pytest.mark.filterwarnings("ignore:.*SSLSocket:pytest.PytestUnraisableExceptionWarning")
async def test_the_broker_lets_in_nobody_else(folder: Path, tmp_path: Path) -> None:
    async with amqtt_broker(folder, tmp_path) as brokers:
        good = brokers["monitor"]
        password = broker_address(good).password or ""
        (tmp_path / "ca.pem").write_bytes(Authority().files()["ca.pem"])
        for url in (
            good.replace(password, "wrong"),
            good.replace(f"monitor:{password}@", ""),
            good.replace(str(folder / "ca.pem"), str(tmp_path / "ca.pem")),
            good.replace("mqtts://", "mqtt://").partition("?")[0],
        ):
            with pytest.raises(Unavailable) as caught:
                await read_bus_state(url, RUN)
            assert password not in str(caught.value)


def test_a_brokers_address_is_read_whole(folder: Path) -> None:
    ca = folder / "ca.pem"
    found = broker_address(f"mqtts://u%40x:p%2Fw@broker?ssl_ca_certs={ca}")
    assert (found.hostname, found.port, found.username, found.password) == (
        "broker", 8883, "u@x", "p/w",
    )  # fmt: skip
    assert found.tls_context is not None and found.tls_context.check_hostname
    assert found.tls_context.verify_mode is ssl.CERT_REQUIRED
    assert "p/w" not in repr(found)
    assert broker_address("mqtt://b").tls_context is None
    for url in ("http://b", "mqtt://", "mqtt://b:0", "mqtt://b:x", "mqtt://b?ssl_ca_certs=x",
                "mqtts://b?ca=x", "mqtts://b?ssl_ca_certs"):  # fmt: skip
        with pytest.raises(ConfigError, match="no address of a broker"):
            broker_address(url)
    for query in ("ssl_ca_certs=/gone", f"ssl_certfile={ca}&ssl_keyfile={ca}"):
        with pytest.raises(ConfigError, match="cannot use the TLS files"):
            broker_address(f"mqtts://b?{query}")
    with pytest.raises(ConfigError, match="one half"):
        broker_address(f"mqtts://b?ssl_certfile={ca}")
