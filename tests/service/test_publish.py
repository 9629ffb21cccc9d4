"""Versions over a real broker and a real Valkey: acknowledged, proved, refused, ignored."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import aiomqtt
import pytest

import trainer_service.publish
from harness_sdk import control
from harness_sdk.cli.embedded import ValkeyServer, embedded_broker
from harness_sdk.cli.processes import free_port
from harness_sdk.control import PolicyAnnouncement, ReplicaState
from harness_sdk.errors import AdapterError, ConfigError, Unavailable
from trainer_service.bus import ControlBus
from trainer_service.config import TrainerConfig
from trainer_service.publish import Publisher, Served
from trainer_service.stream import RedisLink

RUN = "r"
CHECKSUMS = {"layers.0.q_proj.lora_A": "aa", "layers.0.q_proj.lora_B": "bb"}
PROBE = (-1.0, -2.0)

Answer = Callable[[PolicyAnnouncement], ReplicaState | None]


@pytest.fixture
async def broker() -> AsyncIterator[str]:
    async with embedded_broker() as url:
        yield url


@pytest.fixture
async def link(valkey: ValkeyServer) -> AsyncIterator[RedisLink]:
    link = RedisLink(valkey.url)
    yield link
    await link.close()


def _config(**publish: object) -> TrainerConfig:
    return TrainerConfig.model_validate(
        {"run": RUN, "model": {"path": "m"}, "publish": {"ack_timeout_s": 5.0, **publish}}
    )


def _served(folder: Path, version: int = 1) -> Served:
    folder.mkdir(exist_ok=True)
    (folder / control.ADAPTER_FILE).write_bytes(f"tensors of {version}".encode())
    (folder / control.ADAPTER_CONFIG_FILE).write_text("{}")
    return Served(
        version=version,
        folder=folder,
        base_model="base",
        checksums=CHECKSUMS,
        probe_token_ids=(1, 2, 3),
        probe_logprobs=PROBE,
    )


def _good(announcement: PolicyAnnouncement) -> ReplicaState:
    return ReplicaState(
        replica_id="replica-0",
        alive=True,
        versions=(0, announcement.version),
        checksums=CHECKSUMS,
        probe_logprobs=PROBE,
    )


@asynccontextmanager
async def _replica(url: str, answer: Answer, replica_id: str = "replica-0") -> AsyncIterator[None]:
    """Speaks the replica's half of the protocol; the real one is in rollout_service."""
    topic = control.replica_topic(RUN, replica_id)
    host, port = url.removeprefix("mqtt://").split(":")
    will = aiomqtt.Will(
        topic, ReplicaState(replica_id=replica_id, alive=False).to_json(), qos=1, retain=True
    )
    async with aiomqtt.Client(host, int(port), identifier=replica_id, will=will) as client:
        idle = ReplicaState(replica_id=replica_id, alive=True, versions=(0,))
        await client.subscribe(control.policy_topic(RUN), qos=1)
        await client.publish(topic, idle.to_json(), qos=1, retain=True)

        async def serve() -> None:
            async for message in client.messages:
                if not message.topic.matches(control.policy_topic(RUN)):
                    continue
                assert isinstance(message.payload, bytes)
                state = answer(PolicyAnnouncement.from_json(message.payload))
                if state is not None:
                    state = replace(state, replica_id=replica_id)
                    await client.publish(topic, state.to_json(), qos=1, retain=True)

        task = asyncio.create_task(serve())
        try:
            yield
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)


async def _until_known(bus: ControlBus, *names: str) -> None:
    assert await bus.wait_until(lambda replicas: set(names) <= replicas.keys(), 5.0)


async def test_publish_is_acknowledged_and_proved(
    broker: str, link: RedisLink, tmp_path: Path
) -> None:
    announced: list[PolicyAnnouncement] = []

    def answer(announcement: PolicyAnnouncement) -> ReplicaState:
        announced.append(announcement)
        return _good(announcement)

    async with ControlBus(broker, RUN) as bus, _replica(broker, answer):
        await _until_known(bus, "replica-0")
        report = await Publisher(_config(), link, bus).publish(_served(tmp_path / "a"))
    assert report.acknowledged == ("replica-0",)
    assert report.silent == ()
    assert report.probe_delta_max == 0.0
    (announcement,) = announced
    assert announcement.uri == f"redis:{control.adapter_key(RUN, 1)}"
    assert announcement.sha256 == hashlib.sha256(b"tensors of 1").hexdigest()
    assert announcement.num_tensors == 2
    assert await link.client.get(control.adapter_chunk_key(RUN, 1, 0)) == b"tensors of 1"


