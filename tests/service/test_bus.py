"""The control bus over a real MQTT broker that goes away and comes back."""

from __future__ import annotations

import asyncio
import json
import math
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from dataclasses import replace

import aiomqtt
import pytest

from harness_sdk import control
from harness_sdk.cli.embedded import embedded_broker
from harness_sdk.cli.processes import free_port
from harness_sdk.control import PolicyAnnouncement, ReplicaState
from harness_sdk.errors import ConfigError, ProtocolError, Unavailable
from rollout_service.bus import BusState, ControlBus, broker_retains, read_bus_state

RUN = "test"
STATE = ReplicaState(replica_id="replica-0", alive=True, address="127.0.0.1:1", versions=(0,))


@pytest.fixture
async def broker() -> AsyncIterator[str]:
    async with embedded_broker() as url:
        yield url


def _announcement(version: int) -> PolicyAnnouncement:
    return PolicyAnnouncement(
        version=version, sha256="a" * 64, num_tensors=2, rank=8, alpha=16.0,
        uri=f"redis:{control.adapter_key(RUN, version)}", base_model="b", probe_token_ids=(1, 2),
    )  # fmt: skip


async def _announce(url: str, payload: str) -> None:
    port = int(url.rpartition(":")[2])
    async with aiomqtt.Client("127.0.0.1", port) as client:
        await client.publish(control.policy_topic(RUN), payload, qos=1, retain=True)


async def _state_until(url: str, alive: bool, versions: tuple[int, ...]) -> BusState:
    async with asyncio.timeout(10):
        while True:
            state = await read_bus_state(url, RUN, listen_s=0.1)
            if any(r.alive == alive and r.versions == versions for r in state.replicas):
                return state


async def test_retained_announcement_reaches_a_late_replica(broker: str) -> None:
    await _announce(broker, _announcement(4).to_json())
    async with ControlBus(broker, RUN, STATE) as bus, asyncio.timeout(5):
        announcements = bus.announcements()
        first = await anext(announcements)
        assert first == _announcement(4)
        for payload in ("no announcement", "[" * 100_000, '{"probe_token_ids": [1e400]}'):
            await _announce(broker, payload)
        await _announce(broker, _announcement(5).to_json())
        while (later := await anext(announcements)) == first:
            # The broker may deliver a retained message twice.
            pass
        assert later == _announcement(5)


async def test_state_is_retained_replaced_and_cleared_on_close(broker: str) -> None:
    async with ControlBus(broker, RUN, STATE) as bus:
        state = await _state_until(broker, True, (0,))
        assert state == BusState(policy=None, replicas=(STATE,))
        newer = ReplicaState(
            replica_id="replica-0", alive=True, versions=(0, 1), checksums={"a": "b"},
            probe_logprobs=(-1.5,),
        )  # fmt: skip
        bus.publish(newer)
        assert (await _state_until(broker, True, (0, 1))).replicas == (newer,)
    (left,) = (await read_bus_state(broker, RUN, listen_s=0.1)).replicas
    assert not left.alive


async def test_killed_replica_leaves_its_last_will(broker: str) -> None:
    code = f"""
import asyncio
from harness_sdk.control import ReplicaState
from rollout_service.bus import ControlBus
async def main():
    state = ReplicaState(replica_id="replica-9", alive=True, versions=(3,))
    async with ControlBus({broker!r}, {RUN!r}, state):
        await asyncio.sleep(60)
asyncio.run(main())
"""
    process = subprocess.Popen([sys.executable, "-c", code])
    try:
        await _state_until(broker, True, (3,))
        os.kill(process.pid, signal.SIGKILL)
        state = await _state_until(broker, False, ())
        assert state.replicas[0].replica_id == "replica-9"
    finally:
        process.kill()
        await asyncio.to_thread(process.wait)


async def test_bus_reconnects_and_tells_a_new_broker_its_state() -> None:
    port = free_port()
    async with ControlBus(f"mqtt://127.0.0.1:{port}", RUN, STATE) as bus:
        # Nobody is there yet.
        await asyncio.sleep(0.05)
        async with embedded_broker(port) as url:
            await _state_until(url, True, (0,))
        bus.publish(ReplicaState(replica_id="replica-0", alive=True, versions=(0, 7)))
        async with embedded_broker(port) as url:
            await _announce(url, _announcement(8).to_json())
            await _state_until(url, True, (0, 7))
            async with asyncio.timeout(10):
                assert (await anext(bus.announcements())).version == 8
        assert bus.num_connections == 2


async def test_broker_check_finds_retained_messages_and_cleans_up(broker: str) -> None:
    assert await broker_retains(broker, listen_s=0.2)
    port = int(broker.rpartition(":")[2])
    async with aiomqtt.Client("127.0.0.1", port) as client:
        await client.subscribe("octopus/doctor/#")
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(anext(aiter(client.messages)), 0.2)


async def test_unreachable_or_malformed_broker_is_a_typed_error() -> None:
    with pytest.raises(Unavailable, match="MQTT broker"):
        await read_bus_state(f"mqtt://127.0.0.1:{free_port()}", RUN)
    for url in ("http://host", "mqtt://", "mqtt://host:port", "host:1883"):
        with pytest.raises(ConfigError, match=r"mqtt\.url"):
            ControlBus(url, RUN, STATE)


def test_replica_state_json_is_what_the_trainer_reads() -> None:
    assert ReplicaState.from_json(json.dumps(json.loads(STATE.to_json()))) == STATE


@pytest.mark.parametrize(
    "field, value",
    [
        ("address", ["127.0.0.1:7040"]),
        ("alive", "yes"),
        ("replica_id", 1),
        ("versions", [0, "1"]),
        ("checksums", {"a": 1}),
        ("checksums", "abc"),
        ("waiting_s", None),
        ("error_version", 1.5),
        ("probe_logprobs", [[-0.5]]),
        ("x", 0),
    ],
)
def test_a_payload_of_other_types_is_no_replica_state(field: str, value: object) -> None:
    payload = json.dumps({**json.loads(STATE.to_json()), field: value})
    with pytest.raises(ProtocolError, match="not a replica state"):
        ReplicaState.from_json(payload)


@pytest.mark.parametrize(
    "field, value",
    [
        ("version", 1.5),
        ("version", True),
        ("version", "1"),
        ("version", -1),
        ("version", 2**63),
        ("rank", None),
        ("alpha", "8"),
        ("uri", 5),
        ("sha256", []),
        ("probe_token_ids", [1, 2.5]),
        ("probe_token_ids", [math.inf, 1]),
        ("probe_token_ids", 3),
        ("x", 0),
    ],
)
def test_a_payload_of_other_types_is_no_announcement(field: str, value: object) -> None:
    payload = json.dumps({**json.loads(_announcement(4).to_json()), field: value})
    with pytest.raises(ProtocolError, match="not a policy announcement"):
        PolicyAnnouncement.from_json(payload)


async def test_other_retained_topics_are_left_alone(
    broker: str, caplog: pytest.LogCaptureFixture
) -> None:
    await _announce(broker, _announcement(4).to_json())
    await read_bus_state(broker, RUN, listen_s=0.1)
    async with ControlBus(broker, RUN, STATE):
        await _state_until(broker, True, (0,))
        other = replace(STATE, replica_id="replica-1")
        async with ControlBus(broker, RUN, other) as bus, asyncio.timeout(5):
            assert await anext(bus.announcements()) == _announcement(4)
    assert [r.getMessage() for r in caplog.records if "announcement" in r.getMessage()] == []
