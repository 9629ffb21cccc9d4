"""One open episode: its threads and nodes, and one call at a time on each thread."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import time
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass
from typing import Any, TypeVar

from harness_sdk.errors import (
    EpisodeNotFound,
    HarnessError,
    StaleHead,
    ThreadEnded,
    ThreadNotFound,
)
from harness_sdk.record import NodeKind
from harness_sdk.tracing import Span
from harness_sdk.types import ROOT_THREAD, Budget, StopReason, ThreadStatus
from rollout_service.background import Background
from rollout_service.chat.renderer import ChatRenderer
from rollout_service.cursors import Cursor
from rollout_service.engine.base import Engine
from rollout_service.sessions.forecast import Footprint
from rollout_service.sessions.guardrails import Guardrails
from rollout_service.sessions.idempotency import Replies
from rollout_service.sessions.metrics import Metrics
from rollout_service.sessions.options import Call, OpenRequest, SessionOptions, VersionPolicy
from rollout_service.sessions.threads import NodeEntry, Step, Thread

T = TypeVar("T")

_IDLE_S = 30.0
"""An episode that nobody has called for so long is not expected to grow."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Service:
    """What every episode of a replica shares."""

    engine: Engine
    chat: ChatRenderer
    options: SessionOptions
    metrics: Metrics
    newest_version: Callable[[], int]


