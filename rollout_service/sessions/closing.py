"""The end of episodes: each once, its record written, everything that it held given back."""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

from harness_sdk.errors import HarnessError, Unavailable
from harness_sdk.tracing import spanning
from harness_sdk.types import EpisodeResult, StopReason
from rollout_service.sessions.episode import Episode, Service
from rollout_service.sessions.options import RecordSink
from rollout_service.sessions.records import build_record, end_threads
from rollout_service.sessions.replies import CloseReply

logger = logging.getLogger(__name__)


class Closing:
    """Closes the episodes of a replica.

    Args:
        service: What they share.
        sink: Where records go; None keeps none.
        on_closing: Called for each episode that ends, before it gives back what it holds.
        on_closed: Told each episode that is closed, its record written.
    """

    def __init__(
        self,
        service: Service,
        sink: RecordSink | None,
        on_closing: Callable[[], None],
        on_closed: Callable[[Episode], None],
    ) -> None:
        self._service = service
        self._sink = sink
        self._on_closing = on_closing
        self._on_closed = on_closed
        self._running: dict[str, asyncio.Task[CloseReply]] = {}
        self.replies: OrderedDict[str, CloseReply] = OrderedDict()
        """Of the episodes closed last, by id; `max_closed` of them are kept."""

    async def close(
        self, episode: Episode, reason: StopReason, key: str, **outcome: Any
    ) -> CloseReply:
        """Close once; whoever comes second waits for the first. Goes on when its caller goes.

        Args:
            episode: The episode.
            reason: Why it ends.
            key: Idempotency key that may repeat the call.
            outcome: What its record tells besides.

        Raises:
            Unavailable: The record could not be written; close it again.
        """
        task = self._running.get(episode.episode_id)
        if task is None:
            task = asyncio.create_task(self._finish(episode, reason, key, **outcome))
            self._running[episode.episode_id] = task
            task.add_done_callback(lambda _: self._running.pop(episode.episode_id, None))
        return await asyncio.shield(task)

    async def give_up(self, episode: Episode, reason: StopReason, message: str) -> None:
        """Close an episode that nobody closes; a record that cannot be written is logged."""
        try:
            await self.close(episode, reason, "", error_kind="Unavailable", error_message=message)
        except Unavailable as error:
            logger.error("record of episode %s is not stored: %s", episode.episode_id, error)

    async def _finish(
        self, episode: Episode, reason: StopReason, key: str, **outcome: Any
    ) -> CloseReply:
        episode.closing = reason
        await episode.stop_calls()
        end_threads(episode, reason)
        record = build_record(episode, reason, **outcome)
        try:
            self._on_closing()
            await self._service.engine.release([node.cursor for node in episode.nodes])
        except HarnessError as error:
            # An engine that has ended holds nothing, and the episode is data all the same.
            logger.error("episode %s gave nothing back: %s", episode.episode_id, error)
        episode.gave_back = True
        entry_id = ""
        if self._sink is not None:
            with spanning("octopus.write", within=episode.span, tokens=record.num_tokens):
                entry_id = await self._sink.write(record)
        result = EpisodeResult(
            stop_reason=reason,
            entry_id=entry_id,
            num_nodes=len(record.nodes),
            num_tokens=record.num_tokens,
        )
        reply = CloseReply(result=result, key=key, owner=episode.request.owner)
        self.replies[episode.episode_id] = reply
        while len(self.replies) > self._service.options.max_closed:
            self.replies.popitem(last=False)
        self._on_closed(episode)
        self._service.metrics.add(f"episodes/{reason}")
        episode.closed.set()
        return reply
