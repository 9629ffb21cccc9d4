"""Checks of the arguments, and the choice between PyTorch and Triton.

CUDA tensors run the Triton kernels where `self_test.py` finds them right; CPU tensors run
`naive.py`, and so does float64 everywhere.
"""

from __future__ import annotations

import torch

from tree_kernels.rowwise import naive


def l2_normalised(x: torch.Tensor) -> torch.Tensor:
    """`x / sqrt(sum(x^2) + 1e-6)` over the last axis.

    Args:
        x: `[T, H, K]`; its rows may stand apart, as a slice of wider ones does.

    Returns:
        `[T, H, K]`; in `x`'s type on a GPU, on the CPU in float32 at least, as engines there do.

    Raises:
        ValueError: `x` has another number of axes.
    """
    if x.ndim != 3:
        raise ValueError(f"x {tuple(x.shape)}; allowed: [T, H, K]")
    if not _in_triton(x):
        return naive.naive_l2_normalised(x)
    from tree_kernels.rowwise.function import fused_l2_normalised

    return fused_l2_normalised(x)


def delta_gates(
    step: torch.Tensor, beta: torch.Tensor, a_log: torch.Tensor, dt_bias: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """The gated delta rule's log decay and write strength.

    Args:
        step: Projected steps, `[T, H]`.
        beta: Projected write strengths, `[T, H]`.
        a_log: Log of the decay's rate, `[H]`.
        dt_bias: Bias of the steps, `[H]`.

    Returns:
        `-exp(a_log) softplus(step + dt_bias)` and `sigmoid(beta)`, `[T, H]`; float32 on a GPU.

    Raises:
        ValueError: Shapes that do not fit each other.
    """
    if step.ndim != 2 or step.shape != beta.shape:
        raise ValueError(f"step {tuple(step.shape)} and beta {tuple(beta.shape)}; allowed: [T, H]")
    if a_log.shape != step.shape[1:] or dt_bias.shape != step.shape[1:]:
        raise ValueError(
            f"a_log {tuple(a_log.shape)} and dt_bias {tuple(dt_bias.shape)}; "
            f"allowed: [{step.shape[1]}]"
        )
    if not _in_triton(step):
        return naive.naive_delta_gates(step, beta, a_log, dt_bias)
    from tree_kernels.rowwise.function import fused_delta_gates

    return fused_delta_gates(step, beta, a_log, dt_bias)


def _in_triton(values: torch.Tensor) -> bool:
    if values.device.type != "cuda" or values.dtype == torch.float64:
        return False
    # Triton does not come with PyTorch's builds for the CPU.
    from tree_kernels.rowwise.self_test import kernels_work

    return kernels_work(values.device, values.dtype)
