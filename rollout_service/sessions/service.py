"""The episodes of a replica: opening, calls by address, closing. Works without gRPC."""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from typing import Any, TypeVar

from harness_sdk.deltas import TokenDelta
from harness_sdk.errors import EpisodeNotFound, HarnessError, InvalidRequest
from harness_sdk.record import EpisodeRecord
from harness_sdk.types import (
    BranchResult,
    EpisodeResult,
    Message,
    SamplingOptions,
    ServerInfo,
    ServerStatus,
    StopReason,
    Turn,
)
from rollout_service.chat.renderer import ChatRenderer
from rollout_service.engine.base import Engine
from rollout_service.sessions import branching, turns
from rollout_service.sessions.admission import OnQueued
from rollout_service.sessions.closing import Closing
from rollout_service.sessions.emitting import emitted
from rollout_service.sessions.episode import Episode, Service
from rollout_service.sessions.metrics import Metrics
from rollout_service.sessions.opening import Opening
from rollout_service.sessions.options import (
    Call,
    OpenRequest,
    RecordSink,
    SessionOptions,
)
from rollout_service.sessions.planning import TurnRequest
from rollout_service.sessions.reading import whole_delta
from rollout_service.sessions.records import build_record, stop_reason
from rollout_service.sessions.replica_state import server_info, server_status
from rollout_service.sessions.replies import (
    CloseReply,
    DoneReply,
    ForkReply,
    Opened,
    ReadReply,
    RewindReply,
    TurnReply,
    WaitReply,
)

T = TypeVar("T")


