"""Which parts of tree attention share a library call, and to what pieces backward cuts long ones.

Parts that keep a GPU busy are calls of their own on views of the strip. Smaller ones are gathered
and share calls with parts of about their size, as sequences of one batch: a square and rectangles
of its rows are one sequence. Mounts of the same rows are one rectangle. A library may have faster
plans for exact lengths than for any length: long parts have padding to few lengths, rectangles of
equal numbers of keys share calls with padding, and backward cuts long parts to pieces.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from tree_kernels.layout import AttentionParts, Grid
from tree_kernels.layout.parts import few_digits

LONE_FLOPS = 3e10
"""Forward FLOPs from which a part is a call of its own, 0.05 ms of a Hopper GPU: a lone call runs
two to three times as fast as a batch, but costs 0.03 ms of small kernels."""
_BATCH_FLOPS = 1.5e11
"""Forward FLOPs from which a part needs no others beside it in its call: cuDNN computes 4,096 rows
on 4,096 keys at 712 TF/s of a Hopper GPU, 2,048 on 2,048 at 206, four of these at once at 691."""
_EVEN = 0.75
"""Rows of the shortest sequence of such a call, to those of the longest."""
PIECE_ROWS = 1024
"""The shortest piece that is cut off a long part."""
_STEPS = 4
"""Shortest numbers of keys in a shortest piece."""
_DIGITS = 4
"""Keys of pieces are as many as a number of this many binary digits, then zeros."""
_PADDED_DIGITS = 8
"""Rows with padding are as many as one of this many, and a multiple of an eighth of the shortest
piece."""
_SMALLEST = 128
"""Rows below which parts count as equally long: kernels compute blocks of that many."""
_CLASS_RATIO = 4
"""Lengths in one batch differ by at most this: a batch launches blocks for its longest."""
_MOST_KEYS = 1 << 16
"""Keys of the longest piece."""
_MOST_ROWS = 3072
"""Query rows of the longest full rectangle among pieces. On 8,192 keys, backward of a Hopper GPU
ran at 422 TF/s with 3,072 rows, 383 with 6,144 and 347 with 49,152: what they read no longer fits
its cache. With 1,024 it ran at 391, and each piece adds terms to its keys' gradients."""
_WORTH_CUTTING = 12
"""Rectangles of fewer pairs than this many of the shortest squares are left whole: each piece
costs some small kernels."""
_REST = 16
"""What is left of the keys after cuts is less than this fraction of them, or a shortest piece."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Group:
    """The sequences of one call, n of them: rows of queries, and k intervals of keys in all."""

    square: bool
    """Its last keys are its own rows, which see each other up to themselves, others fully."""
    lone: bool
    """The library for long parts computes it: one sequence, or rectangles with as many keys."""
    length: int = 0
    """Rows of each sequence with padding, and a square's keys, if it has a plan of its lengths;
    else 0: few calls have none. Nobody reads what it gives for padding."""
    source: int
    """Which of the forward pass's groups computes these pairs."""
    queries: np.ndarray
    """Query rows `[begin, end)` of each sequence, `[n, 2]`."""
    keys: np.ndarray
    """Key rows `[begin, end)`, sequence by sequence, `[k, 2]`."""
    key_counts: np.ndarray
    """Intervals of keys of each sequence, `[n]`."""

    @property
    def query_begins(self) -> np.ndarray:
        """First query of each sequence among the call's, then their number, `[n+1]`; with
        padding."""
        if self.length:
            return np.arange(len(self.queries) + 1) * self.length
        return begins_of(self.queries)

    @property
    def key_begins(self) -> np.ndarray:
        """First key of each sequence among the call's, then their number, `[n+1]`."""
        return begins_of(self.keys)[np.append(0, np.cumsum(self.key_counts))]


def begins_of(intervals: np.ndarray) -> np.ndarray:
    """Where each interval begins if they follow each other from 0, and where the last ends."""
    begins = np.zeros(len(intervals) + 1, dtype=np.int64)
    np.cumsum(intervals[:, 1] - intervals[:, 0], out=begins[1:])
    return begins


