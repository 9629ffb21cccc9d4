"""Checks of the convolution's arguments; the computation is `naive.py`'s."""

from __future__ import annotations

import torch

from tree_kernels.causal_conv.naive import naive_tree_causal_conv
from tree_kernels.layout import TreeLayout


def tree_causal_conv(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, layout: TreeLayout
) -> torch.Tensor:
    """Depthwise convolution over each row and the W - 1 rows before it on its path.

    Args:
        x: Inputs, `[T, D]`.
        weight: Taps, oldest first, `[D, W]`.
        bias: `[D]`, or None.
        layout: The tree; T rows. Mounts play no part.

    Returns:
        `[T, D]`, before any activation.

    Raises:
        ValueError: Shapes that do not fit each other or the layout.
    """
    if x.ndim != 2 or x.shape[0] != layout.num_tokens:
        raise ValueError(f"x {tuple(x.shape)}; allowed: [{layout.num_tokens}, D]")
    if weight.ndim != 2 or weight.shape[0] != x.shape[1]:
        raise ValueError(f"weight {tuple(weight.shape)}; allowed: [{x.shape[1]}, W]")
    return naive_tree_causal_conv(x, weight, bias, layout)
