"""Pools, footprints and forecasts that have seen many episodes, for tests of the gate."""

from __future__ import annotations

from collections.abc import Sequence

from rollout_service.engine.base import EngineStats
from rollout_service.engine.dry import DRY_INFO
from rollout_service.sessions.forecast import Footprint, Forecast


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
