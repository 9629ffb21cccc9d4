"""Tree attention in PyTorch: tiles of queries against their gathered keys."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from tree_kernels.layout import Layout, TileBatch


def naive_tree_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    layout: Layout,
    *,
    scale: float,
    mounted: bool,
) -> torch.Tensor:
    """See `op.tree_attention`."""
    tiles = layout.tiles(mounted=mounted)
    outputs = [_tile_batch(query, key, value, batch, scale) for batch in tiles.batches]
    return torch.cat(outputs)[tiles.slots]


def _tile_batch(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, batch: TileBatch, scale: float
) -> torch.Tensor:
    """Attention of one batch of tiles, `[B * Q, HQ, D]`."""
    num_tiles, tile = batch.query_rows.shape
    heads, dim = key.shape[1:]
    group = query.shape[1] // heads
    # The query heads of one key head become further queries: keys and values are never repeated.
    tiled = query[batch.query_rows].view(num_tiles, tile, heads, group, dim)
    tiled = tiled.permute(0, 2, 3, 1, 4).reshape(num_tiles, heads, group * tile, dim)
    mask = batch.mask()[:, None, None].expand(-1, 1, group, -1, -1).flatten(2, 3)
    out = F.scaled_dot_product_attention(
        tiled,
        key[batch.key_rows].transpose(1, 2),
        value[batch.key_rows].transpose(1, 2),
        attn_mask=mask,
        scale=scale,
    )
    out = out.view(num_tiles, heads, group, tile, dim).permute(0, 3, 1, 2, 4)
    return out.reshape(num_tiles * tile, heads * group, dim)
