"""A run to watch: real Valkey and broker, what trainer and replicas would send; and a watcher."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import aiohttp
import aiomqtt
import redis.asyncio

from harness_sdk import control
from harness_sdk.cli.embedded import ValkeyServer, embedded_broker
from harness_sdk.control import PolicyAnnouncement, ReplicaState
from harness_sdk.record import EpisodeRecord, record_to_bytes

RUN = "watched"


@dataclass(slots=True, kw_only=True)
class WatchedRun:
    """The servers, and hands to write to them."""

    valkey: ValkeyServer
    mqtt_url: str

    async def add(self, *records: EpisodeRecord) -> list[str]:
        """Append episodes; their entry ids."""
        return [
            await self._append(control.episodes_key(RUN), control.RECORD_FIELD, record_to_bytes(r))
            for r in records
        ]

    async def add_step(self, step: int, **figures: Any) -> None:
        """Append a step's figures."""
        line = {"step": step, "time_s": time.time(), "objective": "dag_grpo", **figures}
        await self._append(control.steps_key(RUN), control.FIGURES_FIELD, json.dumps(line))

    async def set_permits(self, **permits: int) -> None:
        """What trainer and runners count."""
        async with redis.asyncio.Redis.from_url(self.valkey.url) as client:
            await client.hset(control.permits_key(RUN), mapping={**permits})

    async def retain(self, message: PolicyAnnouncement | ReplicaState) -> None:
        """Publish the trainer's or a replica's retained message."""
        topic = control.policy_topic(RUN)
        if isinstance(message, ReplicaState):
            topic = control.replica_topic(RUN, message.replica_id)
        port = int(self.mqtt_url.rsplit(":", 1)[1])
        async with aiomqtt.Client("127.0.0.1", port) as client:
            await client.publish(topic, message.to_json(), qos=1, retain=True)

    async def _append(self, key: str, name: str, data: bytes | str) -> str:
        async with redis.asyncio.Redis.from_url(self.valkey.url) as client:
            entry_id: Any = await client.xadd(key, {name: data})
        return entry_id.decode()


@contextlib.asynccontextmanager
async def watched_run(folder: Path) -> AsyncIterator[WatchedRun]:
    """An empty run."""
    valkey = ValkeyServer(folder / "valkey")
    await valkey.start()
    try:
        async with embedded_broker() as mqtt_url:
            yield WatchedRun(valkey=valkey, mqtt_url=mqtt_url)
    finally:
        await valkey.stop()


ANNOUNCEMENT = PolicyAnnouncement(
    version=7, sha256="ab" * 32, num_tensors=4, rank=8, alpha=16.0, uri="redis:x",
    base_model="base", probe_token_ids=(1, 2),
)  # fmt: skip


def renamed(record: EpisodeRecord, number: int, **fields: Any) -> EpisodeRecord:
    """`record` as another episode."""
    return replace(record, episode_id=f"ep-{number}", **fields)


class Watcher:
    """What a page would know: the events of one connection, merged."""

    def __init__(self, response: aiohttp.ClientResponse) -> None:
        self._response = response
        self.panes: dict[str, Any] = {}
        self.episodes: dict[str, list[str]] = {}
        self.events: list[dict[str, Any]] = []

    async def until(self, holds: Callable[[Watcher], Any], timeout_s: float = 15.0) -> Any:
        """Take events until `holds`; returns what it returned."""
        try:
            async with asyncio.timeout(timeout_s):
                while not (found := "tiles" in self.panes and holds(self)):
                    await self._next()
        except TimeoutError:
            raise AssertionError(f"never so: {json.dumps(self.panes)[:3000]}") from None
        return found

    def tile(self, name: str) -> str:
        """The text of a figure at the head."""
        return dict(self.panes["tiles"])[name]

    def source(self, name: str) -> str:
        """State of a source."""
        return next(each["state"] for each in self.panes["sources"] if each["name"] == name)

    def table(self, name: str, columns: tuple[str, ...]) -> list[dict[str, str]]:
        """A pane's rows by column."""
        return [dict(zip(columns, row["cells"], strict=True)) for row in self.panes[name]]

    async def _next(self) -> None:
        line = b""
        while not line.startswith(b"data: "):
            line = await self._response.content.readline()
            assert line, "the stream ended"
        news = json.loads(line[6:])
        self.events.append(dict(news))
        for row in news.pop("episodes", ()):
            self.episodes[row["key"]] = row["cells"]
        self.panes |= news


@contextlib.asynccontextmanager
async def watcher(url: str) -> AsyncIterator[Watcher]:
    """A page's connection to the live page's server at `url`."""
    timeout = aiohttp.ClientTimeout(total=None)
    async with (
        aiohttp.ClientSession(read_bufsize=2**24, timeout=timeout) as session,
        session.get(f"{url}events") as response,
    ):
        assert response.status == 200
        yield Watcher(response)
