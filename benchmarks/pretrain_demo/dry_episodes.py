"""Scripted episodes without a server: the calls of the SDK's threads, straight on the sessions."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from harness_sdk._requests import as_messages
from harness_sdk.cli.demo.task import DEMO_PRIMITIVES
from harness_sdk.record import EpisodeRecord
from harness_sdk.tools import tool_schema
from harness_sdk.types import ROOT_THREAD, BranchResult, Limits, Turn
from rollout_service.chat.renderer import ChatRenderer
from rollout_service.chat.tokenizer import ChatTokenizer
from rollout_service.engine.dry import DryEngine
from rollout_service.sessions import Call, OpenRequest, Sessions
from rollout_service.sessions.replies import WaitReply


class DryThread:
    """The part of `harness_sdk.thread.Thread` that the teacher uses."""

    def __init__(self, episode: DryEpisode, thread_id: str) -> None:
        self.thread_id = thread_id
        self._episode = episode
        self._call = Call(episode_id=episode.episode_id, thread_id=thread_id)
        episode.threads[thread_id] = self

    async def generate(self, messages: Any = (), *, demonstration: str, tools: Any = ()) -> Turn:
        """Append messages and a scripted turn."""
        return await self._episode.sessions.turn(
            self._call,
            as_messages(messages),
            tools_json=json.dumps([tool_schema(tool) for tool in tools]) if tools else "",
            demonstration=demonstration,
        )

    async def fork(self, branches: Mapping[str, str]) -> dict[str, DryThread]:
        """One child a name."""
        reply = await self._episode.sessions.fork(self._call, branches)
        return {t.thread_id: DryThread(self._episode, t.thread_id) for t in reply.threads}

    async def read_thread(self, branch: str, steps: tuple[int, int]) -> None:
        """Mount a peer's steps."""
        await self._episode.sessions.read_thread(self._call, branch, *steps)

    async def rewind(self, step: int, *, note: str = "") -> None:
        """Go back to an earlier step."""
        await self._episode.sessions.rewind(self._call, step, note)

    async def wait(self) -> list[BranchResult]:
        """Until every child has ended."""
        async for event in self._episode.sessions.wait(self._call):
            if isinstance(event, WaitReply):
                return list(event.results)
        raise AssertionError("a wait ends with its reply")

    async def done(self, answer: str) -> None:
        """End the thread."""
        await self._episode.sessions.done(self._call, answer)

    async def cancel(self, reason: str = "") -> None:
        """End the thread without an answer."""
        await self._episode.sessions.cancel(self._call, reason)


class DryEpisode:
    """The part of `harness_sdk.episode.Episode` that the teacher uses."""

    def __init__(self, sessions: Sessions, episode_id: str) -> None:
        self.sessions = sessions
        self.episode_id = episode_id
        self.threads: dict[str, DryThread] = {}
        self.root = DryThread(self, ROOT_THREAD)


class DryService:
    """Sessions over an engine that computes nothing."""

    def __init__(self, tokenizer_folder: Path) -> None:
        self.tokenizer = ChatTokenizer.load(tokenizer_folder)
        chat = ChatRenderer(self.tokenizer, preamble="compact")
        self._records: list[EpisodeRecord] = []
        self._sessions = Sessions(DryEngine(), chat, sink=self)

    async def write(self, record: EpisodeRecord) -> str:
        """Keep a finished episode's record."""
        self._records.append(record)
        return str(len(self._records))

    @asynccontextmanager
    async def episode(
        self,
        task_id: str,
        *,
        primitives: Sequence[str] = DEMO_PRIMITIVES,
        limits: Limits | None = None,
    ) -> AsyncIterator[DryEpisode]:
        """An open episode; its record is `last_record` after the block."""
        request = OpenRequest(
            task_id=task_id, primitives=tuple(primitives), limits=limits or Limits()
        )
        opened = await self._sessions.open(request)
        yield DryEpisode(self._sessions, opened.episode_id)
        await self._sessions.close(opened.episode_id)

    @property
    def last_record(self) -> EpisodeRecord:
        """The newest record."""
        return self._records[-1]
