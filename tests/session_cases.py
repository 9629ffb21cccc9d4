"""Sessions over engines that compute nothing, for tests of what sessions decide."""

from __future__ import annotations

import asyncio
import json
from collections import deque
from collections.abc import AsyncGenerator, Sequence
from dataclasses import replace
from typing import Any

from harness_sdk.record import EpisodeRecord
from harness_sdk.types import BranchResult, Limits, Message, SamplingOptions, Turn
from rollout_service.chat import ChatRenderer
from rollout_service.cursors import Cursor
from rollout_service.engine.base import Engine, EngineStats
from rollout_service.sessions import Call, OpenRequest, SessionOptions, Sessions
from rollout_service.sessions.episode import Episode
from rollout_service.sessions.replies import WaitReply
from tests.chat_tokenizers import chat_tokenizer
from tests.turn_engine import TurnEngine

CHAT = ChatRenderer(chat_tokenizer(), preamble="compact")
ALL = ("fork", "rewind", "read_thread", "wait", "done")


LOOK = '<tool_call>{"name": "look"}</tool_call>'
"""A turn after which a model-driven thread goes on."""


class MemorySink:
    """Keeps the records."""

    def __init__(self) -> None:
        self.records: list[EpisodeRecord] = []
        self.failures: deque[Exception] = deque()

    async def write(self, record: EpisodeRecord) -> str:
        if self.failures:
            raise self.failures.popleft()
        self.records.append(record)
        return f"{len(self.records)}-0"


class ScriptedEngine(TurnEngine):
    """A dry engine that samples what the test wrote, one token after the other."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.scripts: deque[Sequence[int]] = deque()
        self.gate: asyncio.Event | None = None
        """Set: sampling stops after the first token until the event is."""
        self.sampling = asyncio.Event()
        """Set once a first token was sampled."""
        self.failure: Exception | None = None
        self.kv_use: float | None = None
        self.is_serving = True
        self.evicted: list[Cursor] = []

    async def tokens(
        self, parent: Cursor, sampling: SamplingOptions, stop_token_ids: frozenset[int]
    ) -> AsyncGenerator[int, None]:
        for token_id in list(self.scripts.popleft())[: sampling.max_tokens]:
            yield token_id
            self.sampling.set()
            if self.failure is not None:
                raise self.failure
            if self.gate is not None:
                await self.gate.wait()
            if token_id in stop_token_ids:
                return

    async def evict(self, cursors: Sequence[Cursor]) -> None:
        self.evicted += cursors

    def stats(self) -> EngineStats:
        stats = replace(super().stats(), is_serving=self.is_serving)
        if self.kv_use is None:
            return stats
        capacity = 1_000_000
        return replace(stats, tokens_resident=int(self.kv_use * capacity), tokens_capacity=capacity)


class Bench:
    """Sessions with everything around them, and short ways to call them."""

    def __init__(
        self, engine: Engine | None = None, *, chat: ChatRenderer | None = None, **options: Any
    ) -> None:
        self.engine = engine or ScriptedEngine()
        self.sink = MemorySink()
        self.version = 0
        options.setdefault("busy_grace_s", 0.05)
        self.sessions = Sessions(
            self.engine,
            chat or CHAT,
            self.sink,
            SessionOptions(run="r", replica_id="p", **options),
            newest_version=lambda: self.version,
        )
        self.episode_id = "e"

    async def open(
        self, *, primitives: Sequence[str] = ALL, limits: Limits | None = None, **options: Any
    ) -> Episode:
        """Open episode `e`."""
        request = OpenRequest(
            episode_id=self.episode_id,
            primitives=tuple(primitives),
            limits=limits or Limits(),
            **options,
        )
        await self.sessions.open(request)
        return self.sessions.episode(self.episode_id)

    def call(self, thread: str = "root", **address: Any) -> Call:
        """The address of a call."""
        return Call(episode_id=self.episode_id, thread_id=thread, **address)

    async def say(self, thread: str = "root", reply: str = LOOK, *observations: str) -> Turn:
        """A demonstrated turn after tool answers (a user's question at the root's start)."""
        first = self.sessions.episode(self.episode_id).thread(thread).head is None
        role = "user" if first else "tool"
        messages = [Message(role=role, content=text) for text in observations]
        if first and not messages:
            messages = [Message(role="user", content="go")]
        return await self.sessions.turn(self.call(thread), messages, demonstration=reply)

    async def fork(self, *names: str, thread: str = "root") -> None:
        """Fork children with their names as sub-tasks."""
        await self.sessions.fork(self.call(thread), {name: f"do {name}" for name in names})

    async def wait(self, *branches: str, timeout_s: float = 0) -> list[BranchResult | WaitReply]:
        """What a wait of the root yields."""
        events = self.sessions.wait(self.call(), branches, timeout_s)
        return [event async for event in events]

    async def close(self, **outcome: Any) -> EpisodeRecord:
        """Close the episode and return its record."""
        await self.sessions.close(self.episode_id, **outcome)
        return self.sink.records[-1]


def tool_call(name: str, **arguments: Any) -> str:
    """A call as a model writes it."""
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


def text(record: EpisodeRecord, node_id: int) -> str:
    """What a node reads."""
    return CHAT.tokenizer.decode(record.nodes[node_id].token_ids)


def path_text(episode: Episode, thread: str = "root") -> str:
    """What the thread sees from the root to its head, mounts aside."""
    head = episode.thread(thread).head
    assert head is not None
    ids = [token for cursor in head.path() for token in cursor.token_ids]
    return episode.service.chat.tokenizer.decode(ids)
