"""Parts of tree attention: causal squares and full rectangles, which dense kernels compute.

A chain of first children is one interval of the strip: a square below the diagonal. Whatever else
rows see, mounts included, is a rectangle of query rows times key rows.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from tree_kernels.layout.tree import TreeLayout

Interval = tuple[int, int]


class Grid(NamedTuple):
    """Numbers of keys that rectangles of rows off a chain have, where kernels prefer few ones.

    The keys between such a rectangle and the branch are a rectangle of their own, for each branch.
    """

    step: int
    """Rectangles end at multiples of this many of the chain's keys."""
    digits: int
    """They have as many keys as a number of this many binary digits, then zeros."""


EVERY_KEY = Grid(step=1, digits=64)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class AttentionParts:
    """Each visible pair of a query row and a key row belongs to exactly one part.

    Example:
        Trunk of 3 rows, branches of 2 and 1: squares of rows [0, 5) and [5, 6) and one rectangle
        of row [5, 6) times keys [0, 3).
    """

    queries: np.ndarray
    """Query rows `[begin, end)` of each part, `[P, 2]` int64; each row is in exactly one square."""
    keys: np.ndarray
    """Key rows `[begin, end)` of each part, `[P, 2]` int64."""
    num_squares: int
    """The first parts are squares: their query i sees their keys up to i. Others are seen fully."""
    num_mounts: int
    """The last parts are mounts."""
    tables: dict[Hashable, Any] = field(default_factory=dict, repr=False)
    """What operators derive from the parts, once for each device."""

    @property
    def num_pairs(self) -> int:
        """Visible pairs of a query and a key."""
        rows = np.diff(self.queries)[:, 0]
        squares = rows[: self.num_squares]
        rectangles = rows[self.num_squares :] * np.diff(self.keys[self.num_squares :])[:, 0]
        return int((squares * (squares + 1) // 2).sum() + rectangles.sum())


def build_parts(
    layout: TreeLayout,
    *,
    mounted: bool,
    grid: Grid = EVERY_KEY,
    queries: np.ndarray | None = None,
    keys: np.ndarray | None = None,
) -> AttentionParts:
    """Cut what the rows of a strip see into squares and rectangles.

    Args:
        layout: The whole strip.
        mounted: Whether mounted keys are seen.
        grid: Numbers of keys of rectangles.
        queries: Rows that are computed, ascending, without gaps on a path; None computes all. Row
            numbers of queries count these.
        keys: Rows whose keys are given, in this order; None gives all. Row numbers of keys count
            these.
    """
    rows = np.arange(layout.num_tokens) if queries is None else queries
    squares: list[tuple[Interval, Interval]] = []
    rectangles: list[tuple[Interval, Interval]] = []
    for first, last in _chains(layout.parents):
        begin, end = int(layout.cu_seqlens[first]), int(layout.cu_seqlens[last + 1])
        own = _interval(rows, begin, end)
        if own[0] < own[1]:
            start = int(rows[own[0]])
            squares.append((own, (start, start + own[1] - own[0])))
            rectangles.append((own, (begin, start)))
        nodes = slice(first, last + 1)
        bounds = np.searchsorted(rows, np.append(layout.exits[nodes], end))
        rectangles += _staircase(begin, layout.cu_seqlens[first + 1 : last + 2], bounds, grid)
    mounts = [
        (_interval(rows, mount.query_begin, mount.query_end), (mount.key_begin, mount.key_end))
        for mount in (layout.mounts if mounted else ())
    ]
    rectangles, mounts = _not_empty(rectangles), _not_empty(mounts)
    if keys is not None:
        places = np.zeros(layout.num_tokens, dtype=np.int64)
        places[keys] = np.arange(len(keys))
        squares, rectangles, mounts = (
            list(_placed(each, places)) for each in (squares, rectangles, mounts)
        )
    found = [*squares, *sorted(rectangles), *sorted(mounts)]
    table = np.array(found, dtype=np.int64).reshape(-1, 2, 2)
    return AttentionParts(
        queries=table[:, 0],
        keys=table[:, 1],
        num_squares=len(squares),
        num_mounts=len(mounts),
    )


def _chains(parents: np.ndarray) -> list[Interval]:
    """First and last node of each chain of first children."""
    continues = (parents == np.arange(-1, len(parents) - 1)) & (parents >= 0)
    firsts = np.flatnonzero(~continues)
    return list(zip(firsts.tolist(), [*(firsts[1:] - 1).tolist(), len(parents) - 1], strict=True))


def _interval(rows: np.ndarray, begin: int, end: int) -> Interval:
    """Where the rows `[begin, end)` of the strip stand in `rows`."""
    first, last = np.searchsorted(rows, [begin, end])
    return int(first), int(last)


def _staircase(
    begin: int, node_ends: np.ndarray, bounds: np.ndarray, grid: Grid
) -> list[tuple[Interval, Interval]]:
    """Rectangles of the rows that branch off a chain.

    Rows `[bounds[j + 1], bounds[j])` see the chain's keys `[begin, node_ends[j])`. Halved by rows
    again and again, the staircase becomes few large rectangles: a row that is one of n is in at
    most log2(n) + 1 of them, however long the chain is, and in the keys before its branch.
    """
    steps = np.flatnonzero(bounds[:-1] > bounds[1:])
    uppers, lowers = bounds[steps], bounds[steps + 1]
    ends = node_ends[steps] - (node_ends[steps] - begin) % grid.step
    rests = zip(
        lowers.tolist(), uppers.tolist(), ends.tolist(), node_ends[steps].tolist(), strict=True
    )
    found = [((lower, upper), (end, stop)) for lower, upper, end, stop in rests]
    open_steps = [(0, len(steps), begin)]
    while open_steps:
        first, stop, key_begin = open_steps.pop()
        if first == stop:
            continue
        # Rows fall along the steps: the median row's step halves what is left on either side.
        half = (lowers[stop - 1] + uppers[first]) // 2
        middle = first + int(np.searchsorted(-uppers[first:stop], -half, side="left")) - 1
        middle = min(max(middle, first), stop - 1)
        key_end = key_begin + few_digits(int(ends[middle]) - key_begin, grid.digits)
        found.append(((int(lowers[stop - 1]), int(uppers[middle])), (key_begin, key_end)))
        done = key_end == ends[middle]
        open_steps += [(first, middle, key_begin), (middle + done, stop, key_end)]
    return found


def few_digits(number: int, digits: int) -> int:
    """The largest number of `digits` binary digits, then zeros, that is at most `number`."""
    zeros = max(number.bit_length() - digits, 0)
    return number >> zeros << zeros


def _not_empty(parts: list[tuple[Interval, Interval]]) -> list[tuple[Interval, Interval]]:
    return [(own, seen) for own, seen in parts if own[0] < own[1] and seen[0] < seen[1]]


def _placed(
    parts: list[tuple[Interval, Interval]], places: np.ndarray
) -> Iterator[tuple[Interval, Interval]]:
    """The parts with key rows as places; one for each run of places."""
    for queries, (begin, end) in parts:
        run = places[begin:end]
        cuts = [0, *(np.flatnonzero(np.diff(run) != 1) + 1).tolist(), end - begin]
        for first, last in pairwise(cuts):
            yield queries, (int(run[first]), int(run[last - 1]) + 1)
