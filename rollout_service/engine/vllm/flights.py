"""Footings being computed, each once for everybody who needs it at a time."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass, field

from rollout_service.cursors import Cursor, child_cursor
from rollout_service.engine.vllm.footing import FootingStore, is_root

_Key = tuple[int, int | tuple[int, ...], bool]


@dataclass(eq=False, slots=True)
class _Flight:
    task: asyncio.Task[None]
    owner: Cursor
    """Holds the footing while somebody waits; identical roots have one of their own, for any of
    those who wait may leave."""
    waiters: list[Cursor] = field(default_factory=list)


class Flights:
    """Runs under way, by version, cursor (or a root's tokens) and kind of footing."""

    def __init__(
        self, store: FootingStore, release: Callable[[Sequence[Cursor]], Awaitable[None]]
    ) -> None:
        """Fill `store`; `release` gives up what a cursor holds."""
        self._store = store
        self._release = release
        self._flights: dict[_Key, _Flight] = {}

    async def join(
        self,
        version: int,
        cursor: Cursor,
        complete: bool,
        compute: Callable[[Cursor], Coroutine[None, None, None]],
    ) -> None:
        """Wait until the store has a cursor's footing; cancelled with the last who waits.

        Args:
            version: Policy version.
            cursor: Whose footing; an identical root's does as well.
            complete: Which of the two footings.
            compute: Makes it for the cursor that it is given.
        """
        key = (version, cursor.token_ids if is_root(cursor) else cursor.cursor_id, complete)
        flight = self._flights.get(key)
        if flight is None:
            owner = cursor if not is_root(cursor) else _twin(cursor)
            flight = self._flights[key] = _Flight(asyncio.create_task(compute(owner)), owner)
            flight.task.add_done_callback(lambda task: self._land(key, task))
        flight.waiters.append(cursor)
        try:
            await asyncio.shield(flight.task)
            # Takes a share in an identical root before its owner goes.
            self._store.get(version, cursor, complete)
        finally:
            flight.waiters.remove(cursor)
            if not flight.waiters:
                await asyncio.shield(self._leave(key, flight, cursor))

    async def cancel(self) -> None:
        """End all of them."""
        tasks = [flight.task for flight in self._flights.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _leave(self, key: _Key, flight: _Flight, last: Cursor) -> None:
        """Nobody waits any more."""
        if not flight.task.done():
            self._flights.pop(key, None)
            flight.task.cancel()
            await asyncio.wait([flight.task])
        if flight.owner is not last:
            await self._release([flight.owner])

    def _land(self, key: _Key, task: asyncio.Task[None]) -> None:
        flight = self._flights.get(key)
        if flight is not None and flight.task is task:
            del self._flights[key]


def _twin(root: Cursor) -> Cursor:
    """An identical root that nobody else knows."""
    return child_cursor(None, root.token_ids, mounts=(), policy_version=root.policy_version)
