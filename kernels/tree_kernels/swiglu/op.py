"""Checks of the activation's arguments and the choice of its implementation."""

from __future__ import annotations

import torch
import torch.nn.functional as F


def swiglu(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """`silu(gate) * up`, each `[..., D]`; differentiable in both.

    Raises:
        ValueError: Shapes or types differ.
    """
    if gate.shape != up.shape or gate.dtype != up.dtype:
        raise ValueError(
            f"gate {tuple(gate.shape)} {gate.dtype} and up {tuple(up.shape)} {up.dtype}; "
            "allowed: one shape and type"
        )
    if gate.device.type != "cuda" or gate.dtype == torch.float64:
        return F.silu(gate) * up
    # Triton does not come with PyTorch's builds for the CPU.
    from tree_kernels.swiglu.function import fused_swiglu

    return fused_swiglu(gate, up)
