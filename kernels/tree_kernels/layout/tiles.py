"""Query tiles for attention: consecutive rows, and every key that any of them sees.

Memory grows with the keys on the paths, never with the square of the strip.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

if TYPE_CHECKING:
    from tree_kernels.layout.tree import TreeLayout

_TILE_SIZES = ((4096, 64), (32_768, 128), (131_072, 256))
_MAX_PADDING = 1.25
"""A batch of tiles may compute this much more than its tiles need."""
_MAX_BATCH_CELLS = 1 << 25
"""Query-key pairs of a batch: 32 MiB of mask."""
_MAX_CACHED_CELLS = 1 << 27
"""Masks of a layout beyond this many pairs are rebuilt in every layer."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TileBatch:
    """Tiles that are computed together; `[B, Q]` query rows and `[B, S]` keys."""

    query_rows: torch.Tensor
    """`[B, Q]` int64; the strip's last row repeats where the last tile is short."""
    key_rows: torch.Tensor
    """`[B, S]` int64; 0 where a tile is padded."""
    query_begin: torch.Tensor
    """First query row that sees the key, `[B, S]` int64."""
    query_end: torch.Tensor
    """End of the query rows that see the key, `[B, S]` int64; 0 where padded."""
    cached_mask: torch.Tensor | None

    def mask(self) -> torch.Tensor:
        """Which query sees which key, `[B, Q, S]` bool."""
        if self.cached_mask is not None:
            return self.cached_mask
        return _visible(self.query_rows, self.query_begin, self.query_end)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class AttentionTiles:
    """All tiles of a strip."""

    batches: tuple[TileBatch, ...]
    slots: torch.Tensor
    """Place of each row in the flattened, concatenated `query_rows`, `[T]` int64."""

    @property
    def num_cells(self) -> int:
        """Query-key pairs that are computed, padding included."""
        return sum(batch.query_rows.numel() * batch.key_rows.shape[1] for batch in self.batches)


def default_tile_size(num_tokens: int) -> int:
    """Larger tiles for longer strips: gathering a key costs as much as about 65 queries."""
    return next((size for limit, size in _TILE_SIZES if num_tokens <= limit), 512)


def build_tiles(
    layout: TreeLayout,
    *,
    mounted: bool,
    size: int,
    queries: np.ndarray | None = None,
    keys: np.ndarray | None = None,
) -> AttentionTiles:
    """Cut the strip into tiles of `size` rows and batch tiles of similar key counts.

    Args:
        layout: The whole strip.
        mounted: Whether mounted keys are seen.
        size: Rows of a tile.
        queries: Rows that are computed, ascending; None computes all. Row numbers of queries
            count these.
        keys: Rows whose keys are given, in this order; None gives all. Row numbers of keys count
            these.
    """
    rows = np.arange(layout.num_tokens) if queries is None else queries
    given = np.arange(layout.num_tokens) if keys is None else keys
    key_place = np.zeros(layout.num_tokens, dtype=np.int64)
    key_place[given] = np.arange(len(given))
    exits = np.repeat(layout.exits, np.diff(layout.cu_seqlens))
    begins = list(range(0, len(rows), size))
    columns = [
        _tile_keys(layout, exits, rows[begin : begin + size], mounted=mounted) for begin in begins
    ]
    columns = [np.stack([key_place[c[0]], *np.searchsorted(rows, c[1:])]) for c in columns]
    groups = _grouped([tile.shape[1] for tile in columns], size)
    total = sum(len(group) * size * columns[group[0]].shape[1] for group in groups)
    batches = []
    slots = np.zeros(len(rows), dtype=np.int64)
    offset = 0
    for group in groups:
        places = np.array([begins[tile] for tile in group])[:, None] + np.arange(size)[None]
        real = places < len(rows)
        slots[places[real]] = offset + np.flatnonzero(real.ravel())
        offset += places.size
        batch = _batch(layout, np.minimum(places, len(rows) - 1), [columns[t] for t in group])
        batches.append(_with_mask(batch) if total <= _MAX_CACHED_CELLS else batch)
    return AttentionTiles(batches=tuple(batches), slots=layout.tensor(slots))


def _tile_keys(
    layout: TreeLayout, exits: np.ndarray, tile: np.ndarray, *, mounted: bool
) -> np.ndarray:
    """Columns (key row, first query, end of queries) of the ascending rows `tile`, `[3, S]`.

    Keys before the tile that any of its rows sees are ancestors of its first row: a subtree that
    ends after that row and began before it holds it.
    """
    path = np.concatenate([layout.ancestor_rows(int(tile[0])), np.arange(tile[0], tile[-1] + 1)])
    path = path[tile[np.searchsorted(tile, path)] < exits[path]]
    columns = [np.stack([path, path, exits[path]])]
    for mount in layout.mounts if mounted else ():
        first, end = np.searchsorted(tile, [mount.query_begin, mount.query_end])
        if first < end:
            rows = np.arange(mount.key_begin, mount.key_end)
            limits = np.broadcast_to([[mount.query_begin], [mount.query_end]], (2, len(rows)))
            columns.append(np.concatenate([rows[None], limits]))
    return np.concatenate(columns, axis=1)


def _grouped(num_keys: list[int], size: int) -> list[list[int]]:
    """Tiles by falling key count, cut where padding or a batch's size would grow too far."""
    order = sorted(range(len(num_keys)), key=lambda tile: -num_keys[tile])
    groups: list[list[int]] = [[]]
    needed = 0
    for tile in order:
        group = groups[-1]
        widest = num_keys[group[0]] if group else num_keys[tile]
        cells = (len(group) + 1) * widest
        needed += num_keys[tile]
        if group and (cells * size > _MAX_BATCH_CELLS or cells > _MAX_PADDING * needed):
            groups.append([tile])
            needed = num_keys[tile]
        else:
            group.append(tile)
    return groups


def _batch(layout: TreeLayout, rows: np.ndarray, keys: list[np.ndarray]) -> TileBatch:
    columns = np.zeros((3, len(keys), max(tile.shape[1] for tile in keys)), dtype=np.int64)
    for index, tile in enumerate(keys):
        columns[:, index, : tile.shape[1]] = tile
    return TileBatch(
        query_rows=layout.tensor(rows),
        key_rows=layout.tensor(columns[0]),
        query_begin=layout.tensor(columns[1]),
        query_end=layout.tensor(columns[2]),
        cached_mask=None,
    )


def _with_mask(batch: TileBatch) -> TileBatch:
    return TileBatch(
        query_rows=batch.query_rows,
        key_rows=batch.key_rows,
        query_begin=batch.query_begin,
        query_end=batch.query_end,
        cached_mask=_visible(batch.query_rows, batch.query_begin, batch.query_end),
    )


def _visible(rows: torch.Tensor, begin: torch.Tensor, end: torch.Tensor) -> torch.Tensor:
    query = rows[:, :, None]
    return (begin[:, None] <= query) & (query < end[:, None])
