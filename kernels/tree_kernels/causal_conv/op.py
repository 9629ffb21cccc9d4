"""Checks of the convolution's arguments; the computation is `naive.py`'s."""

from __future__ import annotations

import torch

from tree_kernels.causal_conv.naive import naive_tree_causal_conv
from tree_kernels.layout import Layout


def tree_causal_conv(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, layout: Layout
) -> torch.Tensor:
    """Depthwise convolution over each row and the W - 1 rows before it on its path.

    Args:
        x: Inputs, `[C + T, D]`. C is 0 for a whole tree; those of a piece begin with the C rows of
            other pieces that its windows reach.
        weight: Taps, oldest first, `[D, W]`.
        bias: `[D]`, or None.
        layout: The tree, or a piece of one; T rows. Mounts play no part.

    Returns:
        `[T, D]`, before any activation.

    Raises:
        ValueError: Shapes that do not fit each other or the layout.
    """
    if x.ndim != 2 or weight.ndim != 2 or weight.shape[0] != x.shape[1]:
        raise ValueError(
            f"x {tuple(x.shape)} and weight {tuple(weight.shape)}; allowed: [rows, D] and [D, W]"
        )
    rows = layout.num_conv_rows(weight.shape[1])
    if x.shape[0] != rows:
        raise ValueError(f"x {tuple(x.shape)}; allowed: [{rows}, D]")
    return naive_tree_causal_conv(x, weight, bias, layout)[rows - layout.num_tokens :]