class Sessions:
    """All episodes of one replica.

    Args:
        engine: Started engine.
        chat: The model's template.
        sink: Where records go; None keeps none.
        options: Limits and names.
        newest_version: Version that new episodes begin with.
        loaded_versions: Versions that serve, for the handshake and the status.
    """

    def __init__(
        self,
        engine: Engine,
        chat: ChatRenderer,
        sink: RecordSink | None = None,
        options: SessionOptions | None = None,
        *,
        newest_version: Callable[[], int] = lambda: 0,
        loaded_versions: Callable[[], Sequence[int]] | None = None,
    ) -> None:
        self.options = options or SessionOptions()
        self.metrics = Metrics()
        self._service = Service(
            engine=engine,
            chat=chat,
            options=self.options,
            metrics=self.metrics,
            newest_version=newest_version,
        )
        self._loaded_versions = loaded_versions or (lambda: (newest_version(),))
        self._episodes: dict[str, Episode] = {}
        self._closing = Closing(self._service, sink, self._ending, self._forget)
        self._began_s = time.monotonic()
        self._opening = Opening(self._service, self._episodes, self._closing.replies)

    @property
    def is_serving(self) -> bool:
        """Whether calls are computed now and new episodes admitted: what the health check says."""
        return not self._opening.is_final and self._service.engine.stats().is_serving

    async def open(self, request: OpenRequest, on_queued: OnQueued | None = None) -> Opened:
        """Admit an episode; waits while the pool is too full.

        Args:
            request: What it asks for.
            on_queued: Told its place while it waits.

        Raises:
            InvalidRequest: The request cannot be served, or its id was used before.
        """
        return await self._opening.open(request, on_queued)

    async def generate(
        self,
        call: Call,
        messages: Sequence[Message] = (),
        *,
        tools_json: str = "",
        sampling: SamplingOptions | None = None,
        demonstration: str | None = None,
        with_events: bool = False,
    ) -> AsyncGenerator[TokenDelta | TurnReply, None]:
        """One model turn: deltas, then its reply. Closing the generator cancels the turn."""
        episode = self.episode(call.episode_id, call.owner)
        request = TurnRequest(
            messages=tuple(messages),
            tools_json=tools_json,
            sampling=sampling or SamplingOptions(),
            demonstration=demonstration,
            with_events=with_events,
        )
        told = False
        stream = emitted(
            lambda emit: episode.run(
                call, "generate", lambda thread: turns.take_turn(episode, thread, request, emit)
            )
        )
        async with contextlib.aclosing(stream) as events:
            async for event in events:
                if isinstance(event, TurnReply) and not told:
                    yield whole_delta(event.turn, with_events=with_events)
                told = True
                yield event

    async def turn(self, call: Call, messages: Sequence[Message] = (), **options: Any) -> Turn:
        """`generate` without its deltas."""
        async with contextlib.aclosing(self.generate(call, messages, **options)) as events:
            async for event in events:
                if isinstance(event, TurnReply):
                    return event.turn
        raise AssertionError("a turn ends with its reply")

    async def fork(self, call: Call, branches: Mapping[str, str]) -> ForkReply:
        """Branch after the last turn: name -> sub-task."""
        return await self._run(call, "fork", branching.fork, branches)

    async def rewind(self, call: Call, step: int, note: str = "") -> RewindReply:
        """Return to the state after `step`."""
        return await self._run(call, "rewind", branching.rewind, step, note)

    async def read_thread(self, call: Call, branch: str, first: int, last: int) -> ReadReply:
        """Mount steps `first..last` of `branch`."""
        return await self._run(call, "read_thread", branching.read_thread, branch, first, last)

    async def wait(
        self, call: Call, branches: Sequence[str] = (), timeout_s: float = 0.0
    ) -> AsyncGenerator[BranchResult | WaitReply, None]:
        """Each branch as it ends, then the reply; no branches means every child."""
        episode = self.episode(call.episode_id, call.owner)
        if not timeout_s >= 0 or math.isinf(timeout_s):
            raise InvalidRequest(
                "timeout_s is out of range",
                value=timeout_s,
                limit="0 or more",
                remedy="give seconds, or 0 to wait without a limit",
            )
        told = False
        stream = emitted(
            lambda emit: episode.run(
                call,
                "wait",
                lambda thread: branching.wait(episode, thread, branches, timeout_s, emit),
            )
        )
        async with contextlib.aclosing(stream) as events:
            async for event in events:
                if isinstance(event, WaitReply) and not told:
                    for result in event.results:
                        if result.status.is_final:
                            yield result
                told = True
                yield event

    async def done(self, call: Call, answer: str, evidence: str = "") -> DoneReply:
        """Close the thread with its answer."""
        return await self._run(call, "done", branching.done, answer, evidence)

    async def cancel(self, call: Call, reason: str = "") -> tuple[str, ...]:
        """End a thread and its descendants; the head is not checked."""
        episode = self.episode(call.episode_id, call.owner)
        self.metrics.add("calls/cancel")
        return await episode.once(
            call, "cancel", lambda: branching.cancel(episode, call.thread_id, reason)
        )

    async def close(
        self,
        episode_id: str,
        *,
        reward: float | None = None,
        error_kind: str = "",
        error_message: str = "",
        idempotency_key: str = "",
        owner: str | None = None,
    ) -> EpisodeResult:
        """Write the record, release everything. A repeat returns the first call's reply.

        Args:
            owner: Whose episodes the caller reaches; None reaches all.

        Raises:
            InvalidRequest: The reward is outside [0, 1].
            EpisodeNotFound: No such episode, or it was closed by another call.
            Unavailable: The record could not be written; repeat the call.
        """
        if reward is not None and not 0 <= reward <= 1:
            raise InvalidRequest(
                "reward is out of range",
                value=reward,
                limit="0 to 1",
                remedy="scale the score, or leave it out where there is none",
                episode_id=episode_id,
            )
        before = self._closed(episode_id, owner)
        if before is not None and idempotency_key and before.key == idempotency_key:
            return before.result
        episode = self.episode(episode_id, owner)
        reply = await self._closing.close(
            episode,
            stop_reason(episode, error_kind),
            idempotency_key,
            reward=reward,
            error_kind=error_kind,
            error_message=error_message,
        )
        return reply.result

    async def lost(self, episode_id: str, holder: int | None = None) -> None:
        """The client is gone: cancel its work, release everything, keep the record.

        Nothing happens where a repeated opening took over from `holder`.
        """
        episode = self._episodes.get(episode_id)
        if episode is None or holder not in (None, episode.holder):
            return
        await self._closing.give_up(episode, StopReason.CLIENT_LOST, "the client's stream broke")

    async def wait_closed(self, episode_id: str) -> StopReason:
        """Suspend until the episode has closed."""
        episode = self.episode(episode_id)
        await episode.closed.wait()
        assert episode.closing is not None
        return episode.closing

    def fail(self, error: HarnessError) -> None:
        """The engine has ended: every call is refused with `error` until `shutdown`."""
        self._opening.failure = error
        for episode in self._episodes.values():
            episode.failure = error

    async def drain(self) -> None:
        """Admit no new episode, and return once those that are open have closed."""
        self._opening.shut = "the service lets its last episodes end before it stops"
        while self._episodes:
            await next(iter(self._episodes.values())).closed.wait()

    async def shutdown(self) -> None:
        """Close every episode as cancelled, or failed after `fail`; no new one is admitted."""
        self._opening.shut = self._opening.shut or "the service is shutting down"
        reason, message = StopReason.CANCELLED, "the service shut down"
        if self._opening.failure is not None:
            reason, message = StopReason.ENGINE_ERROR, self._opening.failure.message
        episodes = list(self._episodes.values())
        await asyncio.gather(*(self._closing.give_up(each, reason, message) for each in episodes))

    def build_record(self, episode_id: str, *, reward: float | None = None) -> EpisodeRecord:
        """The record of an open episode as it stands."""
        episode = self.episode(episode_id)
        return build_record(episode, stop_reason(episode), reward=reward)

    def versions_in_use(self) -> set[int]:
        """Policy versions that open episodes still sample under."""
        return {
            version for episode in self._episodes.values() for version in episode.versions_in_use()
        }

    def info(self, max_message_bytes: int) -> ServerInfo:
        """What the handshake tells."""
        return server_info(self._service, tuple(self._loaded_versions()), max_message_bytes)

    def status(self) -> ServerStatus:
        """The replica's state now."""
        return server_status(
            self._service,
            list(self._episodes.values()),
            num_queued=self._opening.num_waiting,
            policy_versions=tuple(self._loaded_versions()),
            uptime_s=time.monotonic() - self._began_s,
        )

    def episode(self, episode_id: str, owner: str | None = None) -> Episode:
        """The open episode of that id.

        Args:
            episode_id: Its id.
            owner: Whose it must be; None takes anybody's.

        Raises:
            EpisodeNotFound: There is none.
        """
        episode = self._episodes.get(episode_id)
        if episode is not None and owner in (None, episode.request.owner):
            return episode
        if self._opening.failure is not None:
            raise self._opening.failure.copy()
        before = self._closed(episode_id, owner)
        raise EpisodeNotFound(
            "the episode is closed" if before is not None else "no such episode on this replica",
            value=episode_id or "no id",
            limit=f"closed as {before.result.stop_reason}" if before is not None else "",
            remedy="open a new episode",
            episode_id=episode_id,
        )

    def _closed(self, episode_id: str, owner: str | None) -> CloseReply | None:
        """How an episode that `owner` reaches ended; None where that is not known."""
        reply = self._closing.replies.get(episode_id)
        return reply if reply is not None and owner in (None, reply.owner) else None

    async def _run(
        self, call: Call, action: str, operation: Callable[..., Awaitable[T]], *args: Any
    ) -> T:
        episode = self.episode(call.episode_id, call.owner)
        return await episode.run(call, action, lambda thread: operation(episode, thread, *args))

    def _ending(self) -> None:
        self._opening.ending()

    def _forget(self, episode: Episode) -> None:
        del self._episodes[episode.episode_id]
        episode.span.set(stop_reason=str(episode.closing), tokens=episode.num_tokens)
        episode.span.end()
        self._opening.ended(episode)
