"""What a residency holds, and the KV cache groups and blocks that it holds it in.

Knows no vLLM class: a block has `block_id` and `ref_cnt`, the pool hands blocks out and takes them
back.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

from rollout_service.engine.vllm.plan import AttachPlan, RowSpan


class Block(Protocol):
    """A KV page, or a recurrent state's slot, of the pool."""

    block_id: int
    ref_cnt: int


class BlockPool(Protocol):
    """Where blocks come from."""

    def get_num_free_blocks(self) -> int:
        """Blocks that nobody holds."""
        ...

    def get_new_blocks(self, num_blocks: int) -> list[Block]:
        """Take blocks, each with one reference."""
        ...

    def free_blocks(self, ordered_blocks: Iterable[Block]) -> None:
        """Drop one reference of each."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """One KV cache group: layers that share a block table."""

    is_recurrent: bool
    page_rows: int
    """Rows of a page; meaningless where the group is recurrent."""
    reads_mounts: bool = True
    """Whether mounted rows stand in its tables; meaningless where the group is recurrent."""

    def num_rows(self, holder: AttachPlan | Residency) -> int:
        """Rows in the group's table of a plan or residency."""
        return holder.num_rows - (0 if self.reads_mounts else holder.num_mounted)

    def num_pages(self, num_rows: int) -> int:
        """Pages that hold so many rows."""
        return -(-num_rows // self.page_rows)

    def spans(self, plan: AttachPlan) -> tuple[RowSpan, ...]:
        """What the plan mounts here."""
        return plan.mounts if self.reads_mounts else ()


@dataclass(eq=False, slots=True)
class Residency:
    """What a cursor holds in the core."""

    blocks: list[list[Block]]
    """For each group: a block table over its rows, or the one state block."""
    num_rows: int
    num_mounted: int
    """Rows among them that only groups which read mounts have."""
    version: int = 0
    """Policy version that computed it."""
    num_pins: int = 0
    is_doomed: bool = False
    """Released while pinned: goes with its last reader."""