async def test_publish_waits_for_every_live_replica(
    broker: str, link: RedisLink, tmp_path: Path
) -> None:
    async with (
        ControlBus(broker, RUN) as bus,
        _replica(broker, _good, "replica-0"),
        _replica(broker, _good, "replica-1"),
    ):
        await _until_known(bus, "replica-0", "replica-1")
        report = await Publisher(_config(), link, bus).publish(_served(tmp_path / "a"))
    assert report.acknowledged == ("replica-0", "replica-1")


async def test_replica_that_serves_old_weights_is_caught_by_tensor(
    broker: str, link: RedisLink, tmp_path: Path
) -> None:
    def stuck(announcement: PolicyAnnouncement) -> ReplicaState:
        old = {**CHECKSUMS, "layers.0.q_proj.lora_B": "old"}
        return replace(_good(announcement), checksums=old)

    async with ControlBus(broker, RUN) as bus, _replica(broker, stuck):
        await _until_known(bus, "replica-0")
        with pytest.raises(AdapterError, match=r"replica-0, version 1.*lora_B differs"):
            await Publisher(_config(), link, bus).publish(_served(tmp_path / "a"))


@pytest.mark.parametrize(
    ("checksums", "said"),
    [
        ({"layers.0.q_proj.lora_A": "aa"}, "lora_B missing"),
        ({**CHECKSUMS, "extra": "cc"}, "extra unknown"),
        ({}, "lora_A missing"),
    ],
)
async def test_missing_and_unknown_tensors_are_named(
    broker: str, link: RedisLink, tmp_path: Path, checksums: dict[str, str], said: str
) -> None:
    async with (
        ControlBus(broker, RUN) as bus,
        _replica(broker, lambda a: replace(_good(a), checksums=checksums)),
    ):
        await _until_known(bus, "replica-0")
        with pytest.raises(AdapterError, match=said):
            await Publisher(_config(), link, bus).publish(_served(tmp_path / "a"))


@pytest.mark.parametrize("probe", [(-1.0, -2.01), (-1.0,), (), (-1.0, float("nan"))])
async def test_probe_that_differs_stops_though_the_checksums_agree(
    broker: str, link: RedisLink, tmp_path: Path, probe: tuple[float, ...]
) -> None:
    async with (
        ControlBus(broker, RUN) as bus,
        _replica(broker, lambda a: replace(_good(a), probe_logprobs=probe)),
    ):
        await _until_known(bus, "replica-0")
        with pytest.raises(AdapterError, match="probe"):
            await Publisher(_config(), link, bus).publish(_served(tmp_path / "a"))
        wide = _config(probe_tolerance=0.1)
        if probe == (-1.0, -2.01):
            report = await Publisher(wide, link, bus).publish(_served(tmp_path / "a"))
            assert report.probe_delta_max == pytest.approx(0.01)


async def test_refusal_stops_with_the_replicas_reason(
    broker: str, link: RedisLink, tmp_path: Path
) -> None:
    def refuse(announcement: PolicyAnnouncement) -> ReplicaState:
        return ReplicaState(
            replica_id="replica-0",
            alive=True,
            versions=(0,),
            error="unknown tensor layers.9",
            error_version=announcement.version,
        )

    async with ControlBus(broker, RUN) as bus, _replica(broker, refuse):
        await _until_known(bus, "replica-0")
        with pytest.raises(AdapterError, match=r"refused: unknown tensor layers\.9"):
            await Publisher(_config(), link, bus).publish(_served(tmp_path / "a"))


async def test_silent_replica_costs_the_timeout_and_is_reported(
    broker: str, link: RedisLink, tmp_path: Path
) -> None:
    config = _config(ack_timeout_s=0.3)
    async with (
        ControlBus(broker, RUN) as bus,
        _replica(broker, _good, "good"),
        _replica(broker, lambda _: None, "mute"),
    ):
        await _until_known(bus, "good", "mute")
        report = await Publisher(config, link, bus).publish(_served(tmp_path / "a"))
        assert (report.acknowledged, report.silent) == (("good",), ("mute",))
        assert 0.3 <= report.seconds < 2.0
        with pytest.raises(Unavailable, match=r"1 after .* silent: mute.*2 and more"):
            await Publisher(config, link, bus).publish(
                _served(tmp_path / "a", version=2), min_replicas=2
            )


