"""Calls of libraries that compute tree attention, and where their rows go: tables on the device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch

from tree_kernels.attention.groups import (
    Group,
    backward_groups,
    begins_of,
    by_cell,
    forward_groups,
)
from tree_kernels.layout import AttentionParts


@dataclass(frozen=True, kw_only=True, eq=False)
class Call:
    """One library call: sequences of query rows and the key rows that each of them sees."""

    square: bool
    """The last keys are the queries' own rows, which see each other up to themselves."""
    lone: bool
    """The library for long parts computes it."""
    exact: bool
    """It has a plan of its lengths, and sequences are equally long: few calls have others."""
    padding: int
    """Rows behind `query_rows` that an exact call computes, and behind `key_rows` of a square."""
    holes: torch.Tensor | None
    """Rows among N that are padding, where an exact call has many sequences."""
    source: int
    """The call of the forward pass that computes these pairs."""
    query_rows: torch.Tensor | slice
    """Rows of the strip, sequence by sequence, N of them."""
    key_rows: torch.Tensor | slice
    """Rows of keys, sequence by sequence, M of them."""
    query_begins: torch.Tensor
    """First of N of each sequence, then N and the padding, `[B+1]` int32."""
    key_begins: torch.Tensor
    """First of M of each sequence, then M and a square's padding, `[B+1]` int32."""
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
        piece_rows: The shortest piece that backward cuts off them, or None where no library has
            plans of exact lengths.
    """
    groups = forward_groups(parts, width, lone_flops, piece_rows)
    calls = _calls(groups, device)
    out_terms = _query_terms(groups, num_queries, device)
    backward_calls, query_terms = calls, out_terms
    if piece_rows is not None:
        groups = backward_groups(groups, piece_rows)
        backward_calls = _calls(groups, device)
        query_terms = _query_terms(groups, num_queries, device)
    return CallPlan(
        calls=calls,
        out_terms=out_terms,
        backward_calls=backward_calls,
        query_terms=query_terms,
        key_terms=_terms(
            [group.keys for group in groups],
            [begins_of(group.keys) for group in groups],
            num_keys,
            device,
        ),
    )


def _calls(groups: list[Group], device: torch.device) -> tuple[Call, ...]:
    begins = [each for group in groups for each in _begins(group)]
    # One copy for all: each takes as long as a small kernel.
    table = torch.from_numpy(np.concatenate(begins).astype(np.int32))
    sequences = table.to(device, non_blocking=True).split([len(each) for each in begins])
    queries = [_query_rows(group, device) for group in groups]
    return tuple(
        Call(
            square=group.square,
            lone=group.lone,
            exact=group.length > 0,
            padding=_padding(group),
            holes=queries[place][1],
            source=group.source,
            query_rows=queries[place][0],
            key_rows=_rows(group.keys, device),
            query_begins=sequences[2 * place],
            key_begins=sequences[2 * place + 1],
            max_queries=int(np.diff(begins[2 * place]).max()),
            max_keys=int(np.diff(begins[2 * place + 1]).max()),
        )
        for place, group in enumerate(groups)
    )


def _begins(group: Group) -> tuple[np.ndarray, np.ndarray]:
    keys = group.key_begins
    keys[-1] += _padding(group) if group.square else 0
    return group.query_begins, keys


def _padding(group: Group) -> int:
    is_one = len(group.queries) == 1 and group.length
    return group.length - int(np.diff(group.queries)[0, 0]) if is_one else 0


def _query_rows(
    group: Group, device: torch.device
) -> tuple[torch.Tensor | slice, torch.Tensor | None]:
    """The call's `query_rows` and `holes`."""
    if len(group.queries) == 1 or not group.length:
        return _rows(group.queries, device), None
    # Padding repeats a sequence's last row, whose weights are finite.
    begins, ends = group.queries[:, :1], group.queries[:, 1:]
    rows = begins + np.arange(group.length)
    (query_rows,) = _tensors(np.minimum(rows, ends - 1).reshape(1, -1), device)
    (holes,) = _tensors(np.flatnonzero(rows >= ends)[None], device)
    return query_rows, holes


def _rows(intervals: np.ndarray, device: torch.device) -> torch.Tensor | slice:
    """The rows of the intervals one after the other; a slice where they are one interval."""
    if _follow_each_other(intervals):
        return slice(int(intervals[0, 0]), int(intervals[-1, 1]))
    lengths, begins = np.diff(intervals)[:, 0], begins_of(intervals)[:-1]
    counts, shifts = _tensors(np.stack([lengths, intervals[:, 0] - begins]), device)
    total = int(lengths.sum())
    return _repeated(shifts, counts, total).add_(torch.arange(total, device=device))


def _follow_each_other(intervals: np.ndarray) -> bool:
    return bool((intervals[1:, 0] == intervals[:-1, 1]).all())


def _query_terms(groups: list[Group], num_rows: int, device: torch.device) -> Terms:
    intervals, begins = zip(*((group.queries, group.query_begins) for group in groups), strict=True)
    return _terms(intervals, begins, num_rows, device)


def _terms(
    groups: Sequence[np.ndarray], begins: Sequence[np.ndarray], num_rows: int, device: torch.device
) -> Terms:
    """Terms of each row in the order of the calls, given the intervals of their rows in the strip
    and where each of these begins among the call's.

    Rows between two neighbouring bounds of intervals have the same terms. So the host makes tables
    of such cells, which are few, and the device those of rows.
    """
    intervals = np.concatenate(groups)
    calls = np.repeat(np.arange(len(groups)), [len(group) for group in groups])
    places = np.concatenate([each[:-1] for each in begins])
    bounds = np.unique(np.append(intervals, [0, num_rows]))
    members, cells = by_cell(intervals, bounds)
    terms = np.bincount(cells, minlength=len(bounds) - 1)

    rows = torch.arange(num_rows, device=device)
    cell_rows, cell_terms = _tensors(np.stack([np.diff(bounds), terms]), device)
    term_calls, shifts = _tensors(np.stack([calls, places - intervals[:, 0]])[:, members], device)
    counts = _repeated(cell_terms, cell_rows, num_rows)
    firsts = counts.new_zeros(num_rows + 1)
    torch.cumsum(counts, 0, out=firsts[1:])
    total = int((np.diff(bounds) * terms).sum())
    row_of = _repeated(rows, counts, total)
    # A row's first term in the tables of cells, less its first in those of rows.
    offsets = _repeated(cell_terms.cumsum(0) - cell_terms, cell_rows, num_rows) - firsts[:-1]
    term = torch.arange(total, device=device) + offsets[row_of]
    return Terms(
        begins=firsts.int(),
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