class Episode:
    """The state of one episode.

    Args:
        service: What the replica's episodes share.
        episode_id: Unique id.
        request: What it was opened with.
        guardrails: Its rules.
        version_policy: keep or refresh.
        policy_version: Newest version at its opening.
        span: Begun with it; whoever forgets the episode ends it.
    """

    def __init__(
        self,
        service: Service,
        episode_id: str,
        request: OpenRequest,
        guardrails: Guardrails,
        *,
        version_policy: VersionPolicy,
        policy_version: int,
        span: Span | None = None,
    ) -> None:
        self.service = service
        self.episode_id = episode_id
        self.request = request
        self.guardrails = guardrails
        self.version_policy = version_policy
        self.policy_version = policy_version
        self.opened_at_s = time.time()
        self.span = span or Span()
        """Of the episode's trace; what is done outside of a call belongs to it."""
        self.threads: dict[str, Thread] = {}
        self.nodes: list[NodeEntry] = []
        self.num_tokens = 0
        """Appended so far, what was rewound included."""
        self.holder = 0
        """Number of the call whose client keeps the episode open."""
        self.closing: StopReason | None = None
        """Set once no further call is accepted."""
        self.gave_back = False
        """Whether the pool holds nothing of it any more; its record may wait for Redis still."""
        self.failure: HarnessError | None = None
        """What every call is told once the engine has ended."""
        self.closed = asyncio.Event()
        self.background = Background()
        """Residency being given back: it goes on where the caller of a call has left."""
        self._replies = Replies(service.options.max_replies)
        self._num_restarts = service.engine.stats().restarts
        self._head_ids = itertools.count(1)
        self._began_s = self._last_call_s = time.monotonic()
        self.add_thread(ROOT_THREAD, parent=None, base=None)

    @property
    def root(self) -> Thread:
        """The first thread."""
        return self.threads[ROOT_THREAD]

    @property
    def now_s(self) -> float:
        """Unix time from its opening on: a clock that is set meanwhile bends no duration."""
        return self.opened_at_s + time.monotonic() - self._began_s

    def add_thread(
        self, thread_id: str, *, parent: Thread | None, base: Cursor | None, **known: Any
    ) -> Thread:
        """Register a thread that begins at `base`."""
        thread = Thread(
            thread_id,
            parent=parent,
            base=base,
            head_id=next(self._head_ids),
            policy_version=parent.policy_version if parent is not None else self.policy_version,
            **known,
        )
        self.threads[thread_id] = thread
        if parent is not None:
            parent.children.append(thread)
        return thread

    def add_node(
        self, thread: Thread, step: Step, cursor: Cursor, kind: NodeKind, **known: Any
    ) -> NodeEntry:
        """Register a cursor that belongs to `step`; parents and mount sources come before."""
        node = NodeEntry(
            cursor=cursor, thread_id=thread.thread_id, step=step.number, kind=kind, **known
        )
        self.nodes.append(node)
        self.num_tokens += len(cursor.token_ids)
        step.nodes.append(node)
        step.num_tokens += len(cursor.token_ids)
        if node.on_path:
            step.head = cursor
        return node

    def thread(self, thread_id: str) -> Thread:
        """The thread of that name.

        Raises:
            ThreadNotFound: There is none.
        """
        try:
            return self.threads[thread_id]
        except KeyError:
            raise ThreadNotFound(
                "no such thread",
                value=thread_id or "no name",
                limit=", ".join(self.threads),
                remedy="name a thread of the episode",
                episode_id=self.episode_id,
                thread_id=thread_id,
            ) from None

    def budget(self, thread: Thread) -> Budget:
        """What is left to `thread`."""
        return self.guardrails.budget(thread, len(self.threads))

    def moved(self, thread: Thread) -> int:
        """Give the thread's state a new head number after a change."""
        thread.head_id = next(self._head_ids)
        return thread.head_id

    def current_version(self, thread: Thread) -> int:
        """The policy version that the thread computes under from now on."""
        if self.version_policy == "refresh":
            thread.policy_version = self.service.newest_version()
        return thread.policy_version

    def footprint(self) -> Footprint:
        """What it holds, and whether that is expected to grow."""
        works = any(
            thread.busy and thread.status is not ThreadStatus.WAITING
            for thread in self.threads.values()
        )
        lately = time.monotonic() - self._last_call_s < _IDLE_S
        may_fork = self.request.forks * self.guardrails.limits.max_threads
        return Footprint(
            num_tokens=self.num_tokens,
            num_cursors=len(self.nodes),
            num_threads=max(1 + may_fork, len(self.threads)),
            is_growing=works or lately,
            num_restarts=self._num_restarts,
        )

    def versions_in_use(self) -> set[int]:
        """Versions that must stay loaded for it.

        With `refresh` those are the ones that calls compute under now: whatever a thread does
        next, it does under the newest version.
        """
        if self.version_policy == "keep":
            return {self.policy_version}
        return {
            thread.policy_version
            for thread in self.threads.values()
            if thread.busy and thread.status is not ThreadStatus.WAITING
        }

    async def run(self, call: Call, action: str, operation: Callable[[Thread], Awaitable[T]]) -> T:
        """Run `operation` alone on the call's thread, once per idempotency key.

        Raises:
            StaleHead: The head moved, or another call runs.
            ThreadEnded: The thread has ended, or was ended while the call ran.
        """
        thread = self.thread(call.thread_id)

        async def effective(keep: Callable[[T], None]) -> T:
            await self._enter(thread, call, action)

            async def body() -> T:
                reply = await operation(thread)
                keep(reply)
                await self.background.settle()
                return reply

            return await self._run_alone(thread, action, body)

        return await self._replies.once(call.idempotency_key, action, effective)

    async def once(self, call: Call, action: str, operation: Callable[[], Awaitable[T]]) -> T:
        """Run `operation` beside whatever runs, once per idempotency key."""

        async def effective(keep: Callable[[T], None]) -> T:
            reply = await operation()
            keep(reply)
            await self.background.settle()
            return reply

        return await self._replies.once(call.idempotency_key, action, effective)

    def stop_threads(
        self, threads: Iterable[Thread], *, reason: str, dropped: Iterable[Cursor] = ()
    ) -> list[str]:
        """Cancel `threads` that still run, their calls too, without waiting.

        Once the calls have ended, in the background, the residency of `dropped` that no live
        thread has mounted is given back.

        Returns:
            The names of the threads that this ended.
        """
        live = [thread for thread in threads if not thread.status.is_final]
        tasks = [thread.task for thread in live if thread.task is not None]
        for thread in live:
            thread.cancel_reason = reason
            thread.end(ThreadStatus.CANCELLED)
        for task in tasks:
            task.cancel()
        self.background.begin(self._after_stopping(tasks, list(dropped)))
        return [thread.thread_id for thread in live]

    async def stop_calls(self) -> None:
        """Cancel every running call and wait until all work has ended."""
        tasks = [thread.task for thread in self.threads.values() if thread.task is not None]
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)
        await self.background.settle()

    async def _after_stopping(
        self, tasks: Iterable[asyncio.Task[Any]], dropped: Iterable[Cursor]
    ) -> None:
        if tasks:
            await asyncio.wait(tasks)
        read = {
            mount.source
            for thread in self.threads.values()
            if not thread.status.is_final
            for mount in thread.mounts
        }
        unread = [cursor for cursor in dropped if cursor not in read]
        if unread:
            await self.service.engine.evict(unread)

    async def _enter(self, thread: Thread, call: Call, action: str) -> None:
        """Refuse a call that must not run now; past here nothing waits until it is registered."""
        if thread.busy:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self.service.options.busy_grace_s):
                    await thread.idle.wait()
        where: dict[str, Any] = {"episode_id": self.episode_id, "thread_id": thread.thread_id}
        self._check_open()
        if thread.status.is_final:
            raise ThreadEnded(
                f"the thread has ended: no {action}",
                value=thread.status,
                remedy="work on another thread",
                **where,
            )
        if thread.busy:
            raise StaleHead(
                f"another call runs on the thread: {thread.busy}",
                value=action,
                limit="one call at a time",
                remedy="await one call before the next, or fork",
                **where,
            )
        if call.expected_head is not None and call.expected_head != thread.head_id:
            raise StaleHead(
                "the thread's head has moved",
                value=f"expected head {call.expected_head}",
                limit=f"head {thread.head_id}",
                remedy="take the head from the last reply; one writer per thread",
                head=thread.head_id,
                **where,
            )

    def _check_open(self) -> None:
        if self.failure is not None:
            raise self.failure.copy()
        if self.closing is not None:
            raise EpisodeNotFound(
                "the episode is closed",
                value=self.episode_id,
                limit=f"closed as {self.closing}",
                remedy="open a new episode",
                episode_id=self.episode_id,
            )

    async def _run_alone(self, thread: Thread, action: str, body: Callable[[], Awaitable[T]]) -> T:
        began = time.perf_counter()
        task = asyncio.ensure_future(body())

        def ended(_: object) -> None:
            thread.busy, thread.task = "", None
            thread.idle.set()
            self._last_call_s = time.monotonic()
            self.service.metrics.add(f"calls/{action}")
            self.service.metrics.add(f"seconds/{action}", time.perf_counter() - began)
            # Retrieved, so that a failure beside a cancellation does not warn.
            _ = task.cancelled() or task.exception()

        thread.busy, thread.task = action, task
        thread.idle.clear()
        # By the call itself: a caller that is cancelled twice leaves before it has ended.
        task.add_done_callback(ended)
        try:
            await asyncio.wait([task])
        except asyncio.CancelledError:
            task.cancel()
            await asyncio.wait([task])
            raise
        if task.cancelled():
            self._check_open()
            raise ThreadEnded(
                f"the thread was ended during {action}",
                value=thread.status,
                remedy="work on another thread",
                episode_id=self.episode_id,
                thread_id=thread.thread_id,
            )
        return task.result()
