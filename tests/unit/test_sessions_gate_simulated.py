"""A burst of many episodes does not flood a simulated pool."""

from __future__ import annotations

import random
import statistics
from collections import deque
from dataclasses import replace

import pytest

from rollout_service.engine.dry import DRY_INFO
from rollout_service.sessions.forecast import Footprint, Forecast
from tests.forecast_cases import footprint, pool

GATE = 0.75
CURSOR_TOKENS = 1848.0
"""Of a hybrid: half a page of 528 tokens and three states."""


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


def test_a_gate_on_use_alone_lets_them_flood_it() -> None:
    assert max(simulate(None, 0)) > 1.3
