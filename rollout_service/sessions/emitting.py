"""A call that tells what happens on its way, as one asynchronous stream."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Coroutine
from typing import Any


async def emitted(
    start: Callable[[Callable[[Any], None]], Coroutine[Any, Any, Any]],
) -> AsyncGenerator[Any, None]:
    """What `start` emits as it happens, then what it returns; closing cancels it."""
    events: asyncio.Queue[Any] = asyncio.Queue()
    task = asyncio.ensure_future(start(events.put_nowait))

    def ended(_: object) -> None:
        # Retrieved here, for whoever is cancelled twice leaves before the end.
        _ = task.cancelled() or task.exception()
        events.put_nowait(None)

    task.add_done_callback(ended)
    try:
        while (event := await events.get()) is not None:
            yield event
        yield task.result()
    finally:
        if not task.done():
            task.cancel()
            await asyncio.wait([task])
