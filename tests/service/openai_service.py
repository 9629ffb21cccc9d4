"""The OpenAI endpoint for tests: real HTTP on a free port, turns that a test writes."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import openai

from harness_sdk.record import EpisodeRecord, Node
from rollout_service.chat import ChatRenderer
from rollout_service.engine.base import Engine
from rollout_service.openai import serve_openai
from rollout_service.sessions import SessionOptions, Sessions
from tests.chat_tokenizers import chat_tokenizer
from tests.service.sdk_service import Records, Script, ScriptedEngine

TOOL: Any = {
    "type": "function",
    "function": {
        "name": "lookup",
        "description": "Look a key up.",
        "parameters": {"type": "object", "properties": {"key": {"type": "string"}}},
        # Some versions of the client stream no others.
        "strict": True,
    },
}


@dataclass(kw_only=True)
class Endpoint:
    """A started endpoint and a client of it."""

    client: openai.AsyncOpenAI
    url: str
    engine: Engine
    records: Records
    sessions: Sessions
    chat: ChatRenderer

    @property
    def scripted(self) -> ScriptedEngine:
        """The engine, where it follows a script."""
        assert isinstance(self.engine, ScriptedEngine)
        return self.engine

    def text(self, node: Node) -> str:
        """What a node of a record says."""
        return self.chat.tokenizer.decode(node.token_ids)

    async def close(self, session: str, reward: float | None = None) -> dict[str, Any]:
        """Close a session as a program without our SDK does."""
        return await self.client.post(
            f"/octopus/sessions/{session}/close", cast_to=dict[str, Any], body={"reward": reward}
        )

    def path(self, record: EpisodeRecord, node: Node) -> str:
        """Everything from the root to the end of `node`."""
        above = self.path(record, record.nodes[node.parent]) if node.parent >= 0 else ""
        return above + self.text(node)


@contextlib.asynccontextmanager
async def endpoint(
    script: Script | None = None,
    *,
    engine: Engine | None = None,
    chat: ChatRenderer | None = None,
    options: SessionOptions | None = None,
    api_key: str = "none",
    records: Records | None = None,
    **server: Any,
) -> AsyncIterator[Endpoint]:
    """Serve a script, or an engine, over HTTP."""
    chat = chat or ChatRenderer(chat_tokenizer(), preamble="compact")
    if engine is None:
        assert script is not None, "a script or an engine"
        engine = ScriptedEngine(chat, script)
    await engine.start()
    records = records or Records()
    sessions = Sessions(engine, chat, records, options)
    running = await serve_openai(sessions, grace_s=0.2, **server)
    url = running.url
    client = openai.AsyncOpenAI(base_url=url, api_key=api_key, max_retries=0)
    try:
        async with client:
            yield Endpoint(
                client=client, url=url, engine=engine, records=records, sessions=sessions,
                chat=chat,
            )  # fmt: skip
    finally:
        await sessions.shutdown()
        await running.stop()
        await engine.close()
