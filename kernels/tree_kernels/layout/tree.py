"""The packed tree itself: which rows are ancestors, which are mounted, for how long.

Index tables that operators need are built once per layout and kept on its device.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, TypeVar, cast

import numpy as np
import torch

from tree_kernels.layout.chains import ChainTable, build_chains
from tree_kernels.layout.chunks import ChunkTable, build_chunks, default_chunk_size
from tree_kernels.layout.parts import EVERY_KEY, AttentionParts, Grid, build_parts
from tree_kernels.layout.windows import ConvTable

Table = TypeVar("Table")


class MountRectangle(NamedTuple):
    """Query rows `[query_begin, query_end)` see key rows `[key_begin, key_end)` in mount layers."""

    query_begin: int
    query_end: int
    key_begin: int
    key_end: int


@dataclass(frozen=True, kw_only=True, eq=False)
class TreeLayout:
    """A forest in depth-first order; row = position in the strip.

    Example:
        A trunk of 3 tokens with branches of 2 and 1: `parents=[-1, 0, 0]`,
        `cu_seqlens=[0, 3, 5, 6]`, `exits=[6, 5, 6]`.
    """

    parents: np.ndarray
    """Parent node, -1 at a root, `[N]` int64; nodes are in strip order."""
    cu_seqlens: np.ndarray
    """First row of each node, then T, `[N+1]` int64."""
    exits: np.ndarray
    """End row of each node's subtree, `[N]` int64: row q sees key k of node u as an ancestor
    exactly when `k <= q < exits[u]`."""
    mounts: tuple[MountRectangle, ...] = ()
    """What else rows see in mount layers; no row sees a key twice."""
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    _tables: dict[Hashable, Any] = field(default_factory=dict, repr=False)

    @classmethod
    def build(
        cls,
        parents: Sequence[int],
        lengths: Sequence[int],
        node_mounts: Sequence[Sequence[tuple[int, int]]] | None = None,
    ) -> TreeLayout:
        """Lay out nodes that already stand in depth-first order.

        Args:
            parents: Parent of each node, -1 at a root, `[N]`.
            lengths: Tokens of each node, at least 1, `[N]`.
            node_mounts: For each node the key rows `[begin, end)` of its complete mounted set.
                Rows that overlap, repeat or belong to the node's ancestors count once.

        Raises:
            ValueError: An empty node, an order that is not depth-first, or a span beyond T.
        """
        parent = np.asarray(parents, dtype=np.int64)
        cu_seqlens = np.concatenate([[0], np.cumsum(np.asarray(lengths, dtype=np.int64))])
        _check_nodes(parent, lengths)
        exits = _subtree_ends(parent, cu_seqlens)
        spans = node_mounts if node_mounts is not None else [()] * len(parent)
        mounts = _rectangles(parent, cu_seqlens, spans)
        return cls(parents=parent, cu_seqlens=cu_seqlens, exits=exits, mounts=mounts)

    @property
    def num_nodes(self) -> int:
        """Nodes, N."""
        return len(self.parents)

    @property
    def num_tokens(self) -> int:
        """Rows, T."""
        return int(self.cu_seqlens[-1])

    @property
    def num_keys(self) -> int:
        """Rows of keys and values that attention takes: all."""
        return self.num_tokens

    def num_conv_rows(self, width: int) -> int:
        """Rows that a convolution of `width` takes: all."""
        del width
        return self.num_tokens

    def to(self, device: torch.device | str) -> TreeLayout:
        """The same layout with its tables on `device`; asked again, the same object."""
        target = torch.device(device)
        if target.type == "cuda" and target.index is None:
            target = torch.device("cuda", torch.cuda.current_device())
        if target == self.device:
            return self
        return self._cached(("to", target), lambda: replace(self, device=target, _tables={}))

    def row_parents(self) -> np.ndarray:
        """Row before each row on its path, -1 at a root's first row, `[T]` int64."""
        rows = np.arange(-1, self.num_tokens - 1, dtype=np.int64)
        last_rows = self.cu_seqlens[1:] - 1
        rows[self.cu_seqlens[:-1]] = np.where(self.parents >= 0, last_rows[self.parents], -1)
        return rows

    def ancestor_rows(self, row: int) -> np.ndarray:
        """Rows before `row` on its path, ascending, int64."""
        node = int(np.searchsorted(self.cu_seqlens, row, side="right")) - 1
        pieces = [np.arange(self.cu_seqlens[node], row)]
        while (node := int(self.parents[node])) >= 0:
            pieces.append(np.arange(self.cu_seqlens[node], self.cu_seqlens[node + 1]))
        return np.concatenate(pieces[::-1])

    def chunks(self, size: int | None = None) -> ChunkTable:
        """Chunks of at most `size` rows, each of which continues one other chunk."""
        size = size or default_chunk_size(self.parents, self.cu_seqlens, self.device)
        return self._cached(("chunks", size), lambda: build_chunks(self, size))

    def chains(self, size: int, end_nodes: Sequence[int] = ()) -> ChainTable:
        """Chains of chunks of at most `size` rows that keep the states behind `end_nodes`."""
        nodes = tuple(end_nodes)
        return self._cached(("chains", size, nodes), lambda: build_chains(self, size, nodes))

    def parts(self, *, mounted: bool, grid: Grid = EVERY_KEY) -> AttentionParts:
        """What attention computes, mounts included if `mounted`."""
        mounted = mounted and bool(self.mounts)
        return self._cached(
            ("parts", mounted, grid), lambda: build_parts(self, mounted=mounted, grid=grid)
        )

    def conv_taps(self, width: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Rows whose window does not simply precede them in the strip, and their windows.

        Returns:
            `rows` `[R]` and `windows` `[R, width]` int64: oldest tap first, the row itself last;
            T where the path has begun.
        """
        return self._cached(("conv_taps", width), lambda: self._build_conv_taps(width))

    def conv_table(self, width: int) -> ConvTable:
        """The same of all rows, and for forks the other way round."""
        return self._cached(
            ("conv_table", width), lambda: ConvTable.of(self.row_parents(), width, self.device)
        )

    def _build_conv_taps(self, width: int) -> tuple[torch.Tensor, torch.Tensor]:
        rows, windows = conv_windows(self.row_parents(), width)
        return self.tensor(rows), self.tensor(windows)

    def tensor(self, values: np.ndarray) -> torch.Tensor:
        """`values` as an int64 tensor on the layout's device."""
        return torch.from_numpy(np.ascontiguousarray(values, dtype=np.int64)).to(self.device)

    def _cached(self, key: Hashable, build: Callable[[], Table]) -> Table:
        if key not in self._tables:
            self._tables[key] = build()
        return cast(Table, self._tables[key])


def conv_windows(row_parents: np.ndarray, width: int) -> tuple[np.ndarray, np.ndarray]:
    """What `TreeLayout.conv_taps` returns, of rows with these parents, -1 for none, `[T]`."""
    total = len(row_parents)
    parents = np.append(row_parents, -1)
    taps = [np.arange(total, dtype=np.int64)]
    for _ in range(width - 1):
        taps.append(parents[taps[-1]])
    windows = np.stack(taps[::-1], axis=1)
    plain = np.arange(total)[:, None] + np.arange(1 - width, 1)[None]
    rows = np.flatnonzero((windows != np.maximum(plain, -1)).any(axis=1))
    windows = np.where(windows < 0, total, windows)
    return rows, windows[rows]


def _check_nodes(parents: np.ndarray, lengths: Sequence[int]) -> None:
    if len(parents) == 0:
        raise ValueError("a layout needs at least one node")
    if len(parents) != len(lengths):
        raise ValueError(f"{len(parents)} parents but {len(lengths)} lengths")
    for node, length in enumerate(lengths):
        if length < 1:
            raise ValueError(f"node {node} has length {length}; allowed: 1 and more")


def _subtree_ends(parents: np.ndarray, cu_seqlens: np.ndarray) -> np.ndarray:
    """End rows of the subtrees; refuses an order that is not depth-first."""
    path: list[int] = []
    exits = np.zeros(len(parents), dtype=np.int64)
    for node, parent in enumerate(parents.tolist()):
        while path and path[-1] != parent:
            exits[path.pop()] = cu_seqlens[node]
        if parent >= 0 and not path:
            raise ValueError(f"node {node} with parent {parent} breaks the depth-first order")
        path.append(node)
    exits[path] = cu_seqlens[-1]
    return exits


def _rectangles(
    parents: np.ndarray,
    cu_seqlens: np.ndarray,
    node_mounts: Sequence[Sequence[tuple[int, int]]],
) -> tuple[MountRectangle, ...]:
    """Rectangles of all nodes; a span that neighbours in the strip share becomes one."""
    if len(node_mounts) != len(parents):
        raise ValueError(f"{len(parents)} nodes but mounts of {len(node_mounts)}")
    open_since: dict[tuple[int, int], int] = {}
    found: list[MountRectangle] = []
    for node, spans in enumerate(node_mounts):
        begin = int(cu_seqlens[node])
        visible = set(_without_path(node, parents, cu_seqlens, spans))
        for span in [span for span in open_since if span not in visible]:
            found.append(MountRectangle(open_since.pop(span), begin, *span))
        for span in visible:
            open_since.setdefault(span, begin)
    end = int(cu_seqlens[-1])
    found.extend(MountRectangle(begin, end, *span) for span, begin in open_since.items())
    return tuple(sorted(found))


def _without_path(
    node: int, parents: np.ndarray, cu_seqlens: np.ndarray, spans: Sequence[tuple[int, int]]
) -> list[tuple[int, int]]:
    """The union of `spans` without the node's own and its ancestors' rows."""
    if not spans:
        return []
    total = int(cu_seqlens[-1])
    marks: list[tuple[int, int]] = []
    for begin, end in spans:
        if not 0 <= begin < end <= total:
            raise ValueError(f"mounted rows [{begin}, {end}) of node {node}; allowed: [0, {total})")
        marks += [(begin, 1), (end, -1)]
    ancestor = node
    while ancestor >= 0:
        hidden = len(spans) + 1
        marks += [(int(cu_seqlens[ancestor]), -hidden), (int(cu_seqlens[ancestor + 1]), hidden)]
        ancestor = int(parents[ancestor])
    return _positive_intervals(marks)


def _positive_intervals(marks: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """Intervals in which the running sum of the marks is positive."""
    marks.sort()
    found: list[tuple[int, int]] = []
    depth, begin, index = 0, 0, 0
    while index < len(marks):
        row, before = marks[index][0], depth
        while index < len(marks) and marks[index][0] == row:
            depth += marks[index][1]
            index += 1
        if before <= 0 < depth:
            begin = row
        elif depth <= 0 < before:
            found.append((begin, row))
    return found
