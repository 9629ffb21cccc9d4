"""Checks of tree attention's arguments, and the choice of what computes it."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from tree_kernels.attention.host import host_tree_attention
from tree_kernels.attention.naive import naive_tree_attention
from tree_kernels.layout import Layout

_DIM_MULTIPLE = 8
"""The libraries' kernels read 16 bytes at a time; zeros behind a head change nothing."""


def tree_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    layout: Layout,
    *,
    scale: float,
    mounted: bool,
) -> torch.Tensor:
    """Softmax attention of each row over its path and, if `mounted`, its mounts.

    Args:
        query: Rotated queries, `[T, HQ, D]`.
        key: Rotated keys at their own positions, `[S + T, H, D]`; HQ is a multiple of H. S is 0
            for a whole tree; those of a piece begin with the S rows that it sees in other pieces.
        value: Values, `[S + T, H, D]`.
        layout: The tree, or a piece of one; T rows.
        scale: Factor of the scores.
        mounted: Whether this layer reads mounted spans.

    Returns:
        `[T, HQ, D]`, differentiable in all three inputs, mounted keys and values included.

    Raises:
        ValueError: Shapes that do not fit each other or the layout.
    """
    rows, keys = layout.num_tokens, layout.num_keys
    if query.ndim != 3 or key.ndim != 3 or query.shape[0] != rows or key.shape[0] != keys:
        raise ValueError(
            f"query {tuple(query.shape)} and key {tuple(key.shape)}; "
            f"allowed: [{rows}, heads, D] and [{keys}, heads, D]"
        )
    if key.shape != value.shape:
        raise ValueError(f"key {tuple(key.shape)} and value {tuple(value.shape)} differ")
    if query.shape[2] != key.shape[2] or query.shape[1] % key.shape[1]:
        raise ValueError(
            f"query heads {tuple(query.shape[1:])} are no multiple of key heads "
            f"{tuple(key.shape[1:])}"
        )
    parts = layout.parts(mounted=mounted)
    if query.device.type != "cuda":
        return host_tree_attention(query, key, value, parts, scale)
    if query.dtype == torch.float64:
        return naive_tree_attention(query, key, value, parts, scale)
    # Triton does not come with PyTorch's builds for the CPU.
    from tree_kernels.attention.device import device_tree_attention

    dim = query.shape[2]
    padding = (0, -dim % _DIM_MULTIPLE)
    query, key, value = (
        F.pad(each, padding) if padding[1] else each for each in (query, key, value)
    )
    return device_tree_attention(query, key, value, parts, scale)[..., :dim]
