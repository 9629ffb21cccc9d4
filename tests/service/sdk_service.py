"""The real rollout service for tests of the SDK: with a model, or with turns that a test writes."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from dataclasses import dataclass, field, replace
from typing import Any

from harness_sdk.record import EpisodeRecord
from harness_sdk.types import SamplingOptions
from rollout_service.chat import ChatRenderer
from rollout_service.cursors import Cursor
from rollout_service.engine.base import Engine
from rollout_service.engine.dry import DRY_INFO
from rollout_service.rpc import serve
from rollout_service.sessions import SessionOptions, Sessions
from tests.chat_tokenizers import chat_tokenizer
from tests.turn_engine import TurnEngine

Script = Callable[[str], str | None]
"""What the model replies to the text it sees; None never ends."""


def calls(*named: tuple[str, dict[str, Any]]) -> str:
    """A reply that calls tools."""
    return "\n".join(
        f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"
        for name, arguments in named
    )


class ScriptedEngine(TurnEngine):
    """The dry engine with a model: a function from what it sees to what it says.

    A turn whose script is None yields one token a centisecond, without end.
    """

    pause_s = 0.0
    """Before each token."""

    def __init__(self, chat: ChatRenderer, script: Script, *, max_positions: int = 1 << 20) -> None:
        super().__init__(info=replace(DRY_INFO, max_positions=max_positions))
        self.running_turns = 0
        self.seen: list[str] = []
        self.samplings: list[SamplingOptions] = []
        """Of each turn, beside `seen`."""
        self._chat = chat
        self._script = script

    async def tokens(
        self, parent: Cursor, sampling: SamplingOptions, stop_token_ids: frozenset[int]
    ) -> AsyncGenerator[int, None]:
        """One scripted turn."""
        text = self._chat.tokenizer.decode([t for c in parent.path() for t in c.token_ids])
        mounted = [m.source.token_ids[m.begin : m.end] for m in parent.mounts]
        self.seen.append(text + "".join(self._chat.tokenizer.decode(ids) for ids in mounted))
        self.samplings.append(sampling)
        reply = self._script(text)
        self.running_turns += 1
        try:
            while reply is None:
                await asyncio.sleep(0.01)
                yield 65
            for token_id in self._chat.reply(reply)[: sampling.max_tokens]:
                await asyncio.sleep(self.pause_s)
                yield token_id
        finally:
            self.running_turns -= 1


@dataclass
class Records:
    """Where the service puts its episodes."""

    written: list[EpisodeRecord] = field(default_factory=list)

    async def write(self, record: EpisodeRecord) -> str:
        """Keep `record`."""
        self.written.append(record)
        return f"{len(self.written)}-0"


@dataclass
class Running:
    """A started service."""

    address: str
    engine: Engine
    records: Records


@contextlib.asynccontextmanager
async def running(
    engine: Engine,
    chat: ChatRenderer,
    *,
    options: SessionOptions | None = None,
    **server: Any,
) -> AsyncIterator[Running]:
    """Serve `engine` over gRPC on a free port."""
    await engine.start()
    records = Records()
    server_ = await serve(Sessions(engine, chat, records, options), **server)
    try:
        yield Running(server_.address, engine, records)
    finally:
        await server_.stop(0.2)
        await engine.close()


@contextlib.asynccontextmanager
async def scripted(
    script: Script,
    *,
    options: SessionOptions | None = None,
    max_positions: int = 1 << 20,
    **server: Any,
) -> AsyncIterator[Running]:
    """Serve a model that follows `script`."""
    chat = ChatRenderer(chat_tokenizer(), preamble="compact")
    engine = ScriptedEngine(chat, script, max_positions=max_positions)
    async with running(engine, chat, options=options, **server) as service:
        yield service
