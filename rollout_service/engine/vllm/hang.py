"""Notices an engine process that runs and does not answer; what then becomes of it is not its own.

The core answers between two steps, so a long step only delays its answer.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

_MAX_PAUSE_S = 15.0
_LATE_S = 1.0
"""A timer so late tells of this process, not of the other: it was stopped, or had no processor."""


class HangWatch:
    """Asks again and again, and tells once that an answer did not come.

    Args:
        ask: Asks what a process answers that does not hang; an error is an answer too.
        on_hung: Called once where it did not come; the watch is over then.
        timeout_s: That an answer may take.
    """

    def __init__(
        self,
        ask: Callable[[], Awaitable[object]],
        on_hung: Callable[[], Awaitable[None]],
        timeout_s: float,
    ) -> None:
        self._ask = ask
        self._on_hung = on_hung
        self._timeout_s = timeout_s
        self._watching = asyncio.create_task(self._watch())

    def cancel(self) -> None:
        """Ask no more."""
        self._watching.cancel()

    async def _watch(self) -> None:
        while await self._answers():
            await asyncio.sleep(min(self._timeout_s / 4, _MAX_PAUSE_S))
        await self._on_hung()

    async def _answers(self) -> bool:
        loop = asyncio.get_running_loop()
        asked = asyncio.ensure_future(self._ask())
        try:
            is_late = True
            while is_late and not asked.done():
                until_s = loop.time() + self._timeout_s
                await asyncio.wait([asked], timeout=self._timeout_s)
                # The answer may have come, with nobody here to read it.
                is_late = loop.time() > until_s + _LATE_S
            return asked.done()
        finally:
            asked.cancel()
