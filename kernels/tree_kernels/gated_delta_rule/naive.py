"""Gated delta rule in PyTorch: all chunks at once, then one step per level of chunks."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from tree_kernels.chain_scan.naive import heads_first, pairwise_decay, states_behind
from tree_kernels.layout import ChunkTable, TreeLayout


def naive_tree_gated_delta_rule(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    log_decay: torch.Tensor,
    beta: torch.Tensor,
    layout: TreeLayout,
    *,
    initial_states: torch.Tensor | None,
    end_nodes: Sequence[int],
    chunk_size: int | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """See `op.tree_gated_delta_rule_with_states`; README.md names the quantities."""
    chunks = layout.chunks(chunk_size)
    group = value.shape[1] // key.shape[1]
    q = heads_first(chunks, query).repeat_interleave(group, 1) * query.shape[2] ** -0.5
    k = heads_first(chunks, key).repeat_interleave(group, 1)
    v = heads_first(chunks, value)
    b = heads_first(chunks, beta)[..., None]
    decay = heads_first(chunks, log_decay.double()).cumsum(2)
    between = pairwise_decay(decay, v.dtype)
    from_start = decay.exp().to(v.dtype)[..., None]
    to_end = (decay[:, :, -1:] - decay).exp().to(v.dtype)[..., None]

    system = (b * k) @ k.mT * between
    solved = torch.linalg.solve_triangular(
        system, torch.cat([b * v, b * k * from_start], -1), upper=False, unitriangular=True
    )
    writes, reads = solved.split([v.shape[-1], k.shape[-1]], -1)
    initial = _initial(initial_states, chunks.level_sizes[0], reads, writes)
    states, new_values = _scan(chunks, initial, writes, reads, k * to_end, from_start[:, :, -1:])
    out = (q * from_start) @ states + (q @ k.mT * between) @ new_values
    slots = chunks.slots[layout.tensor(layout.cu_seqlens[1:][list(end_nodes)] - 1)]
    ends = states_behind(slots, decay, k, states, new_values)
    return chunks.scatter(out.transpose(1, 2)).to(value.dtype), ends


def _initial(
    given: torch.Tensor | None, num_roots: int, reads: torch.Tensor, writes: torch.Tensor
) -> torch.Tensor:
    """State before each root, `[roots, HV, K, V]`."""
    if given is not None:
        return given.to(writes.dtype)
    return writes.new_zeros(num_roots, reads.shape[1], reads.shape[3], writes.shape[3])


def _scan(
    chunks: ChunkTable,
    after: torch.Tensor,
    writes: torch.Tensor,
    reads: torch.Tensor,
    keys_to_end: torch.Tensor,
    chunk_decay: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """State before each chunk, `[NC, H, K, V]`, and the values it writes, `[NC, H, C, V]`."""
    sizes = list(chunks.level_sizes)
    states, new_values = [], []
    levels = zip(*(x.split(sizes) for x in (writes, reads, keys_to_end, chunk_decay)), strict=True)
    for level, (write, read, key, decay) in enumerate(levels):
        state = after[chunks.sources[level - 1]] if level else after
        new_value = write - read @ state
        after = state * decay + key.mT @ new_value
        states.append(state)
        new_values.append(new_value)
    return torch.cat(states), torch.cat(new_values)
