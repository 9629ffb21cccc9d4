"""An episode: opened by entering it, closed by leaving it, whatever happened inside."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import uuid
from collections.abc import AsyncGenerator, Coroutine
from types import TracebackType
from typing import Any, TypeVar, cast

from harness_sdk import _channel, _wire, tracing
from harness_sdk._channel import Rpc
from harness_sdk._episode_options import EpisodeOptions, QueuedEvent
from harness_sdk._session import Session
from harness_sdk.errors import (
    Cancelled,
    DeadlineExceeded,
    EpisodeNotFound,
    HarnessError,
    InvalidRequest,
    ProtocolError,
    ServiceError,
    ToolError,
    Unavailable,
)
from harness_sdk.log_ids import log_ids
from harness_sdk.options import Timeouts
from harness_sdk.rpc.v1 import rollout_pb2 as pb
from harness_sdk.thread import Thread
from harness_sdk.tracing import Span
from harness_sdk.types import EpisodeResult, Limits, StopReason

T = TypeVar("T")

logger = logging.getLogger(__name__)


class Episode:
    """One episode of a task, made by `OctopusClient.episode` and used with `async with`.

    Entering waits for admission. Leaving cancels the episode's tasks and outstanding calls and
    closes the episode: as failed where the block raised, as cancelled where it was cancelled.
    The first failure of block or tasks is raised, later ones are noted on it.
    """

    def __init__(self, rpc: Rpc, timeouts: Timeouts, options: EpisodeOptions) -> None:
        self.episode_id = options.episode_id
        self.options = options
        self.threads: dict[str, Thread] = {}
        """Every thread so far, by id."""
        self.policy_version = 0
        """Policy that the episode began with."""
        self.result: EpisodeResult | None = None
        """What closing it left behind; None while it is open."""
        self._session = Session(
            rpc,
            options.episode_id,
            timeouts,
            sampling=options.sampling,
            primitives=options.primitives,
        )
        self._root: Thread | None = None
        self._scope = _Scope()
        self._group = asyncio.TaskGroup()
        self._watcher: asyncio.Task[None] | None = None
        self._entered = False
        self._closing = False

    @property
    def root(self) -> Thread:
        """The first thread."""
        if self._root is None:
            self._session.check_open()
        assert self._root is not None
        return self._root

    @property
    def figures(self) -> dict[str, float]:
        """What its threads have reported; see `Thread.report`."""
        return dict(self._session.figures)

    @property
    def limits(self) -> Limits:
        """The budgets that the service granted."""
        return self._session.limits

    async def __aenter__(self) -> Episode:
        if self._entered:
            raise InvalidRequest(
                "an episode is entered once",
                episode_id=self.episode_id,
                remedy="make another with client.episode(...)",
            )
        self._entered = True
        self._session.span = self._scope.enter(self.options)
        try:
            await self._open()
        except BaseException as error:
            self._scope.leave(error)
            raise
        return self

    async def _open(self) -> None:
        events = self._session.hold(_channel.OPEN_EPISODE, self._request())
        try:
            opened = await self._opened(events)
        except BaseException:
            await events.aclose()
            raise
        self.policy_version = opened.policy_version
        self._session.limits = _wire.limits_from_proto(opened.limits)
        await self._group.__aenter__()
        self._session.open(self._group)
        self._root = Thread(self._session, self.threads, opened.root_thread, opened.head)
        self._watcher = asyncio.create_task(self._watch(events))

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        try:
            await self._leave(kind, error, traceback)
        except BaseException as raised:
            self._scope.leave(raised)
            raise
        self._scope.leave(error)

    async def _leave(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        failure = error
        self._session.request_cancel()
        try:
            await self._group.__aexit__(kind, error, traceback)
        except BaseExceptionGroup as group:
            failure = _first_failure(group, error)
        except BaseException as base:
            failure = base
        try:
            await self._close_after(failure)
        finally:
            await self._stop_watching()
        if failure is not None and failure is not error:
            raise failure

    async def close(self, *, reward: float | None = None) -> EpisodeResult:
        """Cancel the episode's tasks and close it, with its outcome where that is known.

        Args:
            reward: y in [0, 1].

        Raises:
            InvalidRequest: `reward` is outside [0, 1].
            ClientClosed: It was closed before.
        """
        if reward is not None and not 0.0 <= reward <= 1.0:
            raise InvalidRequest(
                "the reward is out of range",
                value=reward,
                limit="0 to 1",
                episode_id=self.episode_id,
            )
        self._session.check_open()
        await self._session.cancel_tasks()
        return await self._close(pb.CloseEpisodeRequest(episode_id=self.episode_id, reward=reward))

    def has_raised(self, error: BaseException) -> bool:
        """Whether `error` comes from this episode's calls; what an agent raises itself does not,
        be it of the same class."""
        return isinstance(error, HarnessError) and error.episode_id == self.episode_id

    def spawn(self, coroutine: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """Run `coroutine` as a task of the episode.

        It is cancelled when the episode closes, and its failure fails the episode.
        """
        return self._session.spawn(coroutine)

    def _request(self) -> pb.OpenEpisodeRequest:
        options = self.options
        return pb.OpenEpisodeRequest(
            episode_id=options.episode_id,
            group_id=options.group_id,
            task_id=options.task_id,
            limits=_wire.limits_to_proto(options.limits),
            primitives=options.primitives,
            version_policy=options.version_policy,
            idempotency_key=uuid.uuid4().hex,
            run=options.run,
        )

    async def _opened(self, events: AsyncGenerator[pb.EpisodeEvent, None]) -> pb.EpisodeOpened:
        admission_s = self._session.timeouts.admission_s
        try:
            async with asyncio.timeout(admission_s):
                async for event in events:
                    if event.HasField("opened"):
                        return event.opened
                    self._queued(event.queued)
        except TimeoutError as error:
            if isinstance(error, HarnessError):
                raise
            raise DeadlineExceeded(
                "the episode was not admitted in time",
                limit=f"{admission_s} s",
                remedy="raise Timeouts.admission_s or run fewer episodes at once",
                episode_id=self.episode_id,
            ) from error
        raise ProtocolError("the episode's stream ended unopened", episode_id=self.episode_id)

    def _queued(self, event: pb.EpisodeQueued) -> None:
        if self.options.on_queued is not None:
            self.options.on_queued(QueuedEvent(ahead=event.ahead, kv_use=event.kv_use))

    async def _watch(self, events: AsyncGenerator[pb.EpisodeEvent, None]) -> None:
        """Hold the stream that keeps the episode alive, and learn when it is lost."""
        reason = ""
        try:
            async with contextlib.aclosing(events):
                async for event in events:
                    reason = event.closed.stop_reason or reason
            # A broken engine may serve the next episode; whatever else ends one was decided.
            kind = Unavailable if reason == StopReason.ENGINE_ERROR else EpisodeNotFound
            lost: HarnessError = kind(
                "the service closed the episode",
                value=reason,
                remedy="open another episode",
                episode_id=self.episode_id,
            )
        except HarnessError as error:
            lost = Unavailable(
                f"the stream that held the episode broke: {error.message}",
                remedy="open another episode",
                episode_id=self.episode_id,
            )
        if not self._closing:
            self._session.close(lost)

    async def _close_after(self, failure: BaseException | None) -> None:
        if self.result is not None:
            return
        if not self._session.is_open:
            if failure is None:
                self._session.check_open()
            return
        request = pb.CloseEpisodeRequest(episode_id=self.episode_id)
        if failure is not None:
            request.error_kind = self._error_kind(failure)
            request.error_message = _shown(failure)
        try:
            await self._close(request)
        except HarnessError as error:
            if failure is None:
                raise
            if isinstance(error, EpisodeNotFound):
                # A call to close it that was cut off reached the service all the same.
                return
            logger.warning("closing a failed episode failed: %s", error)

    def _error_kind(self, failure: BaseException) -> str:
        """The class name in `harness_sdk.errors` that the failed episode is stored under."""
        if not isinstance(failure, Exception):
            # Whoever stops the process or the task means to cancel.
            return Cancelled.__name__
        is_service = isinstance(failure, ServiceError | EpisodeNotFound)
        if isinstance(failure, HarnessError) and (not is_service or self.has_raised(failure)):
            return type(failure).__name__
        # Another service than this one failed, or the agent itself.
        return ToolError.__name__

    async def _close(self, request: pb.CloseEpisodeRequest) -> EpisodeResult:
        request.idempotency_key = uuid.uuid4().hex
        self._closing = True
        reply = await self._session.unary(
            _channel.CLOSE_EPISODE, request, self._session.timeouts.close_s
        )
        self._session.close()
        self.result = _wire.episode_result_from_proto(reply)
        return self.result

    async def _stop_watching(self) -> None:
        self._session.close()
        # Its end holds the frames that lead back to this episode.
        watcher, self._watcher = self._watcher, None
        if watcher is not None:
            watcher.cancel()
            await asyncio.wait([watcher])


class _Scope:
    """What holds within an episode's block: its span is current, and log lines carry its id."""

    def __init__(self) -> None:
        self._span = Span()
        self._within = contextlib.ExitStack()
        self._task: asyncio.Task[Any] | None = None

    def enter(self, options: EpisodeOptions) -> Span:
        """Begin the episode's span."""
        self._span = tracing.begin(
            "octopus.episode",
            run=options.run,
            group=options.group_id,
            task=options.task_id,
            episode=options.episode_id,
        )
        self._task = asyncio.current_task()
        self._within.enter_context(log_ids(run=options.run, episode=options.episode_id))
        self._within.enter_context(self._span.current())
        return self._span

    def leave(self, error: BaseException | None) -> None:
        """End it; `error` is what the block ended with."""
        # Context variables can be put back only where they were set.
        if asyncio.current_task() is self._task:
            self._within.close()
        self._span.end(error)


def _first_failure(
    group: BaseExceptionGroup[BaseException], error: BaseException | None
) -> BaseException:
    leaves = list(dict.fromkeys(_leaves(group)))
    first = error if error in leaves else leaves[0]
    for other in leaves:
        if other is not first:
            first.add_note(f"also failed: {_shown(other)}")
    return first


def _leaves(group: BaseExceptionGroup[BaseException]) -> list[BaseException]:
    found: list[BaseException] = []
    for error in group.exceptions:
        if isinstance(error, BaseExceptionGroup):
            found += _leaves(cast("BaseExceptionGroup[BaseException]", error))
        else:
            found.append(error)
    return found


def _shown(failure: BaseException) -> str:
    return f"{type(failure).__name__}: {failure}"
