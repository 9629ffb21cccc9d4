"""Mamba-2 recurrence in PyTorch: all chunks at once, then one step per level of chunks."""

from __future__ import annotations

import torch

from tree_kernels.gated_delta_rule.naive import pairwise_decay
from tree_kernels.layout import ChunkTable, TreeLayout


def naive_tree_ssd(
    x: torch.Tensor,
    dt: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    c: torch.Tensor,
    d: torch.Tensor | None,
    layout: TreeLayout,
    *,
    chunk_size: int | None,
) -> torch.Tensor:
    """See `op.tree_ssd`; README.md names the quantities."""
    chunks = layout.chunks(chunk_size)
    group = x.shape[1] // b.shape[1]
    wide = _wide(x)
    step = _wide(dt)
    keys = _heads_first(chunks, _wide(b)).repeat_interleave(group, 1)
    queries = _heads_first(chunks, _wide(c)).repeat_interleave(group, 1)
    values = _heads_first(chunks, wide * step[..., None])
    decay = _heads_first(chunks, step.double() * a.double()).cumsum(2)
    from_start = decay.exp().to(wide.dtype)[..., None]
    to_end = (decay[:, :, -1:] - decay).exp().to(wide.dtype)[..., None]

    written = (keys * to_end).mT @ values
    states = _scan(chunks, written, from_start[:, :, -1:])
    within = (queries @ keys.mT) * pairwise_decay(decay, wide.dtype)
    out = chunks.scatter(((queries * from_start) @ states + within @ values).transpose(1, 2))
    if d is not None:
        out = out + d.to(wide.dtype)[:, None] * wide
    return out.to(x.dtype)


def _wide(values: torch.Tensor) -> torch.Tensor:
    return values if values.dtype == torch.float64 else values.float()


def _heads_first(chunks: ChunkTable, values: torch.Tensor) -> torch.Tensor:
    """`[T, H, ...]` to `[NC, H, C, ...]`."""
    return chunks.gather(values).transpose(1, 2)


def _scan(chunks: ChunkTable, written: torch.Tensor, chunk_decay: torch.Tensor) -> torch.Tensor:
    """State before each chunk, `[NC, H, N, P]`."""
    sizes = list(chunks.level_sizes)
    after = torch.zeros_like(written[: sizes[0]])
    states = []
    levels = zip(written.split(sizes), chunk_decay.split(sizes), strict=True)
    for level, (write, decay) in enumerate(levels):
        state = after[chunks.sources[level - 1]] if level else after
        after = state * decay + write
        states.append(state)
    return torch.cat(states)
