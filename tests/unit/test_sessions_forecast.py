"""The gate looks at the fullest moment to come, so a burst of episodes does not flood the pool."""

from __future__ import annotations

import asyncio
import random
import statistics
from collections.abc import Sequence

import pytest

from harness_sdk.errors import Unavailable
from rollout_service.sessions import OpenRequest
from rollout_service.sessions.forecast import Footprint, Forecast
from tests.session_cases import Bench, ScriptedEngine

GATE = 0.75


def growing(*tokens: int) -> list[Footprint]:
    return [Footprint(num_tokens=num, is_growing=True) for num in tokens]


def settled(num_tokens: int, open_episodes: Sequence[Footprint]) -> Forecast:
    """A forecast that expects `num_tokens` of an episode, whatever is open."""
    forecast = Forecast(num_tokens)
    for _ in range(63):
        forecast.ended(num_tokens)
    # What is open counts as seen: take it out again.
    extra = sum(episode.num_tokens for episode in open_episodes)
    forecast.ended(num_tokens - extra)
    return forecast


@pytest.mark.parametrize(
    ("tokens", "peak"),
    [
        ((), 0.0),
        ((0,), 200),
        ((0, 0), 300),
        ((0, 50, 90), 200),
        ((100, 100), 300),
        ((99, 99, 99), 297),
    ],
)
def test_peak_is_that_of_the_fullest_moment(tokens: tuple[int, ...], peak: int) -> None:
    open_episodes = growing(*tokens)
    forecast = settled(100, open_episodes)
    use = sum(tokens) / 300
    assert forecast.peak_use(use, 300, open_episodes) == pytest.approx(peak / 300)


def test_idle_episodes_stay_as_they_are() -> None:
    forecast = Forecast(100)
    idle = [Footprint(num_tokens=60, is_growing=False)] * 2
    assert forecast.peak_use(0.4, 300, idle) == 0.4
    beside = [*idle, *growing(0)]
    final = forecast.expected_tokens(beside)
    assert forecast.peak_use(0.4, 300, beside) == pytest.approx((120 + 2 * final) / 300)


def test_room_that_is_not_tokens_is_learned_from_the_pool() -> None:
    open_episodes = growing(50, 50, 50, 50)
    forecast = settled(100, open_episodes)
    # Two hundred tokens take twice their share: so will what comes.
    assert forecast.peak_use(400 / 1000, 1000, open_episodes) == pytest.approx(2 * 450 / 1000)


def test_long_episodes_are_expected_before_the_first_of_them_ends() -> None:
    forecast = Forecast(100)
    for _ in range(4):
        forecast.ended(50)
    assert forecast.expected_tokens(growing(400, 400)) == (100 + 4 * 50 + 800) / 5


def simulate(forecast: Forecast | None, seed: int, *, num_episodes: int = 1000) -> list[float]:
    """Pool use over time, every episode waiting from the start; None admits by use alone."""
    rng, capacity = random.Random(seed), 30_000
    waiting, uses = num_episodes, []
    running: list[list[float]] = []
    while waiting or running:
        while waiting:
            now = [int(tokens) for tokens, _, _ in running]
            use = peak = min(sum(now) / capacity, 1.0)
            if forecast is not None:
                peak = forecast.peak_use(use, capacity, growing(*now))
            if peak > GATE and running:
                break
            waiting -= 1
            final = 600 * rng.lognormvariate(-0.32, 0.8)
            running.append([0.0, final, 20 * rng.uniform(0.5, 1.5)])
        for episode in running:
            episode[0] += episode[2]
        for _, final, _ in (each for each in running if each[0] >= each[1]):
            if forecast is not None:
                forecast.ended(int(final))
        running = [each for each in running if each[0] < each[1]]
        uses.append(sum(tokens for tokens, _, _ in running) / capacity)
    return uses


@pytest.mark.parametrize("seed", range(4))
def test_a_thousand_waiting_episodes_hold_the_pool_below_the_gate(seed: int) -> None:
    uses = simulate(Forecast(512), seed)
    assert statistics.quantiles(uses, n=10)[-1] < 0.76
    assert max(uses) < 1
    # And it is used: an idle pool would pass the lines above.
    assert statistics.median(uses) > 0.5


def test_a_gate_on_use_alone_lets_them_flood_it() -> None:
    assert max(simulate(None, 0)) > 5


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
