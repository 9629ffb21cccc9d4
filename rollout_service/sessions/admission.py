"""New episodes wait, first come first served, while the KV pool is or will be too full, or the
engine is being started again."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable

from rollout_service.sessions.replies import Queued

OnQueued = Callable[[Queued], Awaitable[None]]


class Admission:
    """The queue before an episode; calls of open episodes never pass through it.

    Args:
        kv_use: Reads the share of the pool that is taken now.
        peak_use: The share that one more episode would bring it to, at the fullest moment.
        num_open: Counts the open episodes; with none open, waiting for room would never end.
        is_serving: Tells whether the engine runs, or nobody will be admitted any more.
        max_kv_use: Share above which nobody is admitted.
        poll_s: Pause between two looks.
    """

    def __init__(
        self,
        *,
        kv_use: Callable[[], float],
        peak_use: Callable[[], float],
        num_open: Callable[[], int],
        is_serving: Callable[[], bool],
        max_kv_use: float,
        poll_s: float,
    ) -> None:
        self._kv_use = kv_use
        self._peak_use = peak_use
        self._num_open = num_open
        self._is_serving = is_serving
        self._max_kv_use = max_kv_use
        self._poll_s = poll_s
        self._waiting: deque[object] = deque()

    @property
    def num_waiting(self) -> int:
        """Episodes in the queue."""
        return len(self._waiting)

    async def admit(self, on_queued: OnQueued | None) -> bool:
        """Return once the caller is first and the pool has room; tells whether it had to wait.

        Args:
            on_queued: Told the place in the queue at the beginning and at each change.
        """
        ticket = object()
        self._waiting.append(ticket)
        told: int | None = None
        try:
            while not self._may_enter(ticket):
                ahead = self._waiting.index(ticket)
                if on_queued is not None and ahead != told:
                    told = ahead
                    await on_queued(Queued(ahead=ahead, kv_use=self._kv_use()))
                await asyncio.sleep(self._poll_s)
            return told is not None
        finally:
            self._waiting.remove(ticket)

    def _may_enter(self, ticket: object) -> bool:
        if self._waiting[0] is not ticket or not self._is_serving():
            return False
        return self._num_open() == 0 or self._peak_use() <= self._max_kv_use
