"""What both recurrences need in PyTorch: chunks by head, decays, states behind rows."""

from __future__ import annotations

import torch

from tree_kernels.layout import ChunkTable


def in_state_type(values: torch.Tensor) -> torch.Tensor:
    """`values` in float32, or in float64 where they are."""
    return values if values.dtype == torch.float64 else values.float()


def heads_first(chunks: ChunkTable, values: torch.Tensor) -> torch.Tensor:
    """`[T, H, ...]` to `[NC, H, C, ...]` in the type of the state."""
    return chunks.gather(in_state_type(values)).transpose(1, 2)


def pairwise_decay(log_decay: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """`exp(c[i] - c[j])` where j <= i, else 0.

    Args:
        log_decay: Running sums, `[..., C]` float64: their differences cancel in float32.
        dtype: Type of the result, `[..., C, C]`.
    """
    future = torch.ones(
        log_decay.shape[-1], log_decay.shape[-1], dtype=torch.bool, device=log_decay.device
    ).triu(1)
    between = (log_decay[..., :, None] - log_decay[..., None, :]).to(dtype)
    return between.masked_fill(future, float("-inf")).exp()


def states_behind(
    slots: torch.Tensor,
    decay: torch.Tensor,
    keys: torch.Tensor,
    states: torch.Tensor,
    new_values: torch.Tensor,
) -> torch.Tensor:
    """State behind the row in each of `slots`, which may stand inside a chunk, `[E, HV, K, V]`."""
    size = decay.shape[2]
    chunk, place = slots // size, slots % size
    until = decay[chunk].gather(2, place[:, None, None].expand(-1, decay.shape[1], 1))
    future = torch.arange(size, device=slots.device)[None] > place[:, None]
    to_row = (until - decay[chunk]).to(keys.dtype).masked_fill(future[:, None], float("-inf")).exp()
    kept = states[chunk] * until.exp().to(keys.dtype)[..., None]
    return kept + (keys[chunk] * to_row[..., None]).mT @ new_values[chunk]
