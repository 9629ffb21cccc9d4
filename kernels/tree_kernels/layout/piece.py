"""One piece of a strip as the operators see it, and what it takes from other pieces."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any, TypeVar, cast

import numpy as np
import torch

from tree_kernels.layout.parts import EVERY_KEY, AttentionParts, Grid, build_parts
from tree_kernels.layout.tree import TreeLayout, conv_windows
from tree_kernels.layout.windows import ConvTable

Table = TypeVar("Table")


class PieceLayout:
    """Rows of a strip of which every other row that they see was computed before.

    Attention takes keys of `seen_rows` and then of `rows`; a convolution takes inputs of
    `context_rows` and then of `rows`; a recurrence takes `tree`, whose root k continues row
    `root_parents[k]`, and gives its states behind `end_nodes`, the rows `end_rows`.
    """

    def __init__(self, strip: TreeLayout, rows: np.ndarray) -> None:
        """Take the ascending `rows` of `strip`; on a path they may not skip a row."""
        self.rows = rows
        self.device = strip.device
        self._strip = strip
        self._tables: dict[Hashable, Any] = {}
        self._row_parents = strip.row_parents()
        starts = np.flatnonzero(np.diff(rows, prepend=-2) > 1)
        starts = np.union1d(starts, np.flatnonzero(np.isin(rows, strip.cu_seqlens)))
        above = self._row_parents[rows[starts]]
        segments = np.where(np.isin(above, rows), np.searchsorted(rows, above), -1)
        parents = np.where(segments >= 0, np.searchsorted(starts, segments, side="right") - 1, -1)
        self.tree = TreeLayout.build(
            parents.tolist(), np.diff(starts, append=len(rows)).tolist()
        ).to(strip.device)
        self.root_parents = above[parents < 0]
        """Row before each root, -1 where a path begins, `[R]` int64."""
        last_rows = rows[self.tree.cu_seqlens[1:] - 1]
        outside = np.setdiff1d(np.arange(strip.num_tokens), rows, assume_unique=True)
        ends = np.flatnonzero(np.isin(last_rows, self._row_parents[outside]))
        self.end_nodes: tuple[int, ...] = tuple(ends.tolist())
        """Nodes of `tree` that other pieces continue."""
        self.end_rows = last_rows[ends]
        """Rows that other pieces continue, ascending, int64."""

    @property
    def num_tokens(self) -> int:
        """Rows, n."""
        return len(self.rows)

    @property
    def num_keys(self) -> int:
        """Rows of keys and values that attention takes."""
        return len(self.seen_rows) + len(self.rows)

    @cached_property
    def seen_rows(self) -> np.ndarray:
        """Rows of other pieces that a row sees as ancestors or mounts, ascending, int64."""
        found = [self._strip.ancestor_rows(int(row)) for row in self._root_rows]
        for mount in self._strip.mounts:
            begin, end = np.searchsorted(self.rows, [mount.query_begin, mount.query_end])
            if begin < end:
                found.append(np.arange(mount.key_begin, mount.key_end))
        return np.setdiff1d(np.concatenate(found), self.rows)

    def context_rows(self, width: int) -> np.ndarray:
        """Rows of other pieces in the windows of a convolution, ascending, int64."""
        found = [np.empty(0, dtype=np.int64)]
        above = self.root_parents
        for _ in range(width - 1):
            above = above[above >= 0]
            found.append(above)
            above = self._row_parents[above]
        return np.unique(np.concatenate(found))

    def num_conv_rows(self, width: int) -> int:
        """Rows that a convolution of `width` takes."""
        return len(self.context_rows(width)) + len(self.rows)

    def conv_taps(self, width: int) -> tuple[torch.Tensor, torch.Tensor]:
        """As `TreeLayout.conv_taps`; the outputs of context rows mean nothing."""
        return self._cached(("conv_taps", width), lambda: self._build_conv_taps(width))

    def conv_table(self, width: int) -> ConvTable:
        """As `TreeLayout.conv_table`, of the context rows and then `rows`."""
        return self._cached(
            ("conv_table", width),
            lambda: ConvTable.of(self._taken_parents(width), width, self.device),
        )

    def _build_conv_taps(self, width: int) -> tuple[torch.Tensor, torch.Tensor]:
        rows, windows = conv_windows(self._taken_parents(width), width)
        return self.tree.tensor(rows), self.tree.tensor(windows)

    def _taken_parents(self, width: int) -> np.ndarray:
        """Of the rows that a convolution takes, the place of the row before each."""
        taken = np.concatenate([self.context_rows(width), self.rows])
        return places(self._row_parents[taken], taken)

    def parts(self, *, mounted: bool, grid: Grid = EVERY_KEY) -> AttentionParts:
        """What attention computes; keys count `seen_rows` and then `rows`."""
        mounted = mounted and bool(self._strip.mounts)
        keys = np.concatenate([self.seen_rows, self.rows])
        return self._cached(
            ("parts", mounted, grid),
            lambda: build_parts(
                self._strip, mounted=mounted, grid=grid, queries=self.rows, keys=keys
            ),
        )

    def forget_tables(self) -> None:
        """Drop the operators' index tables; they are built again when asked for."""
        self._tables.clear()
        self.tree = replace(self.tree, _tables={})

    def _cached(self, key: Hashable, build: Callable[[], Table]) -> Table:
        if key not in self._tables:
            self._tables[key] = build()
        return cast(Table, self._tables[key])

    @property
    def _root_rows(self) -> Sequence[int]:
        roots = self.tree.parents < 0
        return self.rows[self.tree.cu_seqlens[:-1][roots]].tolist()


def places(wanted: np.ndarray, taken: np.ndarray) -> np.ndarray:
    """Index of each of `wanted` in `taken`, -1 where it is not there."""
    order = np.argsort(taken)
    index = np.minimum(np.searchsorted(taken, wanted, sorter=order), len(taken) - 1)
    return np.where(taken[order[index]] == wanted, order[index], -1)
