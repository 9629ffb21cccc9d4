"""The vLLM engine's block registry, over a pool of its own: no vLLM needed."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Iterable
from dataclasses import dataclass, field

import pytest

from rollout_service.engine.vllm.plan import AttachPlan, RowSpan, plan_from_wire
from rollout_service.engine.vllm.registry import CursorRegistry
from rollout_service.engine.vllm.residency import Block, Group

PAGE = 4


@dataclass(eq=False, slots=True)
class FakeBlock:
    block_id: int
    ref_cnt: int = 0


@dataclass(slots=True)
class Pool:
    """Hands out blocks in order and checks what comes back."""

    size: int
    free: list[Block] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.free = [FakeBlock(number) for number in range(self.size)]

    def get_num_free_blocks(self) -> int:
        return len(self.free)

    def get_new_blocks(self, num_blocks: int) -> list[Block]:
        assert num_blocks <= len(self.free)
        taken, self.free = self.free[:num_blocks], self.free[num_blocks:]
        for block in taken:
            block.ref_cnt = 1
        return taken

    def free_blocks(self, ordered_blocks: Iterable[Block]) -> None:
        for block in ordered_blocks:
            block.ref_cnt -= 1
            assert block.ref_cnt >= 0
            if not block.ref_cnt:
                self.free.append(block)


def new_registry(
    size: int = 64, *, hybrid: bool = True, num_mount_free: int = 0
) -> tuple[CursorRegistry, Pool]:
    pool = Pool(size)
    groups = [Group(is_recurrent=False, page_rows=PAGE)]
    groups += [Group(is_recurrent=False, page_rows=PAGE, reads_mounts=False)] * num_mount_free
    if hybrid:
        groups.append(Group(is_recurrent=True, page_rows=1 << 20))
    return CursorRegistry(groups, pool), pool


def new_plan(
    parent: int | None,
    num_rows: int,
    *mounts: RowSpan,
    num_inherited: int = 0,
    keep_as: int | None = None,
) -> AttachPlan:
    return AttachPlan(
        parent=parent,
        mounts=mounts,
        num_rows=num_rows,
        num_mounted=num_inherited + sum(span.num_rows for span in mounts),
        offset=0,
        keep_as=keep_as,
    )


def run(
    registry: CursorRegistry,
    pool: Pool,
    plan: AttachPlan,
    keep_as: int,
    count: int,
    version: int = 0,
) -> None:
    """What the scheduler does with a request that computes `count` rows."""
    plan = dataclasses.replace(plan, keep_as=keep_as)
    registry.pin(plan.reads())
    tables = registry.attach(plan)
    for group, table in zip(registry.groups, tables, strict=True):
        if not group.is_recurrent:
            num_pages = group.num_pages(group.num_rows(plan) + count)
            table += pool.get_new_blocks(max(num_pages - len(table), 0))
    registry.keep(plan, tables, plan.num_rows + count, version)
    registry.unpin(plan.reads())


def test_child_shares_full_pages_and_copies_the_partial_one_and_the_state() -> None:
    registry, pool = new_registry()
    run(registry, pool, new_plan(None, 0), 1, 10)
    registry.take_copies()
    free = pool.get_num_free_blocks()
    plan = new_plan(1, 10)
    assert registry.num_new_blocks(plan) == 2
    registry.pin(plan.reads())
    pages, states = registry.attach(plan)
    assert [block.ref_cnt for block in pages] == [2, 2, 1]
    assert pool.get_num_free_blocks() == free - 2
    copies = registry.take_copies()
    assert [copy[0] for copy in copies.blocks] == [0, 1]
    assert copies.blocks[0][2] == pages[2].block_id
    assert copies.blocks[1][2] == states[0].block_id
    assert not copies.rows and not copies.zeroed


def test_mounted_full_pages_come_first_and_edges_are_copied_by_row() -> None:
    registry, pool = new_registry(hybrid=False)
    run(registry, pool, new_plan(None, 0), 1, 6)
    run(registry, pool, new_plan(None, 0), 2, 20)
    mount = RowSpan(residency=2, begin=2, end=15)
    plan = new_plan(1, 6 + 13, mount)
    free = pool.get_num_free_blocks()
    assert registry.num_new_blocks(plan) == 2
    (table,) = registry.attach(plan)
    # Pages 1 and 2 of the producer, page 0 of the parent, then its partial page and the edges.
    assert [block.ref_cnt for block in table] == [2, 2, 2, 1, 1]
    assert free - pool.get_num_free_blocks() == 2
    rows = registry.take_copies().rows
    assert [(row[2], row[4], row[5]) for row in rows] == [(2, 2, 2), (0, 0, 3)]
    assert [row[3] for row in rows] == [table[3].block_id, table[4].block_id]


@pytest.mark.parametrize(("begin", "end"), [(0, 4), (1, 3), (3, 5), (3, 6), (4, 12), (1, 9)])
def test_every_mounted_row_is_attached_once(begin: int, end: int) -> None:
    registry, pool = new_registry(hybrid=False)
    run(registry, pool, new_plan(None, 0), 1, 14)
    registry.take_copies()
    source = {block.block_id: index for index, block in enumerate(registry._held[1].blocks[0])}
    (table,) = registry.attach(
        new_plan(None, end - begin, RowSpan(residency=1, begin=begin, end=end))
    )
    shared = [source[block.block_id] for block in table if block.ref_cnt == 2]
    rows = [page * PAGE + row for page in shared for row in range(PAGE)]
    for _, block, first, _, _, count in registry.take_copies().rows:
        rows += range(source[block] * PAGE + first, source[block] * PAGE + first + count)
    assert sorted(rows) == list(range(begin, end))


def test_groups_without_mounts_have_the_parents_rows_alone() -> None:
    registry, pool = new_registry(hybrid=False, num_mount_free=1)
    run(registry, pool, new_plan(None, 0), 1, 6)
    run(registry, pool, new_plan(None, 0), 2, 20)
    registry.take_copies()
    reader = new_plan(1, 6 + 13, RowSpan(residency=2, begin=2, end=15))
    free = pool.get_num_free_blocks()
    # The mount's two edges beside the partial page in one group, the partial page in the other.
    assert registry.num_new_blocks(reader) == 2 + 1
    run(registry, pool, reader, 3, 3)
    # 22 rows: three pages shared, three of its own; 9 rows: a page shared, two of its own.
    assert free - pool.get_num_free_blocks() == 3 + 2
    copies = registry.take_copies()
    assert [copy[0] for copy in copies.blocks] == [0, 1]
    assert {copy[0] for copy in copies.rows} == {0}

    # A child inherits 22 rows in one group and 9 in the other; a second mount comes on top.
    child = new_plan(3, 22 + 2, RowSpan(residency=2, begin=15, end=17), num_inherited=13)
    mounting, mount_free = registry.attach(child)
    assert [block.ref_cnt for block in mounting] == [3, 3, 3, 2, 2, 1]
    assert [block.ref_cnt for block in mount_free] == [3, 2, 1]
    (partial,) = [copy for copy in registry.take_copies().blocks if copy[0] == 1]
    assert partial == (1, registry._held[3].blocks[1][2].block_id, mount_free[2].block_id)


def test_blocks_of_another_version_are_counted() -> None:
    registry, pool = new_registry()
    run(registry, pool, new_plan(None, 0), 1, 8)
    run(registry, pool, new_plan(None, 0), 2, 9, version=1)
    plan = new_plan(1, 14, RowSpan(residency=2, begin=0, end=6))
    # Three pages and a state of the second; two pages and a state of the first.
    assert registry.num_foreign_blocks(plan, 0) == 3 + 1
    assert registry.num_foreign_blocks(plan, 1) == 2 + 1
    assert registry.num_foreign_blocks(new_plan(2, 9), 1) == 0


def test_release_waits_for_the_last_reader() -> None:
    registry, pool = new_registry()
    run(registry, pool, new_plan(None, 0), 1, 8)
    plan = new_plan(1, 8)
    registry.pin(plan.reads())
    registry.release([1])
    registry.evict([1])
    assert not registry.evictions()["evicted"]
    assert not registry.make_room(1000)
    assert registry.missing(plan) == []
    registry.unpin(plan.reads())
    assert registry.missing(plan) == [1]
    assert pool.get_num_free_blocks() == pool.size


def test_pressure_evicts_the_least_recently_used_and_reports_it() -> None:
    registry, pool = new_registry(size=8)
    for residency in (1, 2):
        run(registry, pool, new_plan(None, 0), residency, 8)
    registry.pin([1])
    registry.unpin([1])
    assert registry.make_room(3)
    assert registry.evictions() == {"evicted": [2], "num_evicted": 1}
    assert len(registry) == 1


def test_evictions_are_told_until_they_are_confirmed() -> None:
    registry, pool = new_registry()
    for residency in (1, 2, 3):
        run(registry, pool, new_plan(None, 0), residency, 2)
    registry.evict([1, 2])
    assert registry.evictions() == registry.evictions() == {"evicted": [1, 2], "num_evicted": 2}
    registry.confirm(1)
    registry.evict([3, 2])
    assert registry.evictions() == {"evicted": [2, 3], "num_evicted": 3}
    # Confirmations may come late.
    registry.confirm(0)
    assert registry.evictions()["evicted"] == [2, 3]
    registry.confirm(3)
    assert registry.evictions() == {"evicted": [], "num_evicted": 3}


@pytest.mark.parametrize("num_mount_free", [0, 2])
def test_random_use_returns_every_block(num_mount_free: int) -> None:
    registry, pool = new_registry(size=8000, num_mount_free=num_mount_free)
    rng = random.Random(0)
    rows: dict[int, int] = {}
    mounted: dict[int | None, int] = {None: 0}
    for number in range(1, 300):
        parent = rng.choice([None, *rows]) if rows else None
        mounts: list[RowSpan] = []
        for source in rng.sample(sorted(rows), min(len(rows), rng.randrange(3))):
            begin = rng.randrange(rows[source])
            mounts.append(
                RowSpan(residency=source, begin=begin, end=rng.randint(begin + 1, rows[source]))
            )
        num_rows = (rows[parent] if parent else 0) + sum(span.num_rows for span in mounts)
        plan = new_plan(parent, num_rows, *mounts, num_inherited=mounted[parent])
        free = pool.get_num_free_blocks()
        expected = registry.num_new_blocks(plan)
        registry.pin(plan.reads())
        tables = registry.attach(plan)
        registry.unpin(plan.reads())
        assert free - pool.get_num_free_blocks() == expected
        assert len(tables[0]) == -(-num_rows // PAGE)
        for table in tables[1:-1]:
            assert len(table) == -(-(num_rows - plan.num_mounted) // PAGE)
        for table in tables:
            pool.free_blocks(table)
        run(registry, pool, plan, number, 3)
        rows[number], mounted[number] = num_rows + 3, plan.num_mounted
        if rng.random() < 0.5:
            gone = rng.choice(sorted(rows))
            registry.release([gone])
            del rows[gone]
        while len(rows) > 12:
            registry.release([min(rows)])
            del rows[min(rows)]
    registry.release(list(rows))
    assert pool.get_num_free_blocks() == pool.size
    assert all(block.ref_cnt == 0 for block in pool.free)


def test_plan_survives_the_wire() -> None:
    plan = AttachPlan(
        parent=3,
        mounts=(RowSpan(residency=1, begin=2, end=9),),
        num_rows=20,
        num_mounted=9,
        offset=7,
        keep_as=5,
    )
    assert plan_from_wire({"octopus": plan.to_wire()}) == plan
    assert plan_from_wire({"other": 1}) is None
    assert plan_from_wire(None) is None
