"""Checks of the norm's arguments and the choice of its implementation."""

from __future__ import annotations

import torch

from tree_kernels.rms_norm.naive import naive_rms_norm


def rms_norm(
    x: torch.Tensor, weight: torch.Tensor, gate: torch.Tensor | None = None, *, eps: float
) -> torch.Tensor:
    """Norm of each row, times a frozen weight, times `silu(gate)` where there is a gate.

    Args:
        x: `[..., D]`.
        weight: `[D]`, without gradient.
        gate: `[..., D]`; None leaves the gate out.
        eps: Added to the mean square.

    Returns:
        As `x`; differentiable in `x` and `gate`.

    Raises:
        ValueError: Shapes that do not fit each other, or a weight that asks for a gradient.
    """
    if weight.shape != x.shape[-1:]:
        raise ValueError(f"weight {tuple(weight.shape)}; allowed: {tuple(x.shape[-1:])}")
    if gate is not None and gate.shape != x.shape:
        raise ValueError(f"gate {tuple(gate.shape)}; allowed: {tuple(x.shape)}")
    if weight.requires_grad:
        raise ValueError("weight asks for a gradient; allowed: a frozen one")
    if x.device.type != "cuda" or x.dtype == torch.float64:
        return naive_rms_norm(x, weight, gate, eps)
    # Triton does not come with PyTorch's builds for the CPU.
    from tree_kernels.rms_norm.function import fused_rms_norm

    return fused_rms_norm(x, weight, gate, eps)
