"""Replicas, Valkey and trainer killed while a run goes on: nothing is lost, nothing trained twice.

`make chaos` plays the whole: 200 steps beside the same run undisturbed.
"""

from __future__ import annotations

import random
import statistics
from collections import Counter
from pathlib import Path

import pytest

from tests.chaos.world import GROUP_SIZE, Plan, World, chaos_world
from trainer_service.metrics import read_metrics


async def check_nothing_is_lost(world: World, max_steps: int) -> None:
    """Each entry of the stream stands in one checkpoint, or still waits; each told one is there."""
    # First: the runner plays on, as far as its permits go.
    told = {each.entry_id: each.episode_id for each in world.told.outcomes if each.entry_id}
    states = world.checkpoints()
    assert len(states) == max_steps == states[-1]["progress"]["version"]
    entries, unfinished = await world.entries(), await world.unfinished()
    consumed = [entry for state in states for entry in state["feed"]["consumed"]]
    assert max(Counter(consumed).values()) == 1, "an entry was trained twice"
    trained = Counter(entries[entry] for entry in consumed)
    assert max(trained.values()) == 1, "an episode was trained twice"
    # What the agent was told is stored is in the stream under that very entry.
    assert told.items() <= entries.items()
    assert len(told) >= GROUP_SIZE
    # Sent twice, where Redis died between storing and answering: dropped by its episode.
    repeated = len(entries) - len(set(entries.values()))
    missing = set(entries) - set(consumed) - unfinished
    assert len(missing) <= repeated, "an entry is neither trained, nor dropped, nor waiting"
    assert {entries[entry] for entry in missing} <= set(trained)


@pytest.mark.slow
async def test_run_goes_on_where_each_part_is_killed_once(tmp_path: Path) -> None:
    plan = Plan(replicas=frozenset({1}), valkey=frozenset({2}), trainer=frozenset({3}))
    async with chaos_world(tmp_path, max_steps=6, lag=2) as world:
        await plan.carry_out(world, random.Random(0))
        await check_nothing_is_lost(world, 6)


@pytest.mark.soak
@pytest.mark.timeout(3600)
async def test_two_hundred_steps_with_a_kill_every_twenty_end_as_the_undisturbed_run(
    tmp_path: Path,
) -> None:
    steps, lag = 200, 2
    calm = Plan(replicas=frozenset(), valkey=frozenset(), trainer=frozenset())
    storm = Plan(
        replicas=frozenset(range(20, steps, 20)),
        valkey=frozenset({67, 134}),
        trainer=frozenset({50, 100, 150}),
    )
    ends: list[list[float]] = []
    starts: list[float] = []
    for name, plan in (("calm", calm), ("storm", storm)):
        async with chaos_world(tmp_path / name, max_steps=steps, lag=lag) as world:
            await plan.carry_out(world, random.Random(1))
            await check_nothing_is_lost(world, steps)
            figures = read_metrics(world.trainer.config.folder / "metrics.jsonl")
            ends.append([line["reward/mean"] for line in figures[-steps // 4 :]])
            starts.append(statistics.fmean(line["reward/mean"] for line in figures[: steps // 20]))
            failed = sum(each.reward is None for each in world.told.outcomes)
            print(
                f"{name}: reward {starts[-1]:.3f} to {statistics.fmean(ends[-1]):.3f}, "
                f"{len(world.told.outcomes)} episodes, {failed} failed; RSS in MB "
                + ", ".join(f"{k} {v[0]:.0f} to {v[-1]:.0f}" for k, v in world.rss_mb.items())
            )
            _check_memory(world)
    calm_end, storm_end = map(statistics.fmean, ends)
    noise = statistics.stdev(ends[0]) / len(ends[0]) ** 0.5
    assert calm_end > starts[0] + 0.2
    assert storm_end > calm_end - max(4 * noise, 0.05)


def _check_memory(world: World) -> None:
    """The last third holds no more than the second, beyond what one start differs by."""
    for name, values in world.rss_mb.items():
        third = len(values) // 3
        before, after = statistics.median(values[third : 2 * third]), values[2 * third :]
        assert statistics.median(after) < before + 60, (name, before, statistics.median(after))
