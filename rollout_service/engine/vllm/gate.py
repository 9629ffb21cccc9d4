"""Who may begin: calls in the order in which they came, and none beside one that rebuilds alone.

Fairness: a call computes what it lacks by several requests, one after the other. All of them carry
the call's number, and the core serves waiting requests by it. So a call begins as soon as the
calls that came before it have ended; none that comes later begins before it, however often it is
preempted or finds its context evicted.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from contextvars import ContextVar

call_number: ContextVar[int] = ContextVar("call_number", default=0)
"""The place of the call that is being served among all; its tasks inherit it."""


class RebuildGate:
    """Lets requests in freely, and one that found its context evicted alone."""

    def __init__(self) -> None:
        """Open."""
        self._alone = asyncio.Lock()
        self._num_active = 0
        self._ended = asyncio.Event()
        self._numbers = itertools.count(1)

    @property
    def is_closed(self) -> bool:
        """Whether somebody is alone."""
        return self._alone.locked()

    @property
    def has_one(self) -> bool:
        """Whether a single request is active."""
        return self._num_active == 1

    @asynccontextmanager
    async def entered(self) -> AsyncIterator[None]:
        """Be active; waits while somebody is alone."""
        call_number.set(next(self._numbers))
        async with self._alone:
            self._num_active += 1
        try:
            yield
        finally:
            self._leave()

    @asynccontextmanager
    async def alone(self) -> AsyncIterator[None]:
        """For an active request: nobody else begins, those that run go on."""
        self._leave()
        try:
            await self._alone.acquire()
        finally:
            self._num_active += 1
        try:
            yield
        finally:
            self._alone.release()

    async def opened(self) -> None:
        """Wait until nobody is alone."""
        async with self._alone:
            pass

    async def another_end(self) -> None:
        """Wait for the end of one of the other active requests, where there are any."""
        if not self.has_one:
            self._ended.clear()
            await self._ended.wait()

    def _leave(self) -> None:
        self._num_active -= 1
        self._ended.set()