def by_cell(intervals: np.ndarray, bounds: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Which intervals cover the cells between neighbouring bounds, cell by cell.

    Returns:
        Intervals, in their order within a cell, and the cell of each.
    """
    first, stop = np.searchsorted(bounds, intervals.T)
    members = np.repeat(np.arange(len(intervals)), stop - first)
    ends = np.cumsum(stop - first)
    cells = np.arange(len(members)) - np.repeat(ends - stop, stop - first)
    order = np.argsort(cells, kind="stable")
    return members[order], cells[order]


def grid_of(piece_rows: int) -> Grid:
    """With such numbers of keys, most rectangles have plans of exact lengths as they are."""
    return Grid(step=_step(piece_rows), digits=_DIGITS)


def forward_groups(
    parts: AttentionParts, width: int, lone_flops: float, piece_rows: int | None = None
) -> list[Group]:
    """The calls of the forward pass.

    Args:
        parts: What is computed.
        width: Query heads times their size.
        lone_flops: Forward FLOPs from which a part is a call of its own.
        piece_rows: The shortest piece that backward cuts off them, or None where no library has
            plans of exact lengths.
    """
    square, queries, keys, owners = _sequences(parts, width, lone_flops)
    seen = _seen(keys, owners, len(queries))
    alone = _flops(square, _lengths(queries), seen, width) >= lone_flops
    kept, keys, owners = _fused(square, queries, keys, owners, alone)
    square, queries, alone = square[kept], queries[kept], alone[kept]
    rows, seen = _lengths(queries), _seen(keys, owners, len(queries))
    found = list(_long(square, rows, seen, alone, width, lone_flops, piece_rows))
    num_lone = len(found)
    is_left = np.ones(len(queries), dtype=bool)
    for members, _ in found:
        is_left[members] = False
    classes = np.stack([~square, _size_class(rows), _size_class(seen)], axis=1)
    rest = np.flatnonzero(is_left)
    for sizes in np.unique(classes[rest], axis=0):
        found.append((rest[(classes[rest] == sizes).all(axis=1)], 0))
    key_counts = np.bincount(owners, minlength=len(queries))
    return [
        Group(
            square=bool(square[members[0]]),
            lone=place < num_lone,
            length=length,
            source=place,
            queries=queries[members],
            keys=keys[np.isin(owners, members)],
            key_counts=key_counts[members],
        )
        for place, (members, length) in enumerate(found)
    ]


def _long(
    square: np.ndarray,
    rows: np.ndarray,
    seen: np.ndarray,
    alone: np.ndarray,
    width: int,
    lone_flops: float,
    piece_rows: int | None,
) -> Iterator[tuple[np.ndarray, int]]:
    """Sequences of each call for long parts, and the call's length."""
    flops = _flops(square, rows, seen, width)
    # The longest first: while the GPU computes them, the host prepares the others.
    left = np.argsort(-flops, kind="stable")
    while len(left):
        first, members, length = left[0], left[:1], 0
        if piece_rows is not None:
            length = _length(bool(square[first]), int(rows[first]), int(seen[first]), piece_rows)
        if length and not square[first] and flops[first] < _BATCH_FLOPS:
            alike = ~square[left] & (seen[left] == seen[first])
            members = np.sort(left[alike & (rows[left] >= _EVEN * rows[first])])
        is_long = alone[first] or (len(members) > 1 and flops[members].sum() >= lone_flops)
        if is_long:
            yield members, length
        left = left[~np.isin(left, members if is_long else first)]


def backward_groups(groups: list[Group], piece_rows: int) -> list[Group]:
    """The calls of backward: lone ones in pieces, of which the shortest have `piece_rows` rows."""
    return [piece for group in groups for piece in _pieces(group, piece_rows)]


def _sequences(
    parts: AttentionParts, width: int, lone_flops: float
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Parts as sequences: mounts of the same rows are one, small ones cut to have the same rows.

    Returns:
        Whether each is a square, its query rows, all intervals of keys, and the sequence of each.
    """
    num_parts = len(parts.queries)
    square = np.arange(num_parts) < parts.num_squares
    flops = _flops(square, _lengths(parts.queries), _lengths(parts.keys), width)
    is_mount = np.arange(num_parts) >= num_parts - parts.num_mounts
    others = np.flatnonzero(~is_mount)
    queries, keys, owners = [parts.queries[others]], [parts.keys[others]], [np.arange(len(others))]
    for mounts, cut in (
        (np.flatnonzero(is_mount & (flops >= lone_flops)), False),
        (np.flatnonzero(is_mount & (flops < lone_flops)), True),
    ):
        rows, seen = parts.queries[mounts], parts.keys[mounts]
        if cut:
            bounds = np.unique(rows)
            members, cells = by_cell(rows, bounds)
            rows, seen = np.stack([bounds[cells], bounds[cells + 1]], axis=1), seen[members]
        found, owner = np.unique(rows, axis=0, return_inverse=True)
        order = np.argsort(owner, kind="stable")
        owners.append(owner[order] + sum(map(len, queries)))
        queries.append(found)
        keys.append(seen[order])
    all_queries = np.concatenate(queries)
    is_square = np.append(square[others], np.zeros(len(all_queries) - len(others), dtype=bool))
    return is_square, all_queries, np.concatenate(keys), np.concatenate(owners)


def _fused(
    square: np.ndarray, queries: np.ndarray, keys: np.ndarray, owners: np.ndarray, alone: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Small squares and the small rectangles of the same rows as one sequence each.

    Returns:
        Which sequences are left, all intervals of keys, and the sequence of each.
    """
    small_squares = np.flatnonzero(square & ~alone)
    of_rows = {tuple(queries[n].tolist()): n for n in small_squares.tolist()}
    target = np.array(
        [n if alone[n] else of_rows.get(tuple(queries[n].tolist()), n) for n in range(len(queries))]
    )
    kept = np.unique(target)
    owners, is_own = np.searchsorted(kept, target[owners]), square[owners]
    # The last keys of a causal sequence are its own rows.
    order = np.lexsort((is_own, owners))
    return kept, keys[order], owners[order]


def _seen(keys: np.ndarray, owners: np.ndarray, num_sequences: int) -> np.ndarray:
    return np.bincount(owners, _lengths(keys), num_sequences).astype(np.int64)


def _lengths(intervals: np.ndarray) -> np.ndarray:
    return intervals[:, 1] - intervals[:, 0]


def _flops(square: np.ndarray, rows: np.ndarray, keys: np.ndarray, width: int) -> np.ndarray:
    return 4.0 * width * (rows * keys - np.where(square, 0.5, 0.0) * rows**2)


def _size_class(lengths: np.ndarray) -> np.ndarray:
    excess = np.maximum(lengths, _SMALLEST) / _SMALLEST
    return np.ceil(np.log(excess) / np.log(_CLASS_RATIO) - 1e-9).astype(np.int64)


def _length(square: bool, rows: int, keys: int, least: int) -> int:
    """Rows with padding of a square, or of a rectangle with a piece's keys; else 0."""
    if square or _is_exact(keys, _step(least)):
        return rows + _padding(rows, least)
    return 0


def _step(least: int) -> int:
    return max(least // _STEPS, 1)


def _padding(length: int, least: int) -> int:
    return -length % max(least // 8, 1, 1 << max(length.bit_length() - _PADDED_DIGITS, 0))


def _pieces(group: Group, least: int) -> Iterator[Group]:
    """What backward computes of a call: of a long lone one, pieces."""
    begin, end = group.queries[0].tolist()
    num_keys = int(group.key_begins[-1])
    is_short = not group.square and (end - begin) * num_keys < _WORTH_CUTTING * least**2
    if not group.lone or len(group.queries) > 1 or is_short:
        yield group
    elif group.square:
        for first in range(0, num_keys, _MOST_KEYS):
            last = min(first + _MOST_KEYS, num_keys)
            own = (begin + first, begin + last)
            yield _piece(group, own, (first, last), least, square=True)
            for rows in _even_rows(begin + last, end, least):
                yield _piece(group, rows, (first, last), least, square=False)
    else:
        for keys in _key_intervals(num_keys, least):
            is_exact = _is_exact(keys[1] - keys[0], least)
            for rows in _even_rows(begin, end, least) if is_exact else [(begin, end)]:
                yield _piece(group, rows, keys, least, square=False)


def _even_rows(begin: int, end: int, least: int) -> Iterator[tuple[int, int]]:
    """Rows in pieces of the longest and two of about one length."""
    while end - begin > 2 * _MOST_ROWS:
        yield begin, begin + _MOST_ROWS
        begin += _MOST_ROWS
    if end - begin > _MOST_ROWS:
        half = (end - begin) // 2
        half += _padding(half, least)
        yield begin, begin + half
        begin += half
    if begin < end:
        yield begin, end


def _piece(
    group: Group, rows: tuple[int, int], keys: tuple[int, int], least: int, *, square: bool
) -> Group:
    """The pairs of `rows` and the keys that stand in the call at `keys`."""
    begins = begins_of(group.keys)
    parts = np.stack([np.maximum(begins[:-1], keys[0]), np.minimum(begins[1:], keys[1])], axis=1)
    found = (parts - begins[:-1, None] + group.keys[:, :1])[parts[:, 0] < parts[:, 1]]
    return replace(
        group,
        square=square,
        length=_length(square, rows[1] - rows[0], keys[1] - keys[0], least),
        queries=np.array([rows]),
        keys=found,
        key_counts=np.array([len(found)]),
    )


def _key_intervals(num_keys: int, least: int) -> Iterator[tuple[int, int]]:
    """All keys in pieces of exact lengths, then a short rest."""
    enough, begin = max(least, min(num_keys, _MOST_KEYS) // _REST), 0
    while num_keys - begin >= enough:
        length = few_digits(min(num_keys - begin, _MOST_KEYS), _DIGITS)
        yield begin, begin + length
        begin += length
    if begin < num_keys:
        yield begin, num_keys


def _is_exact(length: int, least: int) -> bool:
    return length >= least and length == few_digits(length, _DIGITS)
