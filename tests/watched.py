"""A run to watch: real Valkey and broker, what the trainer and replicas would have sent to them."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

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
