"""The product of hidden states with the output embedding, in a type of its own."""

from __future__ import annotations

import torch

_WIDE_BYTES = 1 << 20
"""Of the weight that are widened at a time where a product cannot widen its result: they stay in a
CPU's cache."""


def head_logits(hidden: torch.Tensor, weight: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """`hidden @ weight.T` in `dtype`, without rounding on the way; not differentiable.

    On CUDA the product of 16-bit inputs writes its float32 sums out. Elsewhere rows of the weight
    are widened a block at a time: no wide copy of it stays.

    Args:
        hidden: `[n, D]`.
        weight: `[V, D]`.
        dtype: Of the result, at least as wide as theirs.

    Returns:
        `[n, V]`.
    """
    if dtype == hidden.dtype:
        return hidden @ weight.t()
    if hidden.device.type == "cuda":
        return torch.mm(hidden, weight.t(), out_dtype=dtype)
    wide = hidden.to(dtype)
    logits = wide.new_empty(len(hidden), len(weight))
    block = max(_WIDE_BYTES // (weight.shape[1] * dtype.itemsize), 1)
    buffer = wide.new_empty(block, weight.shape[1])
    for rows, out in zip(weight.split(block), logits.split(block, 1), strict=True):
        torch.mm(wide, buffer[: len(rows)].copy_(rows).t(), out=out)
    return logits
