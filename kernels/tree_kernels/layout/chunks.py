"""Chunks for the recurrent operators: short runs of rows that continue one another.

Chunks restart only where the tree forks, not at every node.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

if TYPE_CHECKING:
    from tree_kernels.layout.tree import TreeLayout


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ChunkTable:
    """Rows by chunk; chunks are sorted by level, and a level needs the one before it alone.

    Example:
        Trunk of 3 rows, branches of 2 and 1, size 2: `rows=[[0, 1], [2, 6], [3, 4], [5, 6]]`,
        `level_sizes=(1, 1, 2)`, `sources=([0], [0, 0])`; 6 = T marks padding.
    """

    rows: torch.Tensor
    """Row of each slot, T where a chunk is padded, `[NC, C]` int64."""
    slots: torch.Tensor
    """Slot of each row in the flattened table, `[T]` int64."""
    level_sizes: tuple[int, ...]
    """Chunks per level; their sum is NC. Level 0 holds the roots' first chunks alone."""
    sources: tuple[torch.Tensor, ...]
    """For each level but the first: which chunk of the level before it each chunk continues."""

    def gather(self, values: torch.Tensor) -> torch.Tensor:
        """`[T, ...]` to `[NC, C, ...]`; padding reads zeros."""
        return _Gather.apply(values, self.rows, self.slots)

    def scatter(self, values: torch.Tensor) -> torch.Tensor:
        """`[NC, C, ...]` back to `[T, ...]`; padding is dropped."""
        return _Scatter.apply(values, self.rows, self.slots)


class _Gather(torch.autograd.Function):
    """Each row goes to exactly one slot, so the gradient is a gather too: no accumulation."""

    @staticmethod
    def forward(
        ctx: Any, values: torch.Tensor, rows: torch.Tensor, slots: torch.Tensor
    ) -> torch.Tensor:
        ctx.save_for_backward(rows, slots)
        return _padded(values)[rows]

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        _, slots = ctx.saved_tensors
        return grads[0].flatten(0, 1)[slots], None, None


class _Scatter(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, values: torch.Tensor, rows: torch.Tensor, slots: torch.Tensor
    ) -> torch.Tensor:
        ctx.save_for_backward(rows, slots)
        return values.flatten(0, 1)[slots]

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        rows, _ = ctx.saved_tensors
        return _padded(grads[0])[rows], None, None


def _padded(values: torch.Tensor) -> torch.Tensor:
    return torch.cat([values, values.new_zeros(1, *values.shape[1:])])


def default_chunk_size(parents: np.ndarray, cu_seqlens: np.ndarray, device: torch.device) -> int:
    """Rows per chunk: on a GPU few launches count, on a CPU little padding and small solves.

    Measured on one CPU core, forward in float64 and backward in float32: 13,970 rows in runs of 55
    take 0.38 s at 16 and 0.46 s at 32, 13,800 in runs of 69 0.35 and 0.51 s. All in float32, 80,411
    rows in runs of 400 take 5.4 s at 16, 3.9 s at 32 and 5.7 s at 64.
    """
    if device.type != "cpu":
        return 64
    mean = cu_seqlens[-1] / len(_runs(parents, cu_seqlens)[0])
    return 16 if mean <= 128 else 32


def build_chunks(layout: TreeLayout, size: int) -> ChunkTable:
    """Cut the runs between forks into chunks and sort these by level."""
    run_starts, run_parents = _runs(layout.parents, layout.cu_seqlens)
    run_ends = [*run_starts[1:], layout.num_tokens]
    begins: list[int] = []
    ends: list[int] = []
    before: list[int] = []
    last_chunk: list[int] = []
    for start, end, parent in zip(run_starts, run_ends, run_parents, strict=True):
        previous = last_chunk[parent] if parent >= 0 else -1
        for begin in range(start, end, size):
            before.append(previous)
            previous = len(begins)
            begins.append(begin)
            ends.append(min(begin + size, end))
        last_chunk.append(previous)
    return _sorted_by_level(layout, size, np.array(begins), np.array(ends), before)


def _runs(parents: np.ndarray, cu_seqlens: np.ndarray) -> tuple[list[int], list[int]]:
    """First row and parent run of each maximal chain of single children."""
    num_children = np.bincount(parents[parents >= 0], minlength=len(parents))
    run_of: list[int] = []
    starts: list[int] = []
    run_parents: list[int] = []
    for node, parent in enumerate(parents.tolist()):
        if parent >= 0 and num_children[parent] == 1:
            run_of.append(run_of[parent])
            continue
        run_of.append(len(starts))
        starts.append(int(cu_seqlens[node]))
        run_parents.append(run_of[parent] if parent >= 0 else -1)
    return starts, run_parents


def _sorted_by_level(
    layout: TreeLayout, size: int, begins: np.ndarray, ends: np.ndarray, before: list[int]
) -> ChunkTable:
    levels = np.zeros(len(begins), dtype=np.int64)
    for chunk, previous in enumerate(before):
        levels[chunk] = levels[previous] + 1 if previous >= 0 else 0
    order = np.argsort(levels, kind="stable")
    place = np.argsort(order)
    level_sizes = np.bincount(levels)
    level_begins = np.concatenate([[0], np.cumsum(level_sizes)])
    sources = []
    for level in range(1, len(level_sizes)):
        chunks = order[level_begins[level] : level_begins[level + 1]]
        previous = place[np.array(before)[chunks]] - level_begins[level - 1]
        sources.append(layout.tensor(previous))
    rows = begins[order, None] + np.arange(size)[None]
    rows = np.where(rows < ends[order, None], rows, layout.num_tokens)
    slots = np.zeros(layout.num_tokens + 1, dtype=np.int64)
    slots[rows.ravel()] = np.arange(rows.size)
    return ChunkTable(
        rows=layout.tensor(rows),
        slots=layout.tensor(slots[:-1]),
        level_sizes=tuple(level_sizes.tolist()),
        sources=tuple(sources),
    )
