"""Host side of the vLLM engine: footings, and the gate of rebuilds; no vLLM needed."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from harness_sdk.errors import Unavailable
from harness_sdk.types import SamplingOptions, StructuredOutput
from rollout_service.cursors import Cursor, Mount, child_cursor
from rollout_service.engine.vllm.footing import Footing, FootingStore, hides_mounts, new_mounts
from rollout_service.engine.vllm.gate import RebuildGate, call_number
from rollout_service.engine.vllm.plan import RowSpan
from rollout_service.engine.vllm.turn import Turn


def new_cursor(parent: Cursor | None, *tokens: int, mounts: tuple[Mount, ...] = ()) -> Cursor:
    return child_cursor(parent, tokens, mounts=mounts, policy_version=0)


def own(residency: int, num_rows: int) -> Footing:
    return Footing(parent=residency, num_rows=num_rows, is_own=True)


def test_plan_turns_a_position_into_an_offset() -> None:
    footing = own(4, 10).with_mounts([RowSpan(residency=2, begin=3, end=9)])
    plan = footing.plan(position=40, keep_as=7)
    assert (plan.num_rows, plan.offset, plan.parent, plan.keep_as) == (16, 24, 4, 7)
    assert footing.reads() == {4, 2}
    # What stays hidden from layers without mounts is inherited with the rows.
    after = Footing.after(plan, 5)
    assert after == Footing(parent=7, num_rows=21, num_mounted=6, is_own=True)
    assert (
        after.with_mounts([RowSpan(residency=9, begin=1, end=3)])
        .plan(position=50, keep_as=None)
        .num_mounted
        == 8
    )


def test_identical_roots_share_until_the_last_owner_goes() -> None:
    store = FootingStore()
    one, other = new_cursor(None, 1, 2), new_cursor(None, 1, 2)
    assert store.put(0, one, own(1, 1), complete=False) == []
    assert store.get(0, other, complete=False) == own(1, 1)
    assert store.get(1, other, complete=False) is None
    assert store.put(0, other, own(2, 1), complete=False) == [2]
    assert len(store) == 2
    assert store.release([one]) == []
    assert store.release([other]) == [1]
    assert store.get(0, new_cursor(None, 1, 2), complete=False) is None


def test_what_is_forgotten_leaves_nothing_behind() -> None:
    store = FootingStore()
    root, heir, child = new_cursor(None, 1, 2), new_cursor(None, 1, 2), new_cursor(None, 9)
    store.put(0, root, own(1, 1), complete=False)
    store.put(0, root, own(2, 2), complete=True)
    store.put(0, child, own(2, 2).with_mounts([RowSpan(residency=1, begin=0, end=1)]), False)
    assert store.get(0, heir, complete=True) == own(2, 2)
    # The first owner lets go; what the other holds stays.
    assert store.release([root]) == []
    assert store.get(0, heir, complete=False) == own(1, 1)
    store.forget([1])
    assert sorted([*store.release([heir]), *store.release([child])]) == [2]
    kept = ("_entries", "_roots", "_readers", "_gone")
    assert not [name for name in kept if getattr(store, name)]


def test_eviction_takes_what_rests_on_it() -> None:
    store = FootingStore()
    root, child = new_cursor(None, 1, 2), new_cursor(None, 9)
    store.put(0, root, own(1, 1), complete=False)
    store.put(0, root, own(2, 2), complete=True)
    resting = Footing(parent=2, num_rows=2).with_mounts([RowSpan(residency=5, begin=0, end=1)])
    store.put(0, child, resting, complete=False)
    store.forget([5])
    assert store.get(0, child, complete=False) is None
    assert store.gone_by(0, child) == "eviction" and not store.gone_by(0, root)
    store.forget([1])
    assert store.get(0, root, complete=True) == own(2, 2)
    assert not store.gone_by(0, root)
    store.forget([2])
    assert store.gone_by(0, root) == "eviction"
    assert len(store) == 0


def test_shorter_turn_takes_over_what_trails_the_turn() -> None:
    store = FootingStore()
    root = new_cursor(None, 1, 2)
    turn, shorter = new_cursor(root, 3, 4, 5), new_cursor(root, 3, 4)
    store.put(0, turn, own(1, 4), complete=False)
    store.put(0, turn, own(2, 5), complete=True)
    assert store.hand_over(turn, shorter) == [2]
    assert store.get(0, shorter, complete=True) == own(1, 4)
    assert store.get(0, turn, complete=False) is None
    assert store.release([shorter]) == [1]


def test_new_mounts_are_those_the_parent_does_not_see() -> None:
    source = new_cursor(None, 1, 2, 3)
    first, second = (Mount(source=source, begin=b, end=b + 1) for b in (0, 1))
    parent = new_cursor(None, 4, mounts=(first,))
    again = Mount(source=source, begin=0, end=1)
    child = new_cursor(parent, 5, mounts=(again, second))
    assert new_mounts(child) == [second]
    assert not hides_mounts(child)
    assert hides_mounts(new_cursor(parent, 5, mounts=(second,)))


async def test_nobody_begins_while_one_is_alone() -> None:
    gate, order = RebuildGate(), []

    async def late() -> None:
        async with gate.entered():
            order.append("late")

    async with gate.entered():
        async with gate.alone():
            assert gate.is_closed
            assert not await gate.another_end()
            task = asyncio.create_task(late())
            await asyncio.sleep(0)
            order.append("alone")
        await task
    assert order == ["alone", "late"]


async def test_one_that_is_alone_waits_for_those_that_run() -> None:
    gate, running = RebuildGate(), asyncio.Event()

    async def run() -> None:
        async with gate.entered():
            await running.wait()

    task = asyncio.create_task(run())
    await asyncio.sleep(0)
    async with gate.entered(), gate.alone():
        waiting = asyncio.create_task(gate.another_end())
        await asyncio.sleep(0)
        assert not waiting.done() and not gate.has_one
        running.set()
        await waiting
        assert gate.has_one
        await gate.another_end()
    await task


async def test_two_that_want_to_be_alone_do_not_wait_for_each_other() -> None:
    gate, order = RebuildGate(), []

    async def rebuild(name: str) -> None:
        async with gate.entered(), gate.alone():
            await gate.another_end()
            assert gate.has_one
            order.append(name)

    async with asyncio.timeout(5):
        await asyncio.gather(rebuild("one"), rebuild("other"))
    assert sorted(order) == ["one", "other"]


async def test_what_a_call_asks_for_carries_its_number() -> None:
    gate = RebuildGate()
    numbers: list[tuple[str, int]] = []

    async def ask(name: str) -> None:
        numbers.append((name, call_number.get()))

    async def call(name: str) -> None:
        async with gate.entered():
            await asyncio.sleep(0)
            await asyncio.create_task(ask(name))
            async with gate.alone():
                await asyncio.create_task(ask(name))

    await asyncio.gather(*(call(name) for name in "abc"))
    assert dict(numbers) == {"a": 1, "b": 2, "c": 3}
    assert len(set(numbers)) == 3, "a call that comes again keeps its place"


def test_a_store_knows_what_went_with_the_process_before() -> None:
    before, store = FootingStore(), FootingStore()
    evicted, kept, turn = new_cursor(None, 1, 2), new_cursor(None, 3, 4), new_cursor(None, 5, 6)
    for residency, cursor in enumerate((evicted, kept, turn), 1):
        before.put(0, cursor, own(residency, 1), complete=False)
    older = new_cursor(None, 7, 8)
    before.put(3, older, own(4, 1), complete=False)
    before.forget([1])
    store.succeed(before)
    # Given back before anything was computed under its version again.
    assert store.gone_by(3, older) == "restart" and store.release([older]) == []
    assert not store.gone_by(3, older)
    assert len(store) == 0 and store.get(0, kept, complete=False) is None
    told = [store.gone_by(0, cursor) for cursor in (evicted, kept, turn)]
    assert told == ["eviction", "restart", "restart"]
    # Computed again it is there; a turn's part takes over what was known of the turn.
    store.put(0, kept, own(1, 1), complete=False)
    shorter = new_cursor(None, 5)
    assert store.hand_over(turn, shorter) == []
    assert not store.gone_by(0, kept) and not store.gone_by(0, turn)
    assert store.gone_by(0, shorter) == "restart"
    assert store.release([evicted, kept, shorter]) == [1]
    assert not store._gone


def new_turn(num_sampled: int, **options: Any) -> Turn:
    turn = Turn(
        prompt=new_cursor(None, 1),
        sampling=SamplingOptions(**options),
        stop_token_ids=frozenset(),
        max_tokens=9,
    )
    for token in range(num_sampled):
        turn.take(token, -1.0)
    return turn


@pytest.mark.parametrize(
    ("options", "resumes"),
    [
        ({}, True),
        ({"seed": 3, "temperature": 0.0}, True),
        ({"seed": 3}, False),
        ({"stop": ("x",)}, False),
        ({"structured": StructuredOutput(regex="a+")}, False),
    ],
)
def test_a_turn_is_sampled_on_only_where_that_is_what_was_asked_for(
    options: dict[str, Any], resumes: bool
) -> None:
    new_turn(0, **options).check_resumes()
    begun = new_turn(4, **options)
    assert begun.vllm_sampling()["max_tokens"] == 5
    if resumes:
        begun.check_resumes()
        return
    with pytest.raises(Unavailable, match="4 tokens sampled") as caught:
        begun.check_resumes()
    assert caught.value.retryable
