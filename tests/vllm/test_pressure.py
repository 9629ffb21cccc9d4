"""A small pool: eviction, rebuilding, waiting for room, refusal; and residency handed over."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from pathlib import Path
from typing import cast

import pytest
import pytest_asyncio

from harness_sdk.errors import ResourceExhausted
from harness_sdk.types import SamplingOptions
from rollout_service.cursors import Cursor, child_cursor
from rollout_service.engine.base import Engine
from tests.engine_cases import Play, span
from tests.vllm.conftest import Served, clear, cold_engine, new_play, serve
from tests.vllm.episodes import check_against
from tests.vllm.models import HYBRIDS

pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.slow]

NUM_PAGES = 12


@pytest_asyncio.fixture(scope="module", loop_scope="session", params=["qwen3", "granitemoehybrid"])
async def tight(request: pytest.FixtureRequest, servable_folder: Path) -> AsyncIterator[Served]:
    """A pool of `NUM_PAGES` pages, and of as many states where the family has them.

    Prompts are computed in pieces of a few tokens, so that much happens between two of them.
    """
    page = 256 if request.param in HYBRIDS else 32
    async for served in serve(
        servable_folder,
        request.param,
        max_tokens=NUM_PAGES * page,
        max_states=NUM_PAGES,
        vllm_arguments={"max_num_batched_tokens": page // 2},
    ):
        assert served.engine.info.page_tokens == page
        yield served


@pytest_asyncio.fixture(loop_scope="session")
async def play(tight: Served) -> AsyncIterator[Play]:
    yield new_play(tight, seed=5)
    await clear(tight.engine)


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def oracle(tight: Served) -> AsyncIterator[Engine]:
    async for engine in cold_engine(tight):
        yield engine


async def test_pressure_evicts_and_rebuilds_exactly(play: Play, oracle: Engine) -> None:
    engine, page = play.engine, play.engine.info.page_tokens
    size = 2 * page + 5
    roots = [await play.extend(None, size) for _ in range(9)]
    stats = engine.stats()
    assert stats.resident_cursors < len(roots)
    assert stats.tokens_resident <= stats.tokens_capacity
    # The oldest was evicted, the newest was not.
    before = engine.stats().tokens_computed
    await check_against(oracle, await play.extend(roots[-1], 3))
    assert engine.stats().tokens_computed - before == 3
    evicted = engine.stats().tokens_recomputed["eviction"]
    await check_against(oracle, await play.extend(roots[0], 3))
    assert engine.stats().tokens_recomputed["eviction"] - evicted == size - 1


async def test_mount_after_eviction_of_everything(play: Play, oracle: Engine) -> None:
    page = play.engine.info.page_tokens
    root = await play.extend(None, page - 3)
    producer = await play.turn(await play.extend(root, 20), 12, seed=1)
    reader = await play.extend(root, 6)
    for _ in range(8):
        await play.extend(None, 2 * page + 1)
    mounted = await play.extend(reader, 5, span(producer, 2, 15))
    await check_against(oracle, mounted, await play.turn(mounted, 4, seed=2))


async def test_newcomers_wait_for_room_and_what_runs_is_kept(play: Play, oracle: Engine) -> None:
    engine, page = play.engine, play.engine.info.page_tokens
    producer = await play.extend(None, 2 * page)
    reader = await play.extend(None, page, span(producer, 3, 2 * page - 1))
    turns = [asyncio.create_task(play.turn(reader, page + 9, seed=seed)) for seed in range(2)]
    while engine.stats().running < 2:
        await asyncio.sleep(0.001)
    newcomers = [asyncio.create_task(play.extend(None, 4 * page)) for _ in range(3)]
    await engine.evict([producer, reader])
    await check_against(oracle, *[await turn for turn in turns])
    await check_against(oracle, *[await newcomer for newcomer in newcomers])


@pytest.mark.parametrize("tight", ["qwen3"], indirect=True)
async def test_what_can_never_fit_is_refused(play: Play, oracle: Engine) -> None:
    engine = play.engine
    capacity = engine.stats().tokens_capacity
    assert capacity == NUM_PAGES * engine.info.page_tokens < engine.info.max_positions
    root = await play.extend(None, 20)
    with pytest.raises(ResourceExhausted, match=f"allowed: {capacity} tokens"):
        await play.extend(None, capacity + 2)
    with pytest.raises(ResourceExhausted, match=f"allowed: {capacity} tokens"):
        await play.turn(root, capacity, seed=1)
    await check_against(oracle, await play.extend(root, 20))


async def crowd(play: Play) -> list[Cursor]:
    """Parents that leave less than a page for each of three turns once these have begun."""
    engine, page = play.engine, play.engine.info.page_tokens
    has_states = play.family in HYBRIDS
    num_free = NUM_PAGES * (1 + has_states)
    parents = []
    while num_free >= 3 * (2 + has_states):
        # Twelve tokens more and a turn needs another page.
        parents.append(await play.extend(None, 7 * page - 12))
        num_free -= 7 + has_states
    assert engine.stats().tokens_resident == engine.stats().tokens_capacity - num_free * page
    return parents


async def test_preempted_turns_go_on_as_if_undisturbed(play: Play, oracle: Engine) -> None:
    engine, parents = play.engine, await crowd(play)
    plans = [(parents[0], 31), (parents[-1], 25), (parents[0], 28)]

    async def turn(index: int) -> Cursor:
        parent, length = plans[index]
        return await play.turn(parent, length, seed=index)

    alone = [await turn(index) for index in range(3)]
    await engine.release(alone)
    before = engine.stats()
    together: list[Cursor] = []
    # On a busy machine one may have ended before another comes.
    while engine.stats().preemptions == before.preemptions:
        await engine.release(together)
        together = await asyncio.gather(*(turn(index) for index in range(3)))
    after = engine.stats()
    again = {
        cause: count - before.tokens_recomputed[cause]
        for cause, count in after.tokens_recomputed.items()
    }
    assert not again["eviction"], "a parent was let go"
    assert again["preemption"] > 0
    for one, other in zip(alone, together, strict=True):
        assert one.token_ids == other.token_ids
        assert other.sampled_logprobs == pytest.approx(one.sampled_logprobs, abs=5e-6)
    # What they leave is whole too.
    await check_against(oracle, *together, *[await play.extend(each, 3) for each in together])


async def test_preempted_scoring_tells_each_token_once(play: Play, oracle: Engine) -> None:
    engine, parents = play.engine, await crowd(play)
    before = engine.stats().preemptions
    scored: list[Cursor] = []
    began = time.monotonic()
    await engine.release([await play.turn(parents[0], 30, seed=0)])
    turn_s = time.monotonic() - began
    for attempt in range(120):
        turns = [asyncio.create_task(play.turn(parents[0], 30, seed=seed)) for seed in range(2)]
        while engine.stats().running < 2:
            await asyncio.sleep(0)
        # It is the newest, so it gives way when the turns need another page.
        await asyncio.sleep(turn_s * (attempt % 40) / 40)
        scored.append(await play.extend(parents[-1], play.engine.info.page_tokens - 3))
        await engine.release([await turn for turn in turns])
        if engine.stats().preemptions > before:
            break
    assert engine.stats().preemptions > before
    await check_against(oracle, scored[-1], await play.extend(scored[-1], 4))


@pytest.mark.parametrize("tight", ["qwen3"], indirect=True)
async def test_a_turn_waits_for_a_rebuild_that_holds_what_it_needs(
    play: Play, oracle: Engine
) -> None:
    engine, page = play.engine, play.engine.info.page_tokens
    parent = await play.extend(None, 7 * page - 12)
    alone = await play.turn(parent, 60, seed=1)
    await engine.release([alone])
    builder = play.engine._newest()  # type: ignore[attr-defined]
    held_ids = builder.store.residencies_of([await play.extend(None, 3 * page)])
    assert held_ids and not await builder.client.command("pin", held_ids)
    before = engine.stats().preemptions
    turn = asyncio.create_task(play.turn(parent, 60, seed=1))
    while (await builder.client.command("usage"), engine.stats().preemptions)[1] == before:
        assert not turn.done()
        await asyncio.sleep(0.01)
    await asyncio.sleep(0.1)
    assert not turn.done(), "nothing else runs or waits, yet it is not refused"
    await builder.client.command("unpin", held_ids)
    again = await turn
    assert again.token_ids == alone.token_ids
    await check_against(oracle, again)


@pytest.mark.parametrize("tight", ["qwen3"], indirect=True)
async def test_nobody_who_comes_later_begins_before_a_large_request(
    play: Play, oracle: Engine
) -> None:
    engine, page = play.engine, play.engine.info.page_tokens
    num_clients = 4
    root = await play.extend(None, page)
    old = await play.extend(await play.extend(None, 3 * page), 3 * page)
    stop = asyncio.Event()
    began: list[float] = []
    """When each small turn that has ended came."""

    async def client(seed: int) -> None:
        while not stop.is_set():
            came = time.monotonic()
            turn = await play.turn(root, page + 9, seed=seed)
            began.append(came)
            await engine.release([turn])

    clients = [asyncio.create_task(client(seed)) for seed in range(num_clients)]
    try:
        for large in (
            lambda: play.extend(None, 10 * page),
            lambda: play.turn(old, 3 * page, seed=9),
        ):
            await engine.evict([old, *old.ancestors()])
            while len(began) < 2 * num_clients:
                await asyncio.sleep(0.01)
            came = time.monotonic()
            async with asyncio.timeout(120):
                done = await large()
            # Beside it there is room for some, once it runs.
            overtook = sum(at > came for at in began)
            await check_against(oracle, done)
            assert overtook <= 3 * num_clients, f"{overtook} small turns came later, ended before"
            began.clear()
    finally:
        stop.set()
        await asyncio.gather(*clients)


async def test_a_turn_without_its_last_token_keeps_its_residency(
    play: Play, oracle: Engine
) -> None:
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
    await check_against(oracle, children[1])
    again = await play.extend(children[0], 2)
    mounted = await play.extend(root, 3, span(shorter, 1, 8))
    await check_against(oracle, again, mounted)


async def _extend_unscored(play: Play, parent: Cursor, tokens: tuple[int, ...]) -> Cursor:
    return await play.engine.extend(parent, tokens, mounts=parent.mounts, policy_version=0)


@pytest.mark.parametrize("tight", ["qwen3"], indirect=True)
async def test_what_an_aborted_request_has_evicted_is_rebuilt(play: Play, oracle: Engine) -> None:
    engine, page = play.engine, play.engine.info.page_tokens
    chain = [await play.extend(None, 9)]
    while len(chain) < 5:
        chain.append(await play.extend(chain[-1], 2))
    reader = [await play.extend(None, 3) for _ in range(6)][-1]
    before = engine.stats()
    stream = engine.generate(
        reader,
        (5, 6, 7),
        SamplingOptions(max_tokens=NUM_PAGES * page),
        stop_token_ids=frozenset(),
        policy_version=0,
    )
    # Takes more pages than the pool has beside the chain, and is closed before it tells.
    async with aclosing(cast("AsyncGenerator[object]", stream)) as tokens:
        for _ in range(7 * page):
            await anext(tokens)
    await check_against(oracle, await play.extend(chain[-1], 3))
    recomputed = engine.stats().tokens_recomputed["eviction"]
    assert recomputed - before.tokens_recomputed["eviction"] == chain[-1].num_visible - 1


@pytest.mark.parametrize("tight", ["qwen3"], indirect=True)
async def test_what_does_not_fit_at_a_time_is_refused_and_what_does_is_not(
    play: Play, oracle: Engine
) -> None:
    engine, page = play.engine, play.engine.info.page_tokens
    far = await play.extend(None, 4 * page)
    source = await play.extend(await play.extend(None, 5), 4, span(far))
    reader = await play.extend(None, 5 * page)
    everything = [far, source, *source.ancestors(), reader]
    await engine.evict(everything)
    # Nothing but what it keeps for itself is in its way.
    large = await play.extend(None, 8 * page)
    async with asyncio.timeout(60):
        await check_against(oracle, await play.extend(reader, 3, span(source, 1, 3)))
    await engine.evict([*everything, large])
    larger = await play.extend(reader, 4 * page)
    await engine.evict([*everything, larger])
    async with asyncio.timeout(60):
        with pytest.raises(ResourceExhausted):
            await play.extend(larger, 3, span(source, 1, 3))
    await check_against(oracle, await play.extend(larger, 3))


@pytest.mark.parametrize("tight", ["qwen3"], indirect=True)
async def test_eviction_waits_for_who_rebuilds_alone(play: Play) -> None:
    builder = play.engine._newest()  # type: ignore[attr-defined]
    root = await play.extend(None, 9)
    resident = play.engine.stats().resident_cursors
    async with builder._gate.entered(), builder._gate.alone():
        evicting = asyncio.create_task(play.engine.evict([root]))
        await asyncio.sleep(0.05)
        assert not evicting.done() and play.engine.stats().resident_cursors == resident
    await evicting
    assert play.engine.stats().resident_cursors == resident - 1
