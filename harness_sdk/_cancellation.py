"""Cancelling what may swallow it.

Every call of redis-py awaits `asyncio.wait_for`, and that of Python 3.11 returns a result that
comes together with a cancellation: the caller then goes on as if nobody had cancelled it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import Any, TypeVar

T = TypeVar("T")

_PATIENCE_S = 1.0


async def cancellable(operation: Awaitable[T]) -> T:
    """Await `operation`; a cancellation that it swallowed is raised, its result dropped."""
    task = asyncio.current_task()
    assert task is not None, "awaited in a task"
    before = task.cancelling()
    try:
        result = await operation
    except Exception:
        _check(task, before)
        raise
    _check(task, before)
    return result


async def end(task: asyncio.Task[Any]) -> None:
    """Cancel `task` and wait for its end; cancels again while it goes on. Its outcome is dropped.

    The second cancellation reaches what goes on after it swallowed the first: a read of the
    reply, say, which may take as long as the socket's timeout.
    """
    while not task.done():
        task.cancel()
        await asyncio.wait([task], timeout=_PATIENCE_S)
    _ = task.cancelled() or task.exception()


def _check(task: asyncio.Task[Any], before: int) -> None:
    if task.cancelling() > before:
        raise asyncio.CancelledError
