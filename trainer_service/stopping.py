"""Waiting for something until the trainer is told to stop."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from harness_sdk._cancellation import end

GRACE_S = 3.0
"""After a stop, what Redis and the broker still get to finish; a restart catches up with it."""

T = TypeVar("T")


async def unless_stopped(stop: asyncio.Event, work: Coroutine[Any, Any, T]) -> T | None:
    """Await `work`; once `stop` is set it gets `GRACE_S` more, then None is returned."""
    task = asyncio.create_task(work)
    stopped = asyncio.create_task(stop.wait())
    try:
        await asyncio.wait({task, stopped}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            await asyncio.wait({task}, timeout=GRACE_S)
        return task.result() if task.done() else None
    finally:
        stopped.cancel()
        await end(task)
