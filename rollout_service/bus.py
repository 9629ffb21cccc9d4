"""Everything this service says over MQTT: announcements in, this replica's retained state out.

Reconnects for as long as it runs; after each connection the newest state is retained again, so
a broker that forgot it learns it anew.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import aiomqtt

from harness_sdk import control
from harness_sdk._cancellation import end
from harness_sdk.broker_address import broker_address
from harness_sdk.control import PolicyAnnouncement, ReplicaState
from harness_sdk.errors import ProtocolError, Unavailable

logger = logging.getLogger(__name__)

_FIRST_DELAY_S, _LAST_DELAY_S = 0.1, 5.0
# The broker publishes the last will after one and a half of these without a sign of life.
_KEEPALIVE_S = 10


class ControlBus:
    """One replica's connection to the control bus; an async context manager.

    Args:
        url: As `broker_address` reads it.
        run: Run name, which names the topics.
        state: This replica's state at the start.
    """

    def __init__(self, url: str, run: str, state: ReplicaState) -> None:
        self._options = _connection_options(url)
        self._policy_topic = control.policy_topic(run)
        self._replica_topic = control.replica_topic(run, state.replica_id)
        self._state = state
        self._unsent = asyncio.Event()
        self._announcements: asyncio.Queue[PolicyAnnouncement] = asyncio.Queue()
        self._task: asyncio.Task[None] | None = None
        self._closing = self._leaving = False
        self.num_connections = 0

    async def __aenter__(self) -> ControlBus:
        self._task = asyncio.create_task(self._run())
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self.close()

    async def close(self, grace_s: float = 2.0) -> None:
        """Retain `alive=false`, if the broker takes it within `grace_s` seconds, and hang up."""
        if self._task is None:
            return
        self._closing = True
        self.publish(_gone(self._state))
        await asyncio.wait([self._task], timeout=grace_s)
        await end(self._task)
        self._task = None

    def publish(self, state: ReplicaState) -> None:
        """Retain `state` as soon as the broker is there; a newer one replaces it."""
        self._state = _gone(state) if self._leaving else state
        self._unsent.set()

    def leave(self) -> None:
        """Say `alive=false` from here on: runs start their episodes elsewhere."""
        self._leaving = True
        self.publish(self._state)

    async def announcements(self) -> AsyncIterator[PolicyAnnouncement]:
        """The newest announced policy, the retained one first; repeats are possible.

        What was announced and replaced while the caller was busy is left out.
        """
        while True:
            announcement = await self._announcements.get()
            while not self._announcements.empty():
                announcement = self._announcements.get_nowait()
            yield announcement

    async def _run(self) -> None:
        delay_s = _FIRST_DELAY_S
        while True:
            try:
                async with aiomqtt.Client(
                    **self._options,
                    keepalive=_KEEPALIVE_S,
                    will=aiomqtt.Will(
                        self._replica_topic, _gone(self._state).to_json(), qos=1, retain=True
                    ),
                ) as client:
                    self.num_connections += 1
                    delay_s = _FIRST_DELAY_S
                    await self._serve(client)
                    return
            except (aiomqtt.MqttError, OSError) as error:
                logger.warning("MQTT broker is away (%s); next try in %.1f s", error, delay_s)
            await asyncio.sleep(delay_s * random.uniform(0.5, 1.0))
            delay_s = min(delay_s * 2, _LAST_DELAY_S)

    async def _serve(self, client: aiomqtt.Client) -> None:
        """Publish and receive until the connection breaks, or until closing is announced."""
        self._unsent.set()
        await client.subscribe(self._policy_topic, qos=1)
        receive = asyncio.create_task(self._receive(client))
        publish = asyncio.create_task(self._publish(client))
        try:
            await asyncio.wait([receive, publish], return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in (receive, publish):
                await end(task)
        for task in (receive, publish):
            if not task.cancelled():
                task.result()

    async def _receive(self, client: aiomqtt.Client) -> None:
        async for message in client.messages:
            # amqtt sends a new subscriber whatever is retained for anybody's subscription.
            if not message.topic.matches(self._policy_topic):
                continue
            try:
                self._announcements.put_nowait(PolicyAnnouncement.from_json(_bytes(message)))
            except ProtocolError as error:
                logger.error("on %s: %s", message.topic, error)

    async def _publish(self, client: aiomqtt.Client) -> None:
        while True:
            await self._unsent.wait()
            self._unsent.clear()
            try:
                await client.publish(self._replica_topic, self._state.to_json(), qos=1, retain=True)
            except aiomqtt.MqttError:
                self._unsent.set()
                raise
            if self._closing and not self._unsent.is_set():
                return


@dataclass(frozen=True, slots=True, kw_only=True)
class BusState:
    """What the broker retains of a run."""

    policy: PolicyAnnouncement | None
    replicas: tuple[ReplicaState, ...]


async def read_bus_state(url: str, run: str, *, listen_s: float = 0.5) -> BusState:
    """Collect the retained messages of `run`; `listen_s` seconds of silence end it.

    Raises:
        Unavailable: The broker cannot be reached.
    """
    state = BusState(policy=None, replicas=())
    async for found in follow_bus_state(url, run, listen_s=listen_s):
        state = found
    return state


async def follow_bus_state(
    url: str, run: str, *, listen_s: float | None = None
) -> AsyncIterator[BusState]:
    """What the broker retains of `run`, once subscribed and after each message.

    Args:
        url: As `ControlBus` takes it.
        run: Run name, which names the topics.
        listen_s: Seconds of silence that end it; None listens until the broker goes.

    Raises:
        Unavailable: The broker cannot be reached, or went away.
    """
    policy: PolicyAnnouncement | None = None
    replicas: dict[str, ReplicaState] = {}
    topics = [control.policy_topic(run), control.replica_topic(run, "+")]
    async for topic, payload in _retained(url, topics, listen_s):
        try:
            if topic == topics[0]:
                policy = PolicyAnnouncement.from_json(payload)
            # amqtt sends a new subscriber whatever is retained for anybody's subscription.
            elif payload and aiomqtt.Topic(topic).matches(topics[1]):
                replicas[topic] = ReplicaState.from_json(payload)
            else:
                replicas.pop(topic, None)
        except ProtocolError as error:
            logger.error("on %s: %s", topic, error)
        yield BusState(policy=policy, replicas=tuple(replicas[topic] for topic in sorted(replicas)))


def check_address(url: str) -> None:
    """Refuse what is no broker's address.

    Raises:
        ConfigError: With the address.
    """
    _connection_options(url)


async def broker_retains(url: str, *, listen_s: float = 0.5) -> bool:
    """Whether the broker keeps a retained message for those who come later.

    Raises:
        Unavailable: The broker cannot be reached.
    """
    topic = f"octopus/doctor/{random.getrandbits(64):x}"
    try:
        async with aiomqtt.Client(**_connection_options(url), timeout=5) as client:
            await client.publish(topic, b"kept", qos=1, retain=True)
        found = [payload async for _, payload in _retained(url, [topic], listen_s)]
        async with aiomqtt.Client(**_connection_options(url), timeout=5) as client:
            # An empty retained message removes the topic.
            await client.publish(topic, b"", qos=1, retain=True)
    except aiomqtt.MqttError as error:
        raise _away(error) from error
    return b"kept" in found


async def _retained(
    url: str, topics: list[str], listen_s: float | None
) -> AsyncIterator[tuple[str, bytes]]:
    """Topics and payloads; first an empty pair, which tells that the broker is there."""
    options = _connection_options(url)
    try:
        async with aiomqtt.Client(**options, timeout=5, keepalive=_KEEPALIVE_S) as client:
            for topic in topics:
                await client.subscribe(topic, qos=1)
            yield "", b""
            messages = aiter(client.messages)
            with contextlib.suppress(TimeoutError):
                while True:
                    async with asyncio.timeout(listen_s):
                        message = await anext(messages)
                    yield str(message.topic), _bytes(message)
    except aiomqtt.MqttError as error:
        raise _away(error) from error


def _gone(state: ReplicaState) -> ReplicaState:
    return ReplicaState(replica_id=state.replica_id, alive=False)


def _connection_options(url: str) -> dict[str, Any]:
    address = broker_address(url)
    return {
        "hostname": address.hostname,
        "port": address.port,
        "username": address.username,
        "password": address.password,
        "protocol": aiomqtt.ProtocolVersion.V311,
        "tls_context": address.tls_context,
    }


def _bytes(message: aiomqtt.Message) -> bytes:
    payload = message.payload
    return bytes(payload) if isinstance(payload, (bytes, bytearray)) else str(payload).encode()


def _away(error: Exception) -> Unavailable:
    return Unavailable(
        "the MQTT broker cannot be reached", value=error, remedy="start it or correct its URL"
    )
