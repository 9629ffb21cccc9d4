"""What the gate expects the open episodes to take at the fullest moment to come."""

from __future__ import annotations

from dataclasses import replace

import pytest

from rollout_service.engine.dry import DRY_INFO
from rollout_service.sessions.forecast import Forecast
from tests.forecast_cases import footprint, growing, pool, settled


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


def test_whole_pages_of_little_are_not_learned_from() -> None:
    forecast = settled(100, growing(0))
    forecast.ending(pool(500, 10_000), growing(10))
    assert forecast.peak_use(pool(0, 10_000), growing(0)) == pytest.approx(200 / 10_000)


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
