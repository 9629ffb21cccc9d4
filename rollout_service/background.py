"""Work that goes on when whoever began it is cancelled."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine
from typing import Any

logger = logging.getLogger(__name__)


class Background:
    """Tasks with an owner; a failure is logged, for nobody may be left to hear of it."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[Any]] = set()

    def begin(self, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        """Start `work`."""
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    async def finish(self, work: Coroutine[Any, Any, Any]) -> None:
        """Start `work` and wait for its end; a caller that is cancelled leaves it running."""
        await asyncio.wait([self.begin(work)])

    async def settle(self, timeout_s: float | None = None) -> None:
        """Wait until everything begun so far has ended, for at most `timeout_s` seconds."""
        if self._tasks:
            await asyncio.wait(set(self._tasks), timeout=timeout_s)

    def _ended(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            logger.error("work in the background failed", exc_info=error)
