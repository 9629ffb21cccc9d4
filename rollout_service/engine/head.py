"""The product of hidden states with the output embedding, in a wider type than theirs.

The trainer's is `tree_kernels.logprob.head`: a service imports no kernels (docs/design.md, layout).
"""

from __future__ import annotations

import torch
from torch import Tensor

_BLOCK_BYTES = 1 << 20
"""Of the weight that are widened at a time on a CPU: they stay in its cache. SmolLM2's head takes
one core 13 ms so, 85 ms widened whole, and 8 ms in bfloat16."""


def head_logits(hidden: Tensor, weight: Tensor, dtype: torch.dtype) -> Tensor:
    """`hidden @ weight.T` in `dtype`, without rounding on the way or a wide copy of the weight.

    Args:
        hidden: `[N, hidden]`.
        weight: `[V, hidden]`.
        dtype: Of the result, wider than theirs.

    Returns:
        `[N, V]`.
    """
    if hidden.device.type == "cuda":
        # The product writes its float32 sums out.
        return torch.mm(hidden, weight.t(), out_dtype=dtype)
    wide = hidden.to(dtype)
    logits = wide.new_empty(len(hidden), len(weight))
    block = max(_BLOCK_BYTES // (weight.shape[1] * dtype.itemsize), 1)
    buffer = wide.new_empty(block, weight.shape[1])
    for rows, out in zip(weight.split(block), logits.split(block, 1), strict=True):
        torch.mm(wide, buffer[: len(rows)].copy_(rows).t(), out=out)
    return logits
