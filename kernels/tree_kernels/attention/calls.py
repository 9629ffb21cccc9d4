"""Which parts of tree attention are computed by one library call, and where their rows go.

Parts that keep a GPU busy are calls of their own on views of the strip. Smaller ones are gathered
and share calls with parts of about their size, as sequences of one batch.
"""

from __future__ import annotations

from collections.abc import Callable
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


@dataclass(frozen=True, kw_only=True, eq=False)
class Call:
    """One library call: sequences of query rows and the key rows that each of them sees."""

    square: bool
    lone: bool
    """One sequence, of many rows."""
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
    """All calls of one layout, forward and backward."""

    calls: tuple[Call, ...]
    query_terms: Terms
    key_terms: Terms


def plan_calls(
    parts: AttentionParts,
    num_queries: int,
    num_keys: int,
    device: torch.device,
    *,
    width: int,
    lone_flops: float,
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
    """
    groups = _groups(parts, width, lone_flops)
    calls = tuple(
        _call(parts, group, device, square=key[0] == "square", lone=key[1]) for key, group in groups
    )
    members = [group for _, group in groups]
    return CallPlan(
        calls=calls,
        query_terms=_terms(parts.queries, members, num_queries, device),
        key_terms=_terms(parts.keys, members, num_keys, device),
    )


def _groups(
    parts: AttentionParts, width: int, lone_flops: float
) -> list[tuple[tuple[str, bool], np.ndarray]]:
    """What each call computes: the kind of its parts, whether it is a lone one, and the parts."""
    rows, keys = np.diff(parts.queries)[:, 0], np.diff(parts.keys)[:, 0]
    square = np.arange(len(rows)) < parts.num_squares
    flops = 4.0 * width * rows * keys * np.where(square, 0.5, 1.0)
    alone = flops >= lone_flops
    found = []
    # The longest first: while the GPU computes them, the host prepares the others.
    for part in sorted(np.flatnonzero(alone), key=lambda part: -flops[part]):
        found.append((("square" if square[part] else "rectangle", True), np.array([part])))
    classes = np.stack([~square, _size_class(rows), _size_class(keys)], axis=1)
    rest = np.flatnonzero(~alone)
    for sizes in np.unique(classes[rest], axis=0):
        group = rest[(classes[rest] == sizes).all(axis=1)]
        found.append((("rectangle" if sizes[0] else "square", False), group))
    return found


def _size_class(lengths: np.ndarray) -> np.ndarray:
    excess = np.maximum(lengths, _SMALLEST) / _SMALLEST
    return np.ceil(np.log(excess) / np.log(_CLASS_RATIO) - 1e-9).astype(np.int64)


def _call(
    parts: AttentionParts, group: np.ndarray, device: torch.device, *, square: bool, lone: bool
) -> Call:
    queries, keys = parts.queries[group], parts.keys[group]
    return Call(
        square=square,
        lone=lone,
        query_rows=_rows(queries, device),
        key_rows=_rows(keys, device),
        query_begins=_begins(queries, device),
        key_begins=_begins(keys, device),
        max_queries=int(np.diff(queries).max()),
        max_keys=int(np.diff(keys).max()),
    )


def _rows(intervals: np.ndarray, device: torch.device) -> torch.Tensor | slice:
    """The rows of the intervals one after the other; a slice where they are one interval."""
    if (intervals[1:, 0] == intervals[:-1, 1]).all():
        return slice(int(intervals[0, 0]), int(intervals[-1, 1]))
    return torch.from_numpy(_ranges(intervals)).to(device)


def _begins(intervals: np.ndarray, device: torch.device) -> torch.Tensor:
    begins = np.cumsum(np.append(0, np.diff(intervals)[:, 0]))
    return torch.from_numpy(begins.astype(np.int32)).to(device)


def _ranges(intervals: np.ndarray) -> np.ndarray:
    return np.concatenate([np.arange(begin, end) for begin, end in intervals])


def _terms(
    intervals: np.ndarray, groups: list[np.ndarray], num_rows: int, device: torch.device
) -> Terms:
    """Terms of each row in the order of the calls."""
    taken = [_ranges(intervals[group]) for group in groups]
    rows = np.concatenate(taken)
    calls = np.repeat(np.arange(len(taken)), [len(each) for each in taken])
    places = np.concatenate([np.arange(len(each)) for each in taken])
    order = np.argsort(rows, kind="stable")
    begins = np.cumsum(np.append(0, np.bincount(rows, minlength=num_rows)))
    tensor: Callable[[np.ndarray], torch.Tensor] = lambda values: torch.from_numpy(  # noqa: E731
        values.astype(np.int32)
    ).to(device)
    whole = len(groups) == 1 and np.array_equal(rows, np.arange(num_rows))
    return Terms(
        begins=tensor(begins),
        calls=tensor(calls[order]),
        rows=tensor(places[order]),
        given_whole=whole,
    )
