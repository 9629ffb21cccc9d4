"""Everything this service says to the MQTT broker: policies out, replicas' states in."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import time
from collections.abc import Callable, Mapping
from types import TracebackType

import aiomqtt

from harness_sdk import control
from harness_sdk._cancellation import end
from harness_sdk.broker_address import broker_address
from harness_sdk.control import PolicyAnnouncement, ReplicaState
from harness_sdk.errors import ProtocolError, Unavailable

log = logging.getLogger(__name__)

ReplicaStates = Mapping[str, ReplicaState]
"""By replica id."""

ECHO_S = 2.0
"""Longest wait for the broker to send the trainer's own message back."""


class ControlBus:
    """A connection to the broker that comes back after the broker's restarts.

    Args:
        url: As `broker_address` reads it.
        run: Run name, which names the topics.
        patience_s: How long entering and announcing wait for the broker.

    Example:
        `async with ControlBus(url, run) as bus: await bus.announce(announcement)`
    """

    def __init__(self, url: str, run: str, *, patience_s: float = 60.0) -> None:
        self._address = broker_address(url)
        self._run = run
        self._replica_topics = control.replica_topic(run, "+")
        self._identifier = f"octopus-trainer-{run}-{os.getpid()}-{id(self) % 10_000}"
        self._echo_topic = control.echo_topic(run, self._identifier)
        self._patience_s = patience_s
        self._replicas: dict[str, ReplicaState] = {}
        self._heard_s: dict[str, float] = {}
        self._caught_up = asyncio.Event()
        self._changed = asyncio.Condition()
        self._client: aiomqtt.Client | None = None
        self._announcement: PolicyAnnouncement | None = None
        self._last_error: Exception | None = None
        self._task: asyncio.Task[None] | None = None

    async def __aenter__(self) -> ControlBus:
        self._task = asyncio.create_task(self._serve(), name="control-bus")
        try:
            await self._connected()
            await self._hear_retained()
        except BaseException:
            await self.__aexit__(None, None, None)
            raise
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._task is not None:
            await end(self._task)

    @property
    def replicas(self) -> ReplicaStates:
        """The last state of every replica that the broker retains, dead ones too."""
        return dict(self._replicas)

    def silence_s(self, replica_id: str) -> float:
        """Seconds since the replica last said anything."""
        return time.monotonic() - self._heard_s.get(replica_id, float("-inf"))

    async def announce(self, announcement: PolicyAnnouncement) -> None:
        """Retain `announcement` as the run's policy; repeated to a broker that comes back.

        Raises:
            Unavailable: The broker stayed away.
        """
        self._announcement = announcement
        give_up = time.monotonic() + self._patience_s
        while True:
            client = await self._connected()
            try:
                await self._publish(client, announcement)
                return
            except aiomqtt.MqttError as error:
                if time.monotonic() > give_up:
                    raise Unavailable(
                        f"the MQTT broker does not take version {announcement.version}",
                        value=error,
                        limit=f"{self._patience_s:g} s",
                        remedy="see its log: users, topics and message_size_limit",
                    ) from error
                await asyncio.sleep(0.2)

    async def wait_until(self, holds: Callable[[ReplicaStates], bool], timeout_s: float) -> bool:
        """Wait until `holds(replicas)`; False where `timeout_s` passed first."""
        try:
            async with asyncio.timeout(timeout_s), self._changed:
                await self._changed.wait_for(lambda: holds(self._replicas))
        except TimeoutError:
            return holds(self._replicas)
        return True

    async def _connected(self) -> aiomqtt.Client:
        try:
            async with asyncio.timeout(self._patience_s), self._changed:
                await self._changed.wait_for(lambda: self._client is not None)
        except TimeoutError as error:
            raise Unavailable(
                "the MQTT broker cannot be reached",
                value=self._last_error or "",
                limit=f"{self._patience_s:g} s",
                remedy="start it, or correct mqtt.url",
            ) from error
        assert self._client is not None
        return self._client

    async def _hear_retained(self) -> None:
        """Return once what the broker retains of the replicas has come.

        It comes before what is published after the subscription, so an echo tells; a broker that
        lets nobody publish there costs a moment.
        """
        client = await self._connected()
        with contextlib.suppress(TimeoutError, aiomqtt.MqttError):
            async with asyncio.timeout(ECHO_S):
                await client.publish(self._echo_topic, b"", qos=1)
                await self._caught_up.wait()

    async def _serve(self) -> None:
        delay_s = 0.1
        while True:
            try:
                async with self._new_client() as client:
                    await self._greet(client)
                    delay_s = 0.1
                    async for message in client.messages:
                        # amqtt sends a new client whatever is retained, subscribed or not.
                        if message.topic.matches(self._echo_topic):
                            self._caught_up.set()
                        elif message.topic.matches(self._replica_topics):
                            await self._take(str(message.topic), message.payload)
            except (aiomqtt.MqttError, OSError) as error:
                self._last_error = error
                log.warning("MQTT broker is away (%s); trying again", error)
            finally:
                self._client = None
            await asyncio.sleep(delay_s)
            delay_s = min(2 * delay_s, 5.0)

    async def _greet(self, client: aiomqtt.Client) -> None:
        await client.subscribe([(self._replica_topics, 1), (self._echo_topic, 1)])
        if self._announcement is not None:
            # A broker that restarted may have lost what it retained.
            await self._publish(client, self._announcement)
        async with self._changed:
            self._client = client
            self._changed.notify_all()

    def _new_client(self) -> aiomqtt.Client:
        address = self._address
        return aiomqtt.Client(
            address.hostname,
            address.port,
            username=address.username,
            password=address.password,
            identifier=self._identifier,
            tls_context=address.tls_context,
            timeout=10.0,
        )

    async def _publish(self, client: aiomqtt.Client, announcement: PolicyAnnouncement) -> None:
        topic = control.policy_topic(self._run)
        await client.publish(topic, announcement.to_json(), qos=1, retain=True)

    async def _take(self, topic: str, payload: object) -> None:
        replica_id = topic.rsplit("/", 1)[-1]
        async with self._changed:
            self._heard_s[replica_id] = time.monotonic()
            if not payload:
                self._replicas.pop(replica_id, None)
            elif isinstance(payload, bytes | str):
                try:
                    self._replicas[replica_id] = ReplicaState.from_json(payload)
                except ProtocolError as error:
                    log.warning("replica %s sent something else than its state: %s", topic, error)
            self._changed.notify_all()
