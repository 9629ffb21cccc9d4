"""One thread's calls: one at a time, each on the newest head, and none of them forgotten.

A call can take effect though its caller leaves before the reply: a timeout around it, a stream
left at its last delta, a connection that broke. The next call is then refused as stale; what the
earlier one has done is learnt by repeating it under its own idempotency key, which does nothing
twice, and the refused call is sent once more.
"""

from __future__ import annotations

import contextlib
import time
import uuid
from collections import deque
from collections.abc import AsyncGenerator, Awaitable, Callable, Generator

from harness_sdk._channel import Method, Q, R
from harness_sdk._session import Session
from harness_sdk.errors import (
    HarnessError,
    InvalidRequest,
    ProtocolError,
    ServiceError,
    StaleHead,
    ThreadEnded,
)
from harness_sdk.rpc.v1 import rollout_pb2 as pb

Finish = Callable[[], Awaitable[object]]
"""Repeats a call as it was first sent and takes its reply over."""

_MAX_UNANSWERED = 16


class Calls:
    """The calls of one thread.

    Attributes:
        head: Head that the thread has, as far as its client knows.
    """

    def __init__(self, session: Session, thread_id: str, head: int) -> None:
        self.head = head
        self._session = session
        self._thread_id = thread_id
        self._running = ""
        self._ended_s = time.monotonic()
        self._answered = False
        self._context = pb.CallContext()
        # All of them were sent on the present head, so at most one has taken effect.
        self._unanswered: deque[Finish] = deque(maxlen=_MAX_UNANSWERED)

    def address(self) -> pb.CallContext:
        """The address of a call made now, with a key of its own."""
        return pb.CallContext(
            episode_id=self._session.episode_id,
            thread_id=self._thread_id,
            expected_head=self.head,
            idempotency_key=uuid.uuid4().hex,
        )

    @contextlib.contextmanager
    def one(
        self, action: str, context: pb.CallContext, finish: Finish
    ) -> Generator[None, None, None]:
        """Address a call and keep others out while it runs.

        Args:
            action: What it does, for the refusal of others.
            context: Of its request; filled in here.
            finish: How a later call learns what it did, should it end without a reply.

        Raises:
            InvalidRequest: Another call runs.
        """
        if self._running:
            raise InvalidRequest(
                f"no {action} while another call of the thread runs",
                value=self._running,
                remedy="await one call before the next, or fork",
                episode_id=self._session.episode_id,
                thread_id=self._thread_id,
            )
        context.CopyFrom(self.address())
        self._context, self._running, self._answered = context, action, False
        try:
            yield
        except BaseException as error:
            if not self._answered and _is_silent(error):
                self._unanswered.append(finish)
            raise
        finally:
            self._running, self._ended_s = "", time.monotonic()

    @property
    def idle_s(self) -> float:
        """Seconds since the last call, or since the thread is known; 0 while a call runs."""
        return 0.0 if self._running else time.monotonic() - self._ended_s

    def moved(self, head: int) -> None:
        """A reply came, with the thread's new head."""
        self.head = head
        self._answered = True
        self._unanswered.clear()

    async def unary(self, method: Method[Q, R], request: Q, timeout_s: float | None) -> R:
        """The reply of one unary call."""
        try:
            return await self._session.unary(method, request, timeout_s)
        except (StaleHead, ThreadEnded) as error:
            if not await self._caught_up(error):
                raise
        return await self._session.unary(method, request, timeout_s)

    async def stream(
        self, method: Method[Q, R], request: Q, timeout_s: float | None
    ) -> AsyncGenerator[R, None]:
        """The messages of one streaming call."""
        began = False
        try:
            async with contextlib.aclosing(
                self._session.stream(method, request, timeout_s)
            ) as replies:
                async for reply in replies:
                    began = True
                    yield reply
            return
        except (StaleHead, ThreadEnded) as error:
            if began or not await self._caught_up(error):
                raise
        async with contextlib.aclosing(self._session.stream(method, request, timeout_s)) as replies:
            async for reply in replies:
                yield reply

    async def _caught_up(self, error: StaleHead | ThreadEnded) -> bool:
        """Learn what calls without a reply have done; whether the refused one may be repeated."""
        is_busy = isinstance(error, StaleHead) and not error.head
        if is_busy or not self._unanswered:
            return False
        unanswered, self._unanswered = self._unanswered, deque(maxlen=_MAX_UNANSWERED)
        try:
            found = await self._finish_one(unanswered)
        except BaseException:
            self._unanswered = unanswered
            raise
        self._answered = False
        if not found:
            if not isinstance(error, StaleHead):
                return False
            # The service keeps a bounded number of replies: this one's is gone, its effect is not.
            self.head = error.head
        self._context.expected_head = self.head
        return True

    async def _finish_one(self, unanswered: deque[Finish]) -> bool:
        for finish in unanswered:
            try:
                await finish()
            except (StaleHead, ThreadEnded):
                # This one did nothing.
                continue
            return True
        return False


def _is_silent(error: BaseException) -> bool:
    """Whether a call that ended with `error` may have taken effect; refusals have none."""
    return not isinstance(error, HarnessError) or isinstance(error, ServiceError | ProtocolError)
