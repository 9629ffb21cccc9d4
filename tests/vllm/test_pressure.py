"""A small pool: eviction, rebuilding, waiting for room, refusal; and residency handed over."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from harness_sdk.errors import ResourceExhausted
from rollout_service.cursors import Cursor, child_cursor
from tests.engine_cases import Play, span
from tests.reference import Reference
from tests.vllm.conftest import Served, serve
from tests.vllm.models import HYBRIDS, servable_model

pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.slow]

NUM_PAGES = 12


@pytest_asyncio.fixture(scope="module", loop_scope="session", params=["qwen3", "granitemoehybrid"])
async def tight(request: pytest.FixtureRequest, servable_folder: Path) -> AsyncIterator[Served]:
    """A pool of `NUM_PAGES` pages, and of as many states where the family has them."""
    page = 256 if request.param in HYBRIDS else 32
    async for served in serve(
        servable_folder, request.param, max_tokens=NUM_PAGES * page, max_states=NUM_PAGES
    ):
        assert served.engine.info.page_tokens == page
        yield served


@pytest_asyncio.fixture(loop_scope="session")
async def play(tight: Served) -> AsyncIterator[Play]:
    reference = Reference(servable_model(tight.family), tight.engine.info.mount_layers)
    yield Play(engine=tight.engine, reference=reference, rng=random.Random(5))
    await tight.engine.forget_all()
    assert tight.engine.stats().tokens_resident == 0


async def test_pressure_evicts_and_rebuilds_exactly(play: Play) -> None:
    engine, page = play.engine, play.engine.info.page_tokens
    size = 2 * page + 5
    roots = [await play.extend(None, size) for _ in range(9)]
    stats = engine.stats()
    assert stats.resident_cursors < len(roots)
    assert stats.tokens_resident <= stats.tokens_capacity
    # The oldest was evicted, the newest was not.
    before = engine.stats().tokens_computed
    play.check(await play.extend(roots[-1], 3))
    assert engine.stats().tokens_computed - before == 3
    evicted = engine.stats().tokens_recomputed["eviction"]
    play.check(await play.extend(roots[0], 3))
    assert engine.stats().tokens_recomputed["eviction"] - evicted == size - 1


async def test_mount_after_eviction_of_everything(play: Play) -> None:
    page = play.engine.info.page_tokens
    root = await play.extend(None, page - 3)
    producer = await play.turn(await play.extend(root, 20), 12, seed=1)
    reader = await play.extend(root, 6)
    for _ in range(8):
        await play.extend(None, 2 * page + 1)
    mounted = await play.extend(reader, 5, span(producer, 2, 15))
    play.check(mounted, await play.turn(mounted, 4, seed=2))


async def test_newcomers_wait_for_room_and_what_runs_is_kept(play: Play) -> None:
    engine, page = play.engine, play.engine.info.page_tokens
    producer = await play.extend(None, 2 * page)
    reader = await play.extend(None, page, span(producer, 3, 2 * page - 1))
    turns = [asyncio.create_task(play.turn(reader, page + 9, seed=seed)) for seed in range(2)]
    while engine.stats().running < 2:
        await asyncio.sleep(0.001)
    newcomers = [asyncio.create_task(play.extend(None, 4 * page)) for _ in range(3)]
    await engine.evict([producer, reader])
    play.check(*[await turn for turn in turns])
    play.check(*[await newcomer for newcomer in newcomers])


@pytest.mark.parametrize("tight", ["qwen3"], indirect=True)
async def test_what_can_never_fit_is_refused(play: Play) -> None:
    engine = play.engine
    capacity = engine.stats().tokens_capacity
    assert capacity == NUM_PAGES * engine.info.page_tokens < engine.info.max_positions
    root = await play.extend(None, 20)
    with pytest.raises(ResourceExhausted, match=f"allowed: {capacity} tokens"):
        await play.extend(None, capacity + 2)
    with pytest.raises(ResourceExhausted, match=f"allowed: {capacity} tokens"):
        await play.turn(root, capacity, seed=1)
    play.check(await play.extend(root, 20))


async def test_a_turn_without_its_last_token_keeps_its_residency(play: Play) -> None:
    engine = play.engine
    root = await play.extend(None, 25)
    turn = await play.turn(root, 6, seed=1)
    shorter = child_cursor(
        turn.parent,
        turn.token_ids[:-1],
        mounts=turn.mounts,
        policy_version=turn.policy_version,
        sampled=turn.sampled[:-1],
        sampled_logprobs=turn.sampled_logprobs[:-1],
    )
    resident, computed = engine.stats().resident_cursors, engine.stats().tokens_computed
    await engine.hand_over(turn, shorter)
    assert engine.stats().resident_cursors == resident
    children = [await _extend_unscored(play, shorter, (4, 5, 6)), await play.turn(shorter, 3)]
    # Nothing of the turn again: two tokens of one child, three and two of the other's turn.
    assert engine.stats().tokens_computed - computed == 2 + 3 + 2
    play.check(children[1])
    again = await play.extend(children[0], 2)
    mounted = await play.extend(root, 3, span(shorter, 1, 8))
    play.check(again, mounted)


async def _extend_unscored(play: Play, parent: Cursor, tokens: tuple[int, ...]) -> Cursor:
    return await play.engine.extend(parent, tokens, mounts=parent.mounts, policy_version=0)
