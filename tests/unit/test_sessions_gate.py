"""Openings that wait at the gate until what the open episodes will take leaves room."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace

import pytest

from harness_sdk.errors import Unavailable
from harness_sdk.record import EpisodeRecord
from rollout_service.cursors import Cursor
from rollout_service.sessions import OpenRequest
from tests.session_cases import Bench, ScriptedEngine


async def test_an_episode_knows_after_how_many_restarts_it_began(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine = ScriptedEngine()
    bench, stats = Bench(engine), engine.stats
    first = await bench.open()
    monkeypatch.setattr(engine, "stats", lambda: replace(stats(), restarts=2))
    bench.episode_id = "f"
    second = await bench.open()
    assert [each.footprint().num_restarts for each in (first, second)] == [0, 2]


async def test_a_burst_of_openings_waits_for_what_the_first_will_take() -> None:
    engine = ScriptedEngine()
    engine.kv_use = 0.0
    # Three tenths of the pool each, as far as anybody knows.
    bench = Bench(engine=engine, admission_poll_s=0.001, thread_budget=300_000)
    opened: list[str] = []

    async def enter(name: str) -> None:
        await bench.sessions.open(OpenRequest(episode_id=name))
        opened.append(name)

    tasks = [asyncio.ensure_future(enter(name)) for name in "abcdefg"]
    await asyncio.sleep(0.05)
    assert opened == ["a", "b"]
    bench.episode_id = "a"
    await bench.say()
    await bench.close()
    # It took next to nothing, so the next are expected to take half of what was thought.
    await asyncio.sleep(0.05)
    assert opened == list("abcde")
    await bench.sessions.shutdown()
    for task in tasks[5:]:
        with pytest.raises(Unavailable):
            await task


class SlowEngine(ScriptedEngine):
    """Gives back what is released a moment later, as another process does."""

    async def release(self, cursors: Sequence[Cursor]) -> None:
        await asyncio.sleep(0.001)
        await super().release(cursors)


def slow_bench() -> Bench:
    """Of a small pool, all of which episodes may take."""
    engine = SlowEngine(max_tokens=4_000)
    limits = {"thread_budget": 200, "answer_reserve": 10, "max_threads": 0}
    return Bench(engine, chat=None, admission_kv_use=1.0, admission_poll_s=0.001, **limits)


async def closed_together(bench: Bench, names: str) -> float:
    """Open and close episodes of one turn; returns what each took of the pool."""
    for bench.episode_id in names:
        await bench.open()
        await bench.say()
    size = bench.engine.stats().tokens_resident / len(names)
    await asyncio.gather(*(bench.sessions.close(name) for name in names))
    return size


async def num_admitted(bench: Bench) -> int:
    """Of a burst that is far larger than the pool."""
    burst = [
        asyncio.create_task(bench.sessions.open(OpenRequest(episode_id=f"burst-{number}")))
        for number in range(500)
    ]
    await asyncio.sleep(0.3)
    count = sum(task.done() for task in burst)
    await bench.sessions.shutdown()
    await asyncio.gather(*burst, return_exceptions=True)
    return count


async def test_episodes_that_close_together_are_learned_from_as_others() -> None:
    bench = slow_bench()
    size = await closed_together(bench, "abcd")
    assert await num_admitted(bench) == int(4_000 / size)


async def test_closed_episodes_whose_records_wait_are_not_taken_for_residents(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    bench = slow_bench()
    size = await closed_together(bench, "abcd")
    is_back = asyncio.Event()

    async def write(record: EpisodeRecord) -> str:
        await is_back.wait()
        return record.episode_id

    monkeypatch.setattr(bench.sink, "write", write)
    closing = asyncio.create_task(closed_together(bench, "efgh"))
    await asyncio.sleep(0.1)
    assert bench.engine.stats().tokens_resident == 0 and not closing.done()
    admitting = asyncio.create_task(num_admitted(bench))
    await asyncio.sleep(0.4)
    is_back.set()
    assert await admitting == int(4_000 / size)
    await closing
