"""A wait that may never end says so: a child that nobody runs has nobody to call its `done`."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator, Callable, Mapping

from harness_sdk._cancellation import end

logger = logging.getLogger(__name__)

UNRUN_S = 60.0
"""A child is named once it was waited for, and nobody ran it, for so long."""


@contextlib.asynccontextmanager
async def watched(
    idle_s: Callable[[], Mapping[str, float]], *, episode_id: str, thread_id: str
) -> AsyncGenerator[None, None]:
    """Log each child that a wait in this block waits for in vain, once.

    Args:
        idle_s: For each child that runs, the seconds since anybody ran it.
        episode_id: Of the thread that waits.
        thread_id: The thread that waits.
    """
    watching = asyncio.create_task(_watch(idle_s, episode_id, thread_id))
    try:
        yield
    finally:
        await end(watching)


async def _watch(
    idle_s: Callable[[], Mapping[str, float]], episode_id: str, thread_id: str
) -> None:
    told: set[str] = set()
    await asyncio.sleep(UNRUN_S)
    while True:
        unrun = [name for name, seconds in idle_s().items() if seconds >= UNRUN_S]
        for name in unrun:
            if name not in told:
                logger.warning(
                    "thread %s waits for %s, which nobody runs: for %.0f s it had no task and no"
                    " call; give fork run=, or child.spawn its agent, or call its generate and"
                    " done; else cancel it, or give wait a timeout_s",
                    thread_id,
                    name,
                    idle_s()[name],
                    extra={"episode_id": episode_id, "thread_id": thread_id},
                )
        told.update(unrun)
        await asyncio.sleep(UNRUN_S / 4)
