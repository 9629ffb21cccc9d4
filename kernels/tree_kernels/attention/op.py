"""Checks of tree attention's arguments, and the choice of what computes it."""

from __future__ import annotations

import os

import torch
import torch.nn.functional as F

from tree_kernels.attention import groups
from tree_kernels.attention.host import host_tree_attention
from tree_kernels.attention.naive import naive_tree_attention
from tree_kernels.layout import AttentionParts, Layout

# cuDNN compiles a plan for every pair of lengths, 70 ms each; so PyTorch rounds lengths to powers
# of two for its plans and masks the rest. PyTorch reads this when cuDNN's attention first runs in
# the process, wherever that is: hence so early.
os.environ.setdefault("TORCH_CUDNN_SDPA_AVOID_RECOMPILE", "1")

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
    if query.device.type != "cuda":
        return host_tree_attention(query, key, value, layout.parts(mounted=mounted), scale)
    parts = layout.parts(mounted=mounted, grid=groups.grid_of(groups.PIECE_ROWS))
    if query.dtype == torch.float64:
        return naive_tree_attention(query, key, value, parts, scale)
    return _on_device(query, key, value, parts, scale)


def _on_device(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    parts: AttentionParts,
    scale: float,
) -> torch.Tensor:
    """With the libraries that work there."""
    # Triton does not come with PyTorch's builds for the CPU.
    from tree_kernels.attention.device import device_tree_attention
    from tree_kernels.attention.self_test import batch_library, lone_library

    dim = query.shape[2]
    if missing := -dim % _DIM_MULTIPLE:
        query, key, value = (F.pad(each, (0, missing)) for each in (query, key, value))
    kind = (query.device, query.dtype, query.shape[1], key.shape[1], query.shape[2])
    batch, lone = batch_library(*kind), lone_library(*kind)
    if batch is None:
        return naive_tree_attention(query, key, value, parts, scale)[..., :dim]
    # cuDNN addresses rows by int32 offsets, and leaves the order of a query's sums to the device.
    if query.numel() >= 2**31 or torch.are_deterministic_algorithms_enabled():
        lone = None
    libraries = (batch(), lone() if lone is not None else None)
    return device_tree_attention(query, key, value, parts, scale, libraries)[..., :dim]
