"""Scheduler side: which blocks each residency holds, who reads them, and what may be evicted.

Lives in the engine core's process and knows no vLLM class.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from typing import Any

from rollout_service.engine.vllm.copies import Copies
from rollout_service.engine.vllm.plan import AttachPlan, RowSpan
from rollout_service.engine.vllm.residency import Block, BlockPool, Group, Residency


class CursorRegistry:
    """Residencies by id, least recently used first."""

    def __init__(self, groups: Sequence[Group], pool: BlockPool) -> None:
        """Register over `pool`; `groups` are the model's KV cache groups in order."""
        self.groups = tuple(groups)
        self._pool = pool
        self._held: OrderedDict[int, Residency] = OrderedDict()
        self._evicted: list[int] = []
        self._num_heard = 0
        """Evictions before those, of which the host has confirmed to know."""
        self.copies = Copies()

    def __len__(self) -> int:
        return len(self._held)

    @property
    def page_rows(self) -> int:
        """Rows of an attention page."""
        return next(group.page_rows for group in self.groups if not group.is_recurrent)

    @property
    def blocks_per_page(self) -> int:
        """Blocks that a page's rows take: one in each attention group."""
        return sum(not group.is_recurrent for group in self.groups)

    def missing(self, plan: AttachPlan) -> list[int]:
        """Residencies that the plan reads and that are gone."""
        return self.absent(plan.reads())

    def absent(self, residency_ids: Iterable[int]) -> list[int]:
        """Those of `residency_ids` that are not held."""
        return [residency_id for residency_id in residency_ids if residency_id not in self._held]

    def pin(self, residency_ids: Iterable[int]) -> None:
        """Keep residencies, all of them held, until `unpin`."""
        for residency_id in residency_ids:
            self._held[residency_id].num_pins += 1
            self._held.move_to_end(residency_id)

    def unpin(self, residency_ids: Iterable[int]) -> None:
        """Undo one `pin`; what was released meanwhile goes now."""
        for residency_id in residency_ids:
            residency = self._held[residency_id]
            residency.num_pins -= 1
            self._held.move_to_end(residency_id)
            if residency.is_doomed and not residency.num_pins:
                self._drop(residency_id)

    def keep(
        self, plan: AttachPlan, blocks: list[list[Block]], num_rows: int, version: int = 0
    ) -> None:
        """Own a finished request's blocks: no copy, and the running state is the checkpoint."""
        residency = Residency(blocks, num_rows, plan.num_mounted, version)
        for group, table in zip(self.groups, blocks, strict=True):
            num_used = 1 if group.is_recurrent else group.num_pages(group.num_rows(residency))
            assert len(table) >= num_used
            self._pool.free_blocks(reversed(table[num_used:]))
            del table[num_used:]
        assert plan.keep_as is not None and plan.keep_as not in self._held
        self._held[plan.keep_as] = residency

    def release(self, residency_ids: Iterable[int]) -> None:
        """Drop residencies; pinned ones go with their last reader."""
        for residency_id in residency_ids:
            residency = self._held.get(residency_id)
            if residency is None:
                continue
            if residency.num_pins:
                residency.is_doomed = True
            else:
                self._drop(residency_id)

    def evict(self, residency_ids: Iterable[int]) -> None:
        """Drop the residencies that no request reads."""
        for residency_id in residency_ids:
            if residency_id in self._held and not self._held[residency_id].num_pins:
                self._evict(residency_id)

    def make_room(self, num_blocks: int) -> bool:
        """Evict by least recent use until `num_blocks` are free; False where that cannot be."""
        while self._pool.get_num_free_blocks() < num_blocks:
            oldest = next((r for r, held in self._held.items() if not held.num_pins), None)
            if oldest is None:
                return False
            self._evict(oldest)
        return True

    def take_copies(self) -> Copies:
        """What the workers must copy before the step being scheduled."""
        copies, self.copies = self.copies, Copies()
        return copies

    def evictions(self) -> dict[str, Any]:
        """Residencies evicted that the host may not know of yet, and how many were so far.

        Told again in every report until confirmed: the report of a request that was aborted, or
        that ended with an error, reaches nobody.
        """
        return {
            "evicted": list(self._evicted),
            "num_evicted": self._num_heard + len(self._evicted),
        }

    def confirm(self, num_evicted: int) -> None:
        """The host knows of the first `num_evicted` evictions."""
        num_more = max(num_evicted - self._num_heard, 0)
        del self._evicted[:num_more]
        self._num_heard += num_more

    def num_new_blocks(self, plan: AttachPlan) -> int:
        """Blocks that `attach` will take from the pool."""
        count, parent = 0, self._parent(plan)
        for group in self.groups:
            if group.is_recurrent:
                count += 1
                continue
            num_shared = sum(end - begin for begin, end in _full_pages(plan, group))
            num_shared += 0 if parent is None else group.num_rows(parent) // group.page_rows
            count += group.num_pages(group.num_rows(plan)) - num_shared
        return count

    def attach(self, plan: AttachPlan) -> list[list[Block]]:
        """Block tables over everything that the plan shows a new request.

        The index space is `[full mounted pages | the parent's rows | mounted fragments]`: full
        pages are shared by reference, the parent's partial page and the fragments are copied.
        A key carries its own rotary position, so the order of rows does not matter. A group that
        does not read mounts has the parent's rows without those that were mounted.
        """
        return [
            self._attach_state(plan, index)
            if group.is_recurrent
            else self._attach_rows(plan, index, group)
            for index, group in enumerate(self.groups)
        ]

    def num_foreign_blocks(self, plan: AttachPlan, version: int) -> int:
        """Blocks of what `plan` reads that another version than `version` computed: none, ever."""
        foreign = [self._held[r] for r in plan.reads() if self._held[r].version != version]
        return sum(len(table) for residency in foreign for table in residency.blocks)

    def usage(self) -> dict[str, int]:
        """Residencies held and recurrent states among their blocks."""
        num_recurrent = sum(group.is_recurrent for group in self.groups)
        return {"residencies": len(self._held), "states": len(self._held) if num_recurrent else 0}

    def _parent(self, plan: AttachPlan) -> Residency | None:
        return None if plan.parent is None else self._held[plan.parent]

    def _attach_state(self, plan: AttachPlan, index: int) -> list[Block]:
        """A private state block: the parent's checkpoint copied, or zero under mounts alone."""
        parent = self._parent(plan)
        (block,) = self._pool.get_new_blocks(1)
        if parent is not None:
            self.copies.blocks.append((index, parent.blocks[index][0].block_id, block.block_id))
        else:
            self.copies.zeroed.append((index, block.block_id))
        return [block]

    def _attach_rows(self, plan: AttachPlan, index: int, group: Group) -> list[Block]:
        table: list[Block] = []
        pieces: list[tuple[list[Block], int, int]] = []
        for span, (begin, end) in zip(group.spans(plan), _full_pages(plan, group), strict=True):
            source = self._held[span.residency].blocks[index]
            table += source[begin:end]
            pieces += [(source, b, e) for b, e in _fragments(span, begin, end, group.page_rows)]
        parent = self._parent(plan)
        num_tail, tail = 0, None
        if parent is not None:
            num_full, num_tail = divmod(group.num_rows(parent), group.page_rows)
            table += parent.blocks[index][:num_full]
            tail = parent.blocks[index][num_full] if num_tail else None
        for block in table:
            block.ref_cnt += 1
        num_shared = len(table)
        fresh = self._pool.get_new_blocks(group.num_pages(group.num_rows(plan)) - num_shared)
        table += fresh
        if tail is not None:
            self.copies.blocks.append((index, tail.block_id, fresh[0].block_id))
        row = num_shared * group.page_rows + num_tail
        for source, begin, end in pieces:
            row = self._copy_rows(index, group.page_rows, source, (begin, end), table, row)
        assert row == group.num_rows(plan)
        return table

    def _copy_rows(
        self,
        index: int,
        page: int,
        source: list[Block],
        rows: tuple[int, int],
        table: list[Block],
        row: int,
    ) -> int:
        """Queue a fragment's rows for copying to `row` of `table`; returns the row after them."""
        begin, end = rows
        while begin < end:
            count = min(end - begin, page - begin % page, page - row % page)
            self.copies.rows.append(
                (
                    index,
                    source[begin // page].block_id,
                    begin % page,
                    table[row // page].block_id,
                    row % page,
                    count,
                )
            )
            begin += count
            row += count
        return row

    def _evict(self, residency_id: int) -> None:
        self._evicted.append(residency_id)
        self._drop(residency_id)

    def _drop(self, residency_id: int) -> None:
        residency = self._held.pop(residency_id)
        for table in residency.blocks:
            self._pool.free_blocks(reversed(table))


def _full_pages(plan: AttachPlan, group: Group) -> list[tuple[int, int]]:
    """For each span mounted in the group the pages `[begin, end)` that lie wholly inside it."""
    pages = []
    for span in group.spans(plan):
        begin, end = -(-span.begin // group.page_rows), span.end // group.page_rows
        pages.append((begin, max(begin, end)))
    return pages


def _fragments(span: RowSpan, begin: int, end: int, page: int) -> list[tuple[int, int]]:
    """Rows of a span outside its full pages `[begin, end)`: at most two runs."""
    if end <= begin:
        middle = begin * page
        if not span.begin < middle < span.end:
            return [(span.begin, span.end)]
        return [(span.begin, middle), (middle, span.end)]
    edges = [(span.begin, begin * page), (end * page, span.end)]
    return [(first, last) for first, last in edges if first < last]
