"""Which parts of tree attention are computed by one library call, and where their rows go.

Parts that keep a GPU busy are calls of their own on views of the strip. Smaller ones are gathered
and share calls with parts of about their size, as sequences of one batch. Backward may cut the
former to pieces of few lengths, for which a library has faster plans than for any length.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch

from tree_kernels.layout import AttentionParts

LONE_FLOPS = 3e10
"""Forward FLOPs from which a part is a call of its own, 0.05 ms of a Hopper GPU: a lone call runs
two to three times as fast as a batch, but costs 0.03 ms of small kernels."""
_SMALLEST = 128
"""Rows below which parts count as equally long: kernels compute blocks of that many."""
_CLASS_RATIO = 4
"""Lengths in one batch differ by at most this: a batch launches blocks for its longest."""
PIECE_ROWS = 1024
"""The shortest piece that is cut off a long part."""
_LONGEST_PIECE = 1 << 16
_WORTH_CUTTING = 12
"""Parts of fewer pairs than this many of the shortest squares are left whole: each piece costs
some small kernels."""
_REST = 16
"""What is left of an interval after cuts is less than this fraction of it, or a shortest piece."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Group:
    """The parts, or pieces of parts, of one call."""

    square: bool
    lone: bool
    exact: bool
    source: int
    queries: np.ndarray
    """Query rows `[begin, end)` of each, `[n, 2]`."""
    keys: np.ndarray
    """Key rows `[begin, end)` of each, `[n, 2]`."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Call:
    """One library call: sequences of query rows and the key rows that each of them sees."""

    square: bool
    lone: bool
    """One sequence, of many rows."""
    exact: bool
    """It has a length of the few that pieces have, and as many keys as pieces have."""
    source: int
    """The call of the forward pass that computes these pairs."""
    query_rows: torch.Tensor | slice
    """Rows of the strip, sequence by sequence, N of them."""
    key_rows: torch.Tensor | slice
    """Rows of keys, sequence by sequence, M of them."""
    query_begins: torch.Tensor
    """First of N of each sequence, then N, `[B+1]` int32."""
    key_begins: torch.Tensor
    """First of M of each sequence, then M, `[B+1]` int32."""
    max_queries: int
    max_keys: int

    @cached_property
    def places(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Sequence of each query row, and its place there, `[N]` int64."""
        begins = self.query_begins.long()
        counts = begins.diff()
        sequences = torch.repeat_interleave(torch.arange(len(counts), device=begins.device), counts)
        rows = torch.arange(len(sequences), device=begins.device)
        return sequences, rows - begins[sequences]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Terms:
    """Where the terms of each row are among the results of all calls; E of them in all."""

    begins: torch.Tensor
    """First term of each row, then E, `[T+1]` int32."""
    calls: torch.Tensor
    """`[E]` int32."""
    rows: torch.Tensor
    """Row of the call's result, `[E]` int32."""
    given_whole: bool
    """There is one call, and its result is all rows in their order."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class CallPlan:
    """All calls of one layout."""

    calls: tuple[Call, ...]
    """Of the forward pass."""
    out_terms: Terms
    backward_calls: tuple[Call, ...]
    query_terms: Terms
    """Gradients of queries among the results of backward calls."""
    key_terms: Terms


def plan_calls(
    parts: AttentionParts,
    num_queries: int,
    num_keys: int,
    device: torch.device,
    *,
    width: int,
    lone_flops: float,
    piece_rows: int | None = None,
) -> CallPlan:
    """Group the parts into calls.

    Args:
        parts: What is computed.
        num_queries: Query rows, T.
        num_keys: Key rows, S + T.
        device: Where the calls run.
        width: Query heads times their size.
        lone_flops: Forward FLOPs from which a part is a call of its own; infinite where no library
            takes lone calls.
        piece_rows: The shortest piece that backward cuts off them, or None to cut nothing.
    """
    groups = _groups(parts, width, lone_flops)
    calls = _calls(groups, device)
    out_terms = _terms([group.queries for group in groups], num_queries, device)
    backward_calls, query_terms, cut = calls, out_terms, groups
    if piece_rows is not None:
        cut = [piece for group in groups for piece in _pieces(group, piece_rows)]
        backward_calls = _calls(cut, device)
        query_terms = _terms([piece.queries for piece in cut], num_queries, device)
    return CallPlan(
        calls=calls,
        out_terms=out_terms,
        backward_calls=backward_calls,
        query_terms=query_terms,
        key_terms=_terms([piece.keys for piece in cut], num_keys, device),
    )


def _groups(parts: AttentionParts, width: int, lone_flops: float) -> list[_Group]:
    """Which parts the calls of the forward pass compute."""
    rows, keys = np.diff(parts.queries)[:, 0], np.diff(parts.keys)[:, 0]
    square = np.arange(len(rows)) < parts.num_squares
    flops = 4.0 * width * rows * keys * np.where(square, 0.5, 1.0)
    alone = flops >= lone_flops
    # The longest first: while the GPU computes them, the host prepares the others.
    found = [np.array([part]) for part in sorted(np.flatnonzero(alone), key=lambda n: -flops[n])]
    num_lone = len(found)
    classes = np.stack([~square, _size_class(rows), _size_class(keys)], axis=1)
    rest = np.flatnonzero(~alone)
    for sizes in np.unique(classes[rest], axis=0):
        found.append(rest[(classes[rest] == sizes).all(axis=1)])
    return [
        _Group(
            square=bool(square[members[0]]),
            lone=place < num_lone,
            exact=False,
            source=place,
            queries=parts.queries[members],
            keys=parts.keys[members],
        )
        for place, members in enumerate(found)
    ]


def _pieces(group: _Group, least: int) -> Iterator[_Group]:
    """What backward computes of a call: of a lone one, pieces."""
    if not group.lone:
        yield group
        return
    (begin, end), (first, last) = group.queries[0].tolist(), group.keys[0].tolist()
    whole = _piece(group, (begin, end), (first, last), least, square=group.square)
    num_pairs = (end - begin) * (last - first) // (2 if group.square else 1)
    if whole.exact or num_pairs < _WORTH_CUTTING * least**2:
        yield whole
        return
    for left, right in _cuts(first, last, least):
        below = begin
        if group.square:
            below += right - first
            own = (begin + left - first, below)
            yield _piece(group, own, (left, right), least, square=True)
        for rows in _cuts(below, end, least):
            yield _piece(group, rows, (left, right), least, square=False)


def _piece(
    group: _Group, rows: tuple[int, int], keys: tuple[int, int], least: int, *, square: bool
) -> _Group:
    return _Group(
        square=square,
        lone=True,
        exact=all(end - begin == _largest(end - begin, least) for begin, end in (rows, keys)),
        source=group.source,
        queries=np.array([rows]),
        keys=np.array([keys]),
    )


def _cuts(begin: int, end: int, least: int) -> Iterator[tuple[int, int]]:
    """The interval in pieces of the lengths that `_largest` gives, then a short rest."""
    enough = max(least, (end - begin) // _REST)
    while end - begin >= enough:
        middle = begin + _largest(end - begin, least)
        yield begin, middle
        begin = middle
    if begin < end:
        yield begin, end


def _largest(length: int, least: int) -> int:
    """The largest 2^n or 1.5 x 2^n that is at most `length`; 0 if it is below `least`."""
    power = 1 << (min(length, _LONGEST_PIECE).bit_length() - 1)
    found = power + power // 2 if power + power // 2 <= min(length, _LONGEST_PIECE) else power
    return found if found >= least else 0


def _size_class(lengths: np.ndarray) -> np.ndarray:
    excess = np.maximum(lengths, _SMALLEST) / _SMALLEST
    return np.ceil(np.log(excess) / np.log(_CLASS_RATIO) - 1e-9).astype(np.int64)


def _calls(groups: list[_Group], device: torch.device) -> tuple[Call, ...]:
    begins = [_begins(rows) for group in groups for rows in (group.queries, group.keys)]
    # One copy for all: each takes as long as a small kernel.
    table = torch.from_numpy(np.concatenate(begins).astype(np.int32))
    sequences = iter(table.to(device, non_blocking=True).split([len(each) for each in begins]))
    return tuple(
        Call(
            square=group.square,
            lone=group.lone,
            exact=group.exact,
            source=group.source,
            query_rows=_rows(group.queries, device),
            key_rows=_rows(group.keys, device),
            query_begins=next(sequences),
            key_begins=next(sequences),
            max_queries=int((group.queries[:, 1] - group.queries[:, 0]).max()),
            max_keys=int((group.keys[:, 1] - group.keys[:, 0]).max()),
        )
        for group in groups
    )


def _rows(intervals: np.ndarray, device: torch.device) -> torch.Tensor | slice:
    """The rows of the intervals one after the other; a slice where they are one interval."""
    if _follow_each_other(intervals):
        return slice(int(intervals[0, 0]), int(intervals[-1, 1]))
    lengths, begins = np.diff(intervals)[:, 0], _begins(intervals)[:-1]
    counts, shifts = _tensors(np.stack([lengths, intervals[:, 0] - begins]), device)
    total = int(lengths.sum())
    return _repeated(shifts, counts, total).add_(torch.arange(total, device=device))


def _follow_each_other(intervals: np.ndarray) -> bool:
    return bool((intervals[1:, 0] == intervals[:-1, 1]).all())


def _begins(intervals: np.ndarray) -> np.ndarray:
    """Where each interval begins if they follow each other from 0, and where the last ends."""
    begins = np.zeros(len(intervals) + 1, dtype=np.int64)
    np.cumsum(intervals[:, 1] - intervals[:, 0], out=begins[1:])
    return begins


def _terms(groups: list[np.ndarray], num_rows: int, device: torch.device) -> Terms:
    """Terms of each row in the order of the calls, given the intervals of their rows.

    Rows between two neighbouring bounds of intervals have the same terms. So the host makes tables
    of such cells, which are few, and the device those of rows.
    """
    intervals = np.concatenate(groups)
    calls = np.repeat(np.arange(len(groups)), [len(group) for group in groups])
    places = np.concatenate([_begins(group)[:-1] for group in groups])
    bounds = np.unique(np.append(intervals, [0, num_rows]))
    first, stop = np.searchsorted(bounds, intervals.T)
    members = np.repeat(np.arange(len(intervals)), stop - first)
    cells = np.concatenate([np.arange(*span) for span in zip(first, stop, strict=True)])
    order = np.argsort(cells, kind="stable")
    members, terms = members[order], np.bincount(cells, minlength=len(bounds) - 1)

    rows = torch.arange(num_rows, device=device)
    cell_rows, cell_terms = _tensors(np.stack([np.diff(bounds), terms]), device)
    term_calls, shifts = _tensors(np.stack([calls, places - intervals[:, 0]])[:, members], device)
    counts = _repeated(cell_terms, cell_rows, num_rows)
    begins = counts.new_zeros(num_rows + 1)
    torch.cumsum(counts, 0, out=begins[1:])
    total = int((np.diff(bounds) * terms).sum())
    row_of = _repeated(rows, counts, total)
    # A row's first term in the tables of cells, less its first in those of rows.
    offsets = _repeated(cell_terms.cumsum(0) - cell_terms, cell_rows, num_rows) - begins[:-1]
    term = torch.arange(total, device=device) + offsets[row_of]
    return Terms(
        begins=begins.int(),
        calls=term_calls[term].int(),
        rows=(row_of + shifts[term]).int(),
        given_whole=len(groups) == 1
        and _follow_each_other(intervals)
        and (intervals[0, 0], intervals[-1, 1]) == (0, num_rows),
    )


def _repeated(values: torch.Tensor, counts: torch.Tensor, total: int) -> torch.Tensor:
    # Told their sum, the host does not wait for it.
    return torch.repeat_interleave(values, counts, output_size=total)


def _tensors(table: np.ndarray, device: torch.device) -> tuple[torch.Tensor, ...]:
    """The rows of a table, int64."""
    return torch.from_numpy(table.astype(np.int64)).to(device, non_blocking=True).unbind()
