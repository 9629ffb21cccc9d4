"""Which replica a group goes to: the least busy of those that are there and answer."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from pathlib import Path
from typing import Any

import pytest

from harness_sdk import replicas as module
from harness_sdk.cli.__main__ import main
from harness_sdk.cli.discovery import discovered
from harness_sdk.control import ReplicaState
from harness_sdk.errors import ConfigError, HarnessError, ProtocolError, ServiceError, Unavailable
from harness_sdk.replicas import Replicas
from rollout_service import bus


class Client:
    """A client that connects when it is let."""

    def __init__(self, address: str, refusals: int = 0) -> None:
        self.address = address
        self.refusals = refusals
        self.is_open = False

    async def __aenter__(self) -> Client:
        if self.refusals:
            self.refusals -= 1
            raise Unavailable("not yet")
        self.is_open = True
        return self

    async def close(self) -> None:
        self.is_open = False


def _never(address: str) -> Any:
    return Client(address, refusals=99)


def _at_once(address: str) -> Any:
    return Client(address)


def fixed(*addresses: str) -> Replicas:
    clients: Sequence[Any] = [Client(address) for address in addresses]
    return Replicas(clients)


async def test_groups_go_to_the_least_busy_and_take_turns_among_equals() -> None:
    replicas = fixed("a", "b")
    first = await replicas.assign(8)
    second = await replicas.assign(2)
    assert [first.address, second.address] == ["a", "b"]
    assert (await replicas.assign(2)).address == "b"
    for _ in range(8):
        replicas.release(first)
    assert (await replicas.assign(1)).address == "a"
    for _ in range(4):
        replicas.release(second)
    replicas.release(first)
    turns = [(await replicas.assign(1)).address for _ in range(4)]
    assert turns in (["b", "a", "b", "a"], ["a", "b", "a", "b"])


async def test_a_group_stays_until_its_replica_leaves_or_loses_an_episode() -> None:
    replicas = fixed("a", "b")
    place = await replicas.assign(3)
    assert await replicas.move(place, place) is place
    replicas.note_failure(place, lost=False)
    assert await replicas.move(place, place) is place
    replicas.note_failure(place, lost=True)
    other = await replicas.move(place, place)
    assert (other.address, place.num_assigned, other.num_assigned) == ("b", 2, 1)
    # The rest of the group follows.
    assert await replicas.move(place, other) is other
    assert (place.num_assigned, other.num_assigned) == (1, 2)
    # Both are avoided: one that may be dead is better than none.
    replicas.note_failure(other, lost=True)
    assert (await replicas.move(other, other)).is_present
    replicas.note_success(place)
    assert await replicas.move(place, place) is place
    replicas.leave("a")
    assert (await replicas.move(place, place)).address == "b"


async def test_a_run_stops_when_every_replica_fails_one_after_another() -> None:
    replicas = fixed("a", "b")
    a, b = replicas.present
    assert [replicas.note_failure(a, lost=False) for _ in range(5)] == [0] * 5
    assert [replicas.note_failure(b, lost=False) for _ in range(3)] == [1, 2, 3]
    replicas.note_success(a)
    assert replicas.note_failure(b, lost=False) == 0
    # What has left counts no more.
    replicas.leave("a")
    assert replicas.note_failure(b, lost=True) == 5
    assert not replicas.has_other(b)


async def test_one_that_joins_is_used_and_one_that_left_is_closed_behind_its_last_episode(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "_FIRST_PAUSE_S", 0.0)
    made: dict[str, Client] = {}

    def connect(address: str) -> Any:
        # Refused once: it says that it is there before the network lets it be reached.
        made[address] = Client(address, refusals=address not in made)
        return made[address]

    async with Replicas(connect=connect) as replicas, asyncio.timeout(5):
        waiting = asyncio.create_task(replicas.assign(2))
        replicas.join("a")
        replicas.join("a")
        place = await waiting
        assert [each.address for each in replicas.present] == ["a"]
        replicas.leave("a")
        assert replicas.present == ()
        replicas.release(place)
        await asyncio.sleep(0)
        assert made["a"].is_open
        replicas.release(place)
        while made["a"].is_open:
            await asyncio.sleep(0)
        replicas.join("b")
        assert (await replicas.first()).address == "b"
    assert not made["b"].is_open


async def test_one_that_leaves_while_it_is_connected_to_never_joins() -> None:
    async with Replicas(connect=_never) as replicas:
        replicas.join("a")
        await asyncio.sleep(0)
        replicas.leave("a")
        await asyncio.sleep(0)
        assert replicas.present == ()


async def test_one_whose_connection_fails_in_any_way_is_tried_again(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(module, "_FIRST_PAUSE_S", 0.0)
    faults = iter((OSError("too many open files"), Unavailable("not yet")))

    def connect(address: str) -> Any:
        for fault in faults:
            raise fault
        return Client(address)

    async with Replicas(connect=connect) as replicas, asyncio.timeout(5):
        replicas.join("a")
        assert (await replicas.first()).address == "a"
    warnings = [record for record in caplog.records if record.levelname == "WARNING"]
    assert warnings[0].getMessage().endswith(" it is there: OSError: too many open files")
    # Ours needs no traceback.
    assert [bool(record.exc_info) for record in warnings] == [True, False]


async def test_a_run_whose_replicas_cannot_be_connected_to_says_why() -> None:
    def connect(address: str) -> Any:
        raise OSError("too many open files")

    async with Replicas(connect=connect, patience_s=0.05) as replicas:
        replicas.join("a")
        with pytest.raises(Unavailable, match=r"no replica .*OSError: too many open files"):
            await replicas.first()


async def test_a_run_without_replicas_says_so() -> None:
    async with Replicas(patience_s=0.01) as replicas:
        with pytest.raises(Unavailable, match=r"no replica.*0\.01 s.*octopus status"):
            await replicas.assign(1)


@pytest.mark.parametrize(
    ("raised", "told"),
    [
        (ProtocolError("the bus speaks version 9"), "version 9"),
        (KeyError("alive"), r"found through the control bus.*KeyError.*--address"),
    ],
)
async def test_a_bus_that_cannot_be_followed_ends_the_run(
    raised: Exception, told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken = asyncio.Event()

    async def followed(url: str, run: str) -> AsyncGenerator[bus.BusState]:
        yield bus.BusState(
            policy=None, replicas=(ReplicaState(replica_id="r0", alive=True, address="a"),)
        )
        await broken.wait()
        raise raised

    monkeypatch.setattr(bus, "follow_bus_state", followed)
    kind = type(raised) if isinstance(raised, HarnessError) else ServiceError
    async with asyncio.timeout(5), discovered("mqtt://h", "r", _at_once) as replicas:
        await replicas.assign(1)
        broken.set()
        with pytest.raises(kind, match=told):
            while await replicas.assign(1):
                await asyncio.sleep(0)


async def test_who_waits_for_a_first_replica_hears_why_none_can_come() -> None:
    async with Replicas() as replicas, asyncio.timeout(5):
        waiting = asyncio.create_task(replicas.first())
        await asyncio.sleep(0)
        await replicas.fail(ProtocolError("no"))
        with pytest.raises(ProtocolError):
            await waiting


async def test_an_address_that_is_none_is_refused_before_anything_waits() -> None:
    with pytest.raises(ConfigError, match=r"mqtt\.url is no address"):
        async with discovered("http://x", "r", _never):
            pass


def test_a_broker_without_a_run_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OCTOPUS_MQTT_URL", "mqtt://u:secret@h")
    (tmp_path / "agent.py").write_text(
        "def tasks(): return []\nasync def run(t, k): ...\ndef score(k, a): return 0.0\n"
    )
    assert main(["run", str(tmp_path)]) == 1
    told = capsys.readouterr().err
    assert "run is not set" in told and "--run" in told and "secret" not in told
