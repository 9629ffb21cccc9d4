"""Who may begin: while one request rebuilds what others keep evicting, no other starts."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager


class RebuildGate:
    """Lets requests in freely, and one that found its context evicted alone."""

    def __init__(self) -> None:
        """Open."""
        self._alone = asyncio.Lock()
        self._num_active = 0
        self._ended = asyncio.Event()

    @property
    def is_closed(self) -> bool:
        """Whether somebody is alone."""
        return self._alone.locked()

    @asynccontextmanager
    async def entered(self) -> AsyncIterator[None]:
        """Be active; waits while somebody is alone."""
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

    async def another_end(self) -> bool:
        """Wait for another active request's end; False where there is none."""
        if self._num_active <= 1:
            return False
        self._ended.clear()
        await self._ended.wait()
        return True

    def _leave(self) -> None:
        self._num_active -= 1
        self._ended.set()
