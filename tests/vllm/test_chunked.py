"""Prefills in chunks among decodes: plans, scores and shared roots over many steps."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from rollout_service.cursors import Cursor
from rollout_service.engine.base import Engine, EngineStats
from tests.engine_cases import Play, span
from tests.reference import Reference
from tests.vllm.conftest import Served, serve
from tests.vllm.models import servable_model

pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.slow]

TOKENS_PER_STEP = 48
"""No multiple of a page, of a fragment or of a recurrence's chunk."""


@pytest_asyncio.fixture(scope="module", loop_scope="session", params=["granitemoehybrid", "qwen3"])
async def chunked(request: pytest.FixtureRequest, servable_folder: Path) -> AsyncIterator[Served]:
    """An engine whose steps hold few tokens."""
    async for served in serve(
        servable_folder,
        request.param,
        vllm_arguments={"max_num_batched_tokens": TOKENS_PER_STEP},
    ):
        yield served


@pytest_asyncio.fixture(loop_scope="session")
async def play(chunked: Served) -> AsyncIterator[Play]:
    engine = chunked.engine
    reference = Reference(servable_model(chunked.family), engine.info.mount_layers)
    yield Play(engine=engine, reference=reference, rng=random.Random(41))
    await engine.forget_all()
    stats = engine.stats()
    assert (stats.running, stats.resident_cursors, stats.tokens_resident) == (0, 0, 0)


async def under_way(
    engine: Engine, extends: Callable[[], list[Coroutine[Any, Any, Cursor]]]
) -> tuple[EngineStats, list[asyncio.Task[Cursor]]]:
    """Tasks of prefills that have some of their steps behind them, and the figures before.

    On a busy machine they may have ended before that is seen: then anew.
    """
    while True:
        before = engine.stats()
        tasks = [asyncio.create_task(extend) for extend in extends()]
        while engine.stats().tokens_resident < before.tokens_resident + 4 * TOKENS_PER_STEP:
            await asyncio.sleep(0.002)
        has_ended = engine.stats().tokens_computed > before.tokens_computed
        if not has_ended and not any(task.done() for task in tasks):
            return before, tasks
        await engine.release(await asyncio.gather(*tasks))


async def test_plans_over_many_steps_equal_the_oracle(play: Play) -> None:
    root = await play.extend(None, 3 * TOKENS_PER_STEP + 7)
    running = [asyncio.create_task(play.turn(root, 40, seed=seed)) for seed in range(3)]
    producer = await play.extend(root, 2 * TOKENS_PER_STEP + 1)
    parent = await play.extend(root, TOKENS_PER_STEP)
    readers = await asyncio.gather(
        *(play.extend(parent, 100 + n, span(producer, n, 90)) for n in range(3))
    )
    turns = await asyncio.gather(
        *(play.turn(reader, 6, seed=4, prompt=play.tokens(70)) for reader in readers)
    )
    play.check(root, producer, parent, *readers, *turns, *await asyncio.gather(*running))


async def test_a_cancelled_prefill_leaves_nothing_and_the_rest_go_on(play: Play) -> None:
    engine = play.engine
    root = await play.extend(None, 20)
    running = asyncio.create_task(play.turn(root, 30, seed=2))
    _, (prefill,) = await under_way(engine, lambda: [play.extend(root, 1500)])
    prefill.cancel()
    with pytest.raises(asyncio.CancelledError):
        await prefill
    turn = await running
    play.check(turn, await play.extend(root, 60))
    await engine.release([turn])


@pytest.mark.parametrize("cancelled", [(), (0,), (0, 3, 7), tuple(range(8))])
async def test_a_groups_roots_are_one_prefill_though_some_leave(
    play: Play, cancelled: tuple[int, ...]
) -> None:
    engine, tokens = play.engine, play.tokens(1500)
    before, tasks = await under_way(
        engine,
        lambda: [engine.extend(None, tokens, mounts=(), policy_version=0) for _ in range(8)],
    )
    for index in cancelled:
        tasks[index].cancel()
    done = await asyncio.gather(*tasks, return_exceptions=True)
    assert [isinstance(r, asyncio.CancelledError) for r in done] == [
        index in cancelled for index in range(8)
    ]
    roots = [result for result in done if not isinstance(result, BaseException)]
    assert engine.stats().tokens_computed - before.tokens_computed == (1499 if roots else 0)
    assert engine.stats().resident_cursors - before.resident_cursors == len(roots)
    # Each episode computes what it adds: nothing of the root.
    turns = await asyncio.gather(*(play.turn(root, 2, seed=n) for n, root in enumerate(roots)))
    added = len(roots) * (1 + 3 + 1)
    assert engine.stats().tokens_computed - before.tokens_computed - added == (1499 if roots else 0)
    await engine.release([*roots, *turns])
    assert engine.stats().tokens_resident == before.tokens_resident
    assert engine.stats().resident_cursors == before.resident_cursors