def _waits(announcement: PolicyAnnouncement) -> ReplicaState:
    return ReplicaState(
        replica_id="replica-0", alive=True, versions=(0, 3, 4),
        waiting_version=announcement.version, waiting_for="open episodes hold versions 3",
    )  # fmt: skip


async def test_replica_that_waits_for_a_slot_is_an_answer_and_stops_nothing(
    broker: str, link: RedisLink, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with (
        ControlBus(broker, RUN) as bus,
        _replica(broker, _waits, "full"),
        _replica(broker, _good, "good"),
    ):
        await _until_known(bus, "full", "good")
        publisher = Publisher(_config(ack_timeout_s=60.0), link, bus)
        assert publisher.behind == 0
        report = await publisher.publish(_served(tmp_path / "a", 6), min_replicas=2)
        assert (report.acknowledged, report.waiting, report.silent) == (("good",), ("full",), ())
        assert report.seconds < 30
        assert publisher.behind == 6 - 4
        report = await publisher.publish(_served(tmp_path / "a", 7), min_replicas=2)
        assert (report.waiting, publisher.behind) == (("full",), 7 - 4)
        with pytest.raises(Unavailable, match=r"1 after .*waiting for a slot: full; .*3 and more"):
            await Publisher(_config(ack_timeout_s=0.3), link, bus).publish(
                _served(tmp_path / "a", 8), min_replicas=3
            )
    told = [r.getMessage() for r in caplog.records if "waits for a slot" in r.getMessage()]
    assert len([text for text in told if "for version 6" in text]) == 1
    assert len([text for text in told if "for version 7" in text]) == 0


async def test_replica_that_waits_and_falls_silent_is_waited_for_no_longer(
    broker: str,
    link: RedisLink,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with ControlBus(broker, RUN) as bus, _replica(broker, _waits):
        await _until_known(bus, "replica-0")
        publisher = Publisher(_config(), link, bus)
        await publisher.publish(_served(tmp_path / "a", 5))
        assert publisher.behind == 1
        monkeypatch.setattr(trainer_service.publish, "SILENT_S", 0.0)
        assert publisher.behind == 0
        publisher.check()
    assert "replica replica-0 waited for a slot and says nothing any more" in caplog.text


async def test_bus_knows_every_replica_that_the_broker_retains_once_it_is_entered(
    broker: str,
) -> None:
    host, port = broker.removeprefix("mqtt://").split(":")
    names = [f"replica-{number}" for number in range(200)]
    async with aiomqtt.Client(host, int(port)) as client:
        for name in names:
            state = ReplicaState(replica_id=name, alive=True, checksums={"tensor": "a" * 64})
            topic = control.replica_topic(RUN, name)
            await client.publish(topic, state.to_json(), qos=1, retain=True)
    async with ControlBus(broker, RUN) as bus:
        assert sorted(bus.replicas) == sorted(names)
        assert all(bus.silence_s(name) < 30 for name in names)
        assert bus.silence_s("another") == float("inf")


async def test_late_answer_is_compared_at_the_next_check(
    broker: str, link: RedisLink, tmp_path: Path
) -> None:
    async with ControlBus(broker, RUN) as bus, _replica(broker, lambda _: None):
        await _until_known(bus, "replica-0")
        publisher = Publisher(_config(ack_timeout_s=0.2), link, bus)
        served = _served(tmp_path / "a")
        assert (await publisher.publish(served)).silent == ("replica-0",)
        publisher.check()
        topic = control.replica_topic(RUN, "replica-0")
        host, port = broker.removeprefix("mqtt://").split(":")
        late = ReplicaState(replica_id="replica-0", alive=True, versions=(0, 1), checksums={})
        async with aiomqtt.Client(host, int(port)) as client:
            await client.publish(topic, late.to_json(), qos=1, retain=True)
        assert await bus.wait_until(lambda r: r["replica-0"].versions == (0, 1), 5.0)
        with pytest.raises(AdapterError, match="lora_A missing"):
            publisher.check()


async def test_replica_that_dies_is_not_waited_for(
    broker: str, link: RedisLink, tmp_path: Path
) -> None:
    async with ControlBus(broker, RUN) as bus:
        dying = ReplicaState(replica_id="dying", alive=True, versions=(0,))
        host, port = broker.removeprefix("mqtt://").split(":")
        async with aiomqtt.Client(host, int(port)) as client:
            topic = control.replica_topic(RUN, "dying")
            await client.publish(topic, dying.to_json(), qos=1, retain=True)
            await _until_known(bus, "dying")
            publishing = asyncio.create_task(
                Publisher(_config(), link, bus).publish(_served(tmp_path / "a"))
            )
            await asyncio.sleep(0.2)
            assert not publishing.done()
            await client.publish(topic, replace(dying, alive=False).to_json(), qos=1, retain=True)
            report = await asyncio.wait_for(publishing, 2.0)
    assert (report.acknowledged, report.silent) == ((), ())


async def test_folder_adapters_are_announced_by_address_and_redis_forgets_old_ones(
    broker: str, link: RedisLink, tmp_path: Path
) -> None:
    async with ControlBus(broker, RUN) as bus:
        publisher = Publisher(_config(keep_versions=2), link, bus)
        for version in (1, 2, 3):
            await publisher.publish(_served(tmp_path / str(version), version))
        metas = await link.client.keys("*:meta")
        assert sorted(metas) == [control.adapter_meta_key(RUN, v).encode() for v in (2, 3)]
        seen: list[PolicyAnnouncement] = []
        async with _replica(broker, lambda a: seen.append(a)):
            await Publisher(_config(via="folder", ack_timeout_s=0.3), link, bus).publish(
                _served(tmp_path / "dir with space", 4)
            )
            await asyncio.sleep(0.2)
    assert seen[-1].uri == (tmp_path / "dir with space").as_uri()
    # The retained announcement came first: a replica that starts late learns the newest.
    assert seen[0].version == 3


async def test_bus_announces_again_to_a_broker_that_forgot(link: RedisLink, tmp_path: Path) -> None:
    port = free_port()
    seen: list[PolicyAnnouncement] = []
    async with embedded_broker(port) as url:
        bus = await ControlBus(url, RUN, patience_s=10.0).__aenter__()
        await Publisher(_config(), link, bus).publish(_served(tmp_path / "a"))
    async with embedded_broker(port) as url, _replica(url, lambda a: seen.append(a)):
        assert await bus.wait_until(lambda replicas: "replica-0" in replicas, 5.0)
        for _ in range(100):
            if seen:
                break
            await asyncio.sleep(0.05)
    await bus.__aexit__(None, None, None)
    assert [announcement.version for announcement in seen] == [1]


async def test_bus_hears_its_own_runs_replicas_only(broker: str) -> None:
    host, port = broker.removeprefix("mqtt://").split(":")
    state = ReplicaState(replica_id="other", alive=True).to_json()
    async with aiomqtt.Client(host, int(port)) as client:
        topic = control.replica_topic("another-run", "other")
        await client.publish(topic, state, qos=1, retain=True)
        async with ControlBus(broker, "another-run") as other, ControlBus(broker, RUN) as bus:
            await client.publish(control.replica_topic(RUN, "own"), state, qos=1, retain=True)
            await _until_known(other, "other")
            await _until_known(bus, "own")
            assert bus.replicas.keys() == {"own"}


async def test_bus_without_a_broker_says_so() -> None:
    with pytest.raises(Unavailable, match=r"mqtt\.url"):
        async with ControlBus(f"mqtt://127.0.0.1:{free_port()}", RUN, patience_s=0.3):
            pass
    with pytest.raises(ConfigError, match="mqtt://host:port"):
        ControlBus("tcp://x", RUN)


async def test_replica_that_is_ahead_of_the_run_folder_stops_the_trainer(
    broker: str, link: RedisLink, tmp_path: Path
) -> None:
    def ahead(announcement: PolicyAnnouncement) -> ReplicaState:
        error = "adapter 1 is not newer than what serves"
        return replace(_good(announcement), versions=(0, 46), error=error, error_version=1)

    async with ControlBus(broker, RUN) as bus, _replica(broker, ahead):
        await _until_known(bus, "replica-0")
        publisher = Publisher(_config(), link, bus)
        publisher.check()
        with pytest.raises(ConfigError, match=r"got 46; allowed: up to 1; restore.*new run name"):
            await publisher.publish(_served(tmp_path / "a"))
        # A trainer that starts from an empty folder sees it before its first step.
        with pytest.raises(ConfigError, match="up to 0"):
            Publisher(_config(), link, bus).check()


@pytest.mark.parametrize(
    "url", ["http://host", "mqtt://", "mqtt://host:port", "mqtt://host:99999", "mqtt://[::1"]
)
def test_address_that_is_none_is_refused_before_anything_waits(url: str) -> None:
    with pytest.raises(ConfigError, match="no address of a broker"):
        ControlBus(url, "r")
