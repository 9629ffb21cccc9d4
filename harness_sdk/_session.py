"""What an episode and its threads share: the calls, whether it is still open, and its tasks."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Collection, Coroutine, Generator
from typing import Any, TypeVar, cast

from harness_sdk import tracing
from harness_sdk._channel import Method, Q, R, Rpc
from harness_sdk.errors import Cancelled, ClientClosed, EpisodeNotFound, HarnessError
from harness_sdk.options import Timeouts
from harness_sdk.rpc.v1 import rollout_pb2 as pb
from harness_sdk.tracing import Metadata, Span
from harness_sdk.types import Limits, SamplingOptions

T = TypeVar("T")


class Session:
    """One open episode as its client holds it.

    Attributes:
        episode_id: The episode's id.
        timeouts: Deadlines of its calls.
        sampling: What a turn takes that says nothing else.
        primitives: Branching tools that the model is offered.
        limits: The budgets that the service granted.
        figures: What its agent reports of it.
        span: Of the episode's trace, the one that all of its calls belong to.
    """

    def __init__(
        self,
        rpc: Rpc,
        episode_id: str,
        timeouts: Timeouts,
        *,
        sampling: SamplingOptions,
        primitives: tuple[str, ...],
    ) -> None:
        self.episode_id = episode_id
        self.timeouts = timeouts
        self.sampling = sampling
        self.primitives = primitives
        self.limits = Limits()
        self.figures: dict[str, float] = {}
        self.span = Span()
        self._rpc = rpc
        self._closed: HarnessError | None = ClientClosed(
            "the episode is not open",
            remedy="enter it with `async with client.episode(...)`",
            episode_id=episode_id,
        )
        self._group: asyncio.TaskGroup | None = None
        self._tasks: dict[asyncio.Task[Any], str] = {}

    def open(self, group: asyncio.TaskGroup) -> None:
        """Allow calls; tasks belong to `group` from here on."""
        self._closed, self._group = None, group

    def close(self, reason: HarnessError | None = None) -> None:
        """Refuse further calls with `reason`; the first reason stays."""
        if self._closed is None:
            self._closed = reason or ClientClosed(
                "the episode is closed",
                remedy="work on a thread inside its episode's `async with` block",
                episode_id=self.episode_id,
            )

    @property
    def is_open(self) -> bool:
        """Whether calls are allowed."""
        return self._closed is None

    def check_open(self) -> None:
        """Raise the reason why calls are refused, if they are."""
        if self._closed is not None:
            raise self._closed.copy()

    async def hold(self, method: Method[Q, R], request: Q) -> AsyncGenerator[R, None]:
        """The messages of the call that opens the episode and holds it, without a deadline."""
        replies = self._rpc.stream(method, request, None, self.span.metadata)
        with self._naming():
            async with contextlib.aclosing(replies):
                async for reply in replies:
                    yield reply

    async def unary(self, method: Method[Q, R], request: Q, timeout_s: float | None) -> R:
        """One unary call of this episode."""
        self.check_open()
        try:
            with self._naming(), self._traced(method, request) as metadata:
                return await self._rpc.unary(method, request, timeout_s, metadata)
        except EpisodeNotFound:
            # Where the episode was lost, the reason tells more than its absence.
            self.check_open()
            raise

    async def stream(
        self, method: Method[Q, R], request: Q, timeout_s: float | None
    ) -> AsyncGenerator[R, None]:
        """The messages of one streaming call of this episode."""
        self.check_open()
        with self._naming(), self._traced(method, request) as metadata:
            replies = self._rpc.stream(method, request, timeout_s, metadata)
            try:
                async for reply in replies:
                    yield reply
            except EpisodeNotFound:
                self.check_open()
                raise
            finally:
                await replies.aclose()

    def spawn(self, coroutine: Coroutine[Any, Any, T], thread_id: str = "") -> asyncio.Task[T]:
        """Run `coroutine` as a task of the episode, on behalf of `thread_id`."""
        try:
            self.check_open()
        except HarnessError:
            coroutine.close()
            raise
        assert self._group is not None
        try:
            task = self._group.create_task(coroutine)
        except RuntimeError as error:
            # Another task has failed and the block is about to be left.
            coroutine.close()
            raise Cancelled("the episode is being closed", episode_id=self.episode_id) from error
        self._tasks[task] = thread_id
        task.add_done_callback(lambda done: self._tasks.pop(done, None))
        return task

    def runs(self, thread_id: str) -> bool:
        """Whether a task of the episode works on behalf of the thread."""
        return thread_id in self._tasks.values()

    def request_cancel(self, thread_ids: Collection[str] | None = None) -> list[asyncio.Task[Any]]:
        """Cancel the tasks of `thread_ids` (None: all) but the caller's own; returns them."""
        tasks = [
            task
            for task, thread_id in self._tasks.items()
            if task is not asyncio.current_task()
            and (thread_ids is None or thread_id in thread_ids)
        ]
        for task in tasks:
            task.cancel()
        return tasks

    async def cancel_tasks(self, thread_ids: Collection[str] | None = None) -> None:
        """Cancel as `request_cancel` does and wait until the tasks have ended."""
        tasks = self.request_cancel(thread_ids)
        if tasks:
            await asyncio.wait(tasks)

    @contextlib.contextmanager
    def _naming(self) -> Generator[None]:
        """Errors of the block name the episode, by which they are told from an agent's own."""
        try:
            yield
        except HarnessError as error:
            error.episode_id = error.episode_id or self.episode_id
            raise

    @contextlib.contextmanager
    def _traced(self, method: Method[Q, R], request: Q) -> Generator[Metadata]:
        """A span of the episode's trace around a call; yields what the call carries of it."""
        call = cast("pb.CallContext", getattr(request, "call", None) or pb.CallContext())
        span = tracing.begin(
            method.path.lstrip("/"),
            within=self.span,
            kind="client",
            episode=self.episode_id,
            thread=call.thread_id,
            request=call.idempotency_key,
        )
        try:
            yield span.metadata
        except BaseException as error:
            span.end(error)
            raise
        span.end()
