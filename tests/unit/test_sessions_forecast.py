"""The gate looks at the fullest moment to come, so a burst of episodes does not flood the pool."""

from __future__ import annotations

import asyncio
import random
import statistics
from collections import deque
from collections.abc import Sequence
from dataclasses import replace

import pytest

from harness_sdk.errors import Unavailable
from harness_sdk.record import EpisodeRecord
from rollout_service.cursors import Cursor
from rollout_service.engine.base import EngineStats
from rollout_service.engine.dry import DRY_INFO
from rollout_service.sessions import OpenRequest
from rollout_service.sessions.forecast import Footprint, Forecast
from tests.session_cases import Bench, ScriptedEngine

GATE = 0.75
CURSOR_TOKENS = 1848.0
"""Of a hybrid: half a page of 528 tokens and three states."""


def pool(tokens_resident: float, capacity: int) -> EngineStats:
    return EngineStats(
        resident_cursors=0,
        recurrent_slots=0,
        tokens_resident=int(tokens_resident),
        tokens_capacity=capacity,
        running=0,
        tokens_computed=0,
        tokens_recomputed={},
        tokens_sampled=0,
    )


def footprint(
    num_tokens: int, num_cursors: int = 1, *, num_threads: int = 1, is_growing: bool = True
) -> Footprint:
    return Footprint(
        num_tokens=num_tokens,
        num_cursors=num_cursors,
        num_threads=num_threads,
        is_growing=is_growing,
    )


def test_what_went_with_an_engine_process_teaches_nothing() -> None:
    held = [footprint(50_000) for _ in range(6)]
    forecast = settled(100_000, held)
    before = forecast.peak_use(pool(300_000, 1_000_000), held)
    assert before == pytest.approx(0.65)
    for stats in (
        replace(pool(0, 1_000_000), is_serving=False),
        replace(pool(0, 1_000_000), restarts=1),
    ):
        for _ in range(20):
            forecast.ending(stats, held)
            assert forecast.peak_use(stats, held) == before
    # Those that began since do.
    held = [replace(each, num_restarts=1) for each in held]
    forecast.ending(replace(pool(150_000, 1_000_000), restarts=1), held)
    assert forecast.peak_use(replace(pool(150_000, 1_000_000), restarts=1), held) < before


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


def growing(*tokens: int) -> list[Footprint]:
    return [footprint(num) for num in tokens]


def settled(num_tokens: int, open_episodes: Sequence[Footprint]) -> Forecast:
    """A forecast that expects `num_tokens` of an episode beside `open_episodes`."""
    forecast = Forecast(DRY_INFO, num_tokens)
    for _ in range(63):
        forecast.ended(footprint(num_tokens))
    # What is open counts as seen: take it out again.
    forecast.ended(footprint(num_tokens - sum(episode.num_tokens for episode in open_episodes)))
    return forecast


@pytest.mark.parametrize(
    ("tokens", "peak"),
    [
        ((), 0.0),
        ((0,), 200),
        ((0, 0), 300),
        ((0, 50, 90), 200),
        ((100, 100), 300),
        ((99, 99, 99), 301),
        ((30, 60), 40 + 70 + 100),
        ((10, 20, 90, 95), 80 + 90 + 100),
    ],
)
def test_peak_is_that_of_the_fullest_moment(tokens: tuple[int, ...], peak: int) -> None:
    open_episodes = growing(*tokens)
    forecast = settled(100, open_episodes)
    found = forecast.peak_use(pool(sum(tokens), 300), open_episodes)
    assert found == pytest.approx(peak / 300)


def test_idle_episodes_stay_as_they_are() -> None:
    forecast = Forecast(DRY_INFO, 100)
    idle = [footprint(60, is_growing=False)] * 2
    assert forecast.peak_use(pool(120, 300), idle) == 0.4
    beside = [*idle, *growing(0)]
    final = forecast.expected_size(beside)
    assert forecast.peak_use(pool(120, 300), beside) == pytest.approx((120 + 2 * final) / 300)


def test_cursors_take_room_beside_their_tokens() -> None:
    hybrid = replace(DRY_INFO, cursor_tokens=25.0)
    # 32 cursors of an episode of which nothing is known, then 4 of each that has ended.
    assert Forecast(hybrid, 100).expected_size([]) == 100 + 32 * 25
    forecast = Forecast(hybrid, 100)
    for _ in range(64):
        forecast.ended(footprint(60, 4))
    assert forecast.expected_size([]) == 60 + 4 * 25
    assert forecast.peak_use(pool(0, 400), [footprint(0, 0)]) == pytest.approx(2 * 160 / 400)


