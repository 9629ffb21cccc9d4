"""Checks of the convolution's arguments, and the choice between PyTorch and Triton.

CUDA tensors run the Triton kernels where `self_test.py` finds them right; CPU tensors run
`naive.py`, and so does float64 everywhere.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from tree_kernels.causal_conv.naive import naive_tree_causal_conv
from tree_kernels.layout import Layout


def tree_causal_conv(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    layout: Layout,
    *,
    silu: bool = False,
) -> torch.Tensor:
    """Depthwise convolution over each row and the W - 1 rows before it on its path.

    Args:
        x: Inputs, `[C + T, D]`. C is 0 for a whole tree; those of a piece begin with the C rows of
            other pieces that its windows reach.
        weight: Taps, oldest first, `[D, W]`.
        bias: `[D]`, or None.
        layout: The tree, or a piece of one; T rows. Mounts play no part.
        silu: Whether the outputs go through SiLU, before they are rounded.

    Returns:
        `[T, D]` in `x`'s type.

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
    if bias is not None and bias.shape != x.shape[1:]:
        raise ValueError(f"bias {tuple(bias.shape)}; allowed: [{x.shape[1]}]")
    return _implementation(x, weight, bias, silu)(x, weight, bias, layout, silu=silu)


def _implementation(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, silu: bool
) -> Callable[..., torch.Tensor]:
    if x.device.type != "cuda" or x.dtype == torch.float64:
        return naive_tree_causal_conv
    # Triton does not come with PyTorch's builds for the CPU.
    from tree_kernels.causal_conv.function import table_causal_conv
    from tree_kernels.causal_conv.self_test import kernels_work

    works = kernels_work(x.device, x.dtype, weight.shape[1], bias is not None, silu)
    return table_causal_conv if works else naive_tree_causal_conv
