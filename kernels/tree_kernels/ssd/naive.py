"""Mamba-2 recurrence in PyTorch: all chunks at once, then one step per level of chunks."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from tree_kernels.chain_scan.naive import (
    heads_first,
    in_state_type,
    pairwise_decay,
    states_behind,
)
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
    initial_states: torch.Tensor | None,
    end_nodes: Sequence[int],
    chunk_size: int | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """See `op.tree_ssd_with_states`; README.md names the quantities."""
    chunks = layout.chunks(chunk_size)
    group = x.shape[1] // b.shape[1]
    wide = in_state_type(x)
    step = in_state_type(dt)
    keys = heads_first(chunks, b).repeat_interleave(group, 1)
    queries = heads_first(chunks, c).repeat_interleave(group, 1)
    values = heads_first(chunks, wide * step[..., None])
    decay = heads_first(chunks, step.double() * a.double()).cumsum(2)
    from_start = decay.exp().to(wide.dtype)[..., None]
    to_end = (decay[:, :, -1:] - decay).exp().to(wide.dtype)[..., None]

    written = (keys * to_end).mT @ values
    if initial_states is None:
        initial_states = torch.zeros_like(written[: chunks.level_sizes[0]])
    states = _scan(chunks, initial_states.to(wide.dtype), written, from_start[:, :, -1:])
    within = (queries @ keys.mT) * pairwise_decay(decay, wide.dtype)
    out = chunks.scatter(((queries * from_start) @ states + within @ values).transpose(1, 2))
    if d is not None:
        out = out + d.to(wide.dtype)[:, None] * wide
    slots = chunks.slots[layout.tensor(layout.cu_seqlens[1:][list(end_nodes)] - 1)]
    return out.to(x.dtype), states_behind(slots, decay, keys, states, values)


def _scan(
    chunks: ChunkTable, after: torch.Tensor, written: torch.Tensor, chunk_decay: torch.Tensor
) -> torch.Tensor:
    """State before each chunk, `[NC, H, N, P]`."""
    sizes = list(chunks.level_sizes)
    states = []
    levels = zip(written.split(sizes), chunk_decay.split(sizes), strict=True)
    for level, (write, decay) in enumerate(levels):
        state = after[chunks.sources[level - 1]] if level else after
        after = state * decay + write
        states.append(state)
    return torch.cat(states)