def test_what_episodes_take_beyond_that_is_learned_from_the_pool() -> None:
    open_episodes = growing(50, 50, 50, 50)
    forecast = settled(100, open_episodes)
    found = 0.0
    for _ in range(200):
        # Two hundred tokens take twice their share: so will what comes.
        found = forecast.peak_use(pool(400, 1000), open_episodes)
    assert found == pytest.approx(2 * 450 / 1000, rel=0.01)
    # A pool that evicts tells nothing, and one that has been emptied forgets nothing.
    for use in (1000, 0):
        forecast.peak_use(pool(use, 1000), growing(10))
    assert forecast.peak_use(pool(0, 1000), growing(0)) == pytest.approx(
        2 * 2 * forecast.expected_size(growing(0)) / 1000, rel=0.01
    )


def test_long_episodes_are_expected_before_the_first_of_them_ends() -> None:
    forecast = Forecast(DRY_INFO, 100)
    for _ in range(4):
        forecast.ended(footprint(50))
    assert forecast.expected_size(growing(400, 400)) == (4 * 50 + 800) / 4


def simulate(
    forecast: Forecast | None, seed: int, *, cursor_tokens: float = 0.0, mean: float = 600
) -> list[float]:
    """Pool use over time, a thousand episodes waiting from the start; None admits by use alone.

    A cursor for each forty tokens; a hundred clients at a time.
    """
    rng, capacity, per_cursor = random.Random(seed), 30_000, 40
    waiting, uses = 1000, []
    running: list[list[float]] = []

    def taken(tokens: float) -> float:
        return tokens + tokens // per_cursor * cursor_tokens

    while waiting or running:
        while waiting and len(running) < 100:
            use = min(sum(taken(tokens) for tokens, _, _ in running), capacity)
            peak = use / capacity
            if forecast is not None:
                open_ = [footprint(int(t), int(t // per_cursor)) for t, _, _ in running]
                peak = forecast.peak_use(pool(use, capacity), open_)
            if peak > GATE and running:
                break
            waiting -= 1
            running.append([0.0, mean * rng.lognormvariate(-0.32, 0.8), 20 * rng.uniform(0.5, 1.5)])
        for episode in running:
            episode[0] += episode[2]
        for tokens, _, _ in (each for each in running if each[0] >= each[1]):
            if forecast is not None:
                forecast.ended(footprint(int(tokens), int(tokens // per_cursor)))
        running = [each for each in running if each[0] < each[1]]
        uses.append(sum(taken(tokens) for tokens, _, _ in running) / capacity)
    return uses


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("cursor_tokens", [0.0, 8.0, 40.0])
def test_a_thousand_waiting_episodes_hold_the_pool_below_the_gate(
    seed: int, cursor_tokens: float
) -> None:
    mean = 600 / (1 + cursor_tokens / 40)
    forecast = Forecast(replace(DRY_INFO, cursor_tokens=cursor_tokens), 512)
    uses = simulate(forecast, seed, cursor_tokens=cursor_tokens, mean=mean)
    assert statistics.quantiles(uses, n=10)[-1] < 0.76
    assert max(uses) < 1
    # And it is used: an idle pool would pass the lines above.
    assert statistics.median(uses) > 0.5


@pytest.mark.parametrize("seed", range(2))
def test_room_that_nobody_told_of_is_found_out(seed: int) -> None:
    # Three times what the forecast is told, as where cursors are held twice.
    uses = simulate(Forecast(DRY_INFO, 512), seed, cursor_tokens=80.0, mean=200)
    later = uses[len(uses) // 4 :]
    assert statistics.quantiles(later, n=10)[-1] < 0.8


def simulate_trees(
    forecast: Forecast,
    seed: int,
    *,
    num_episodes: int = 64,
    interval: int = 0,
    untold: float = 1.0,
) -> list[float]:
    """Pool use over time under episodes that fork ten branches each; one comes every `interval`.

    All grow alike, to about 45,000 tokens and 150 cursors, and take `untold` times what these
    should; without that the pool holds ten.
    """
    rng, num_cursors, capacity = random.Random(seed), 150, 450_000 + 1500 * int(CURSOR_TOKENS)
    waiting, time, uses = deque[float](), 0, []
    lengths = [rng.uniform(0.8, 1.2) for _ in range(num_episodes)]
    running: list[list[float]] = []

    def seen(grown: float) -> Footprint:
        return footprint(int(45_000 * grown), int(num_cursors * grown), num_threads=11)

    def taken() -> float:
        sizes = [seen(grown) for grown, _ in running]
        told = sum(each.num_tokens + CURSOR_TOKENS * each.num_cursors for each in sizes)
        return untold * told

    while lengths or waiting or running:
        while lengths and (not interval or time % interval == 0):
            waiting.append(lengths.pop())
            if interval:
                break
        stats = pool(taken(), capacity)
        while waiting:
            open_ = [seen(grown) for grown, _ in running]
            if running and forecast.peak_use(stats, open_) > GATE:
                break
            running.append([0.0, waiting.popleft()])
        for episode in running:
            episode[0] += 0.01
        uses.append(taken() / capacity)
        for episode in [each for each in running if each[0] >= each[1]]:
            forecast.ending(pool(taken(), capacity), [seen(grown) for grown, _ in running])
            running.remove(episode)
            forecast.ended(seen(episode[0]))
        time += 1
    return uses


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("interval", [0, 5, 40])
def test_trees_that_begin_together_or_not_hold_the_pool_below_the_gate(
    seed: int, interval: int
) -> None:
    hybrid = replace(DRY_INFO, cursor_tokens=CURSOR_TOKENS)
    uses = simulate_trees(Forecast(hybrid, 8192), seed, interval=interval)
    assert max(uses) <= 0.76
    # Ten fit in, a hundred moments each: with three quarters of the pool in use all the time they
    # take 850 moments, or as long as they take to come.
    assert len(uses) < max(1050, 64 * interval + 130)


@pytest.mark.parametrize("seed", range(3))
def test_a_burst_is_held_by_what_was_learned_while_nobody_waited(seed: int) -> None:
    forecast = Forecast(replace(DRY_INFO, cursor_tokens=CURSOR_TOKENS), 8192)
    simulate_trees(forecast, seed, num_episodes=4, untold=1.4)
    assert max(simulate_trees(forecast, seed + 1, untold=1.4)) <= 0.8


def test_whole_pages_of_little_are_not_learned_from() -> None:
    forecast = settled(100, growing(0))
    forecast.ending(pool(500, 10_000), growing(10))
    assert forecast.peak_use(pool(0, 10_000), growing(0)) == pytest.approx(200 / 10_000)


def test_a_gate_on_use_alone_lets_them_flood_it() -> None:
    assert max(simulate(None, 0)) > 1.3


def test_only_a_few_begin_before_it_is_known_what_they_take() -> None:
    forecast = Forecast(DRY_INFO, 100)
    trees = [footprint(0, num_threads=10)] * 4
    assert forecast.expected_size(growing(0, 0, 0, 0)) == 100
    assert forecast.expected_size(trees[:3]) == 100
    assert forecast.expected_size([*growing(0, 0, 0), trees[0]]) == 1000
    for _ in range(4):
        forecast.ended(footprint(250))
    assert forecast.expected_size(trees) == 250


def test_a_pool_that_evicts_is_not_learned_from() -> None:
    held = [footprint(100_000) for _ in range(6)]
    forecast = settled(200_000, held)
    before = forecast.peak_use(pool(600_000, 1_000_000), held)
    for _ in range(20):
        # What is missing may have been evicted.
        forecast.ending(pool(960_000, 1_000_000), [footprint(400_000) for _ in range(6)])
    assert forecast.peak_use(pool(600_000, 1_000_000), held) == before


def test_what_is_taken_now_counts_where_more_is_than_was_expected() -> None:
    held = [footprint(1_000)]
    forecast = settled(1_000, held)
    assert forecast.peak_use(pool(800_000, 1_000_000), held) >= 0.8


def test_little_is_not_learned_from_while_it_grows() -> None:
    begun = [footprint(20_000)]
    forecast = settled(100_000, begun)
    before = forecast.peak_use(pool(20_000, 1_000_000), begun)
    for _ in range(20):
        # As much again is being computed.
        forecast.peak_use(pool(40_000, 1_000_000), begun)
    assert forecast.peak_use(pool(20_000, 1_000_000), begun) == before


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
