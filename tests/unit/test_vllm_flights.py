"""One computation for all who wait: whoever leaves, the rest get it, and nothing stays behind."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest

from rollout_service.cursors import Cursor, child_cursor
from rollout_service.engine.vllm.flights import Flights
from rollout_service.engine.vllm.footing import Footing, FootingStore


class Bench:
    """A store whose footings come from runs that the test ends."""

    def __init__(self) -> None:
        self.store = FootingStore()
        self.flights = Flights(self.store, self.release)
        self.num_runs = 0
        self.num_cancelled = 0
        self.freed: list[int] = []
        self.end = asyncio.Event()

    async def release(self, cursors: Sequence[Cursor]) -> None:
        self.freed += self.store.release(cursors)

    async def compute(self, owner: Cursor) -> None:
        self.num_runs += 1
        residency = self.num_runs
        try:
            await self.end.wait()
        except asyncio.CancelledError:
            self.num_cancelled += 1
            raise
        self.store.put(0, owner, Footing(parent=residency, num_rows=3, is_own=True), False)

    def join(self, cursor: Cursor) -> asyncio.Task[None]:
        return asyncio.create_task(self.flights.join(0, cursor, False, self.compute))


def root() -> Cursor:
    return child_cursor(None, (1, 2, 3, 4), mounts=(), policy_version=0)


@pytest.mark.parametrize("leaving", [(), (0,), (0, 1), (2,)])
async def test_identical_roots_share_one_run_whoever_leaves(leaving: tuple[int, ...]) -> None:
    bench = Bench()
    roots = [root() for _ in range(4)]
    tasks = [bench.join(cursor) for cursor in roots]
    await asyncio.sleep(0)
    for index in leaving:
        tasks[index].cancel()
    await asyncio.sleep(0)
    bench.end.set()
    await asyncio.gather(*tasks, return_exceptions=True)
    assert (bench.num_runs, bench.num_cancelled) == (1, 0)
    staying = [cursor for index, cursor in enumerate(roots) if index not in leaving]
    assert all(bench.store.get(0, cursor, False) for cursor in staying)
    assert len(bench.store) == len(staying)
    for cursor in staying:
        assert not bench.freed
        await bench.release([cursor])
    assert bench.freed == [1]
    assert len(bench.store) == 0


async def test_a_run_that_nobody_waits_for_ends_and_the_next_begins_anew() -> None:
    bench = Bench()
    tasks = [bench.join(root()) for _ in range(2)]
    await asyncio.sleep(0)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    assert (bench.num_runs, bench.num_cancelled, len(bench.store)) == (1, 1, 0)
    bench.end.set()
    await bench.join(root())
    assert (bench.num_runs, len(bench.store)) == (2, 1)


async def test_a_cursor_with_a_parent_holds_its_footing_itself() -> None:
    bench = Bench()
    cursor = child_cursor(root(), (5, 6), mounts=(), policy_version=0)
    tasks = [bench.join(cursor) for _ in range(3)]
    await asyncio.sleep(0)
    tasks[0].cancel()
    bench.end.set()
    await asyncio.gather(*tasks, return_exceptions=True)
    assert (bench.num_runs, len(bench.store), bench.freed) == (1, 1, [])
