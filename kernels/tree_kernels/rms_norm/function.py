"""Host side of the Triton kernels and their place in autograd."""

from __future__ import annotations

from typing import Any

import torch
import triton

from tree_kernels.rms_norm import triton as kernels

_TILE = 4096
"""Elements of a program, where a row is not longer."""


def fused_rms_norm(
    x: torch.Tensor, weight: torch.Tensor, gate: torch.Tensor | None, eps: float
) -> torch.Tensor:
    """See `op.rms_norm`."""
    with torch.cuda.device_of(x):
        return _RmsNorm.apply(x, weight, gate, eps)


class _RmsNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, weight: torch.Tensor, gate: torch.Tensor | None, eps: float
    ) -> torch.Tensor:
        x = x.contiguous()
        gate = gate.contiguous() if gate is not None else None
        out = torch.empty_like(x)
        _launch(
            kernels.rms_norm_fwd_kernel, x, [x, weight, x if gate is None else gate, out], gate, eps
        )
        ctx.save_for_backward(x, weight, gate)
        ctx.eps = eps
        return out

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, weight, gate = ctx.saved_tensors
        grad_x = torch.empty_like(x)
        grad_gate = torch.empty_like(gate) if gate is not None else None
        given = [x, weight, x if gate is None else gate, grads[0].contiguous(), grad_x]
        given.append(grad_x if grad_gate is None else grad_gate)
        _launch(kernels.rms_norm_bwd_kernel, x, given, gate, ctx.eps)
        return grad_x, None, grad_gate, None


def _launch(
    kernel: Any, x: torch.Tensor, tensors: list[torch.Tensor], gate: torch.Tensor | None, eps: float
) -> None:
    dim = x.shape[-1]
    rows = x.numel() // dim
    block_d = triton.next_power_of_2(dim)
    block_t = max(_TILE // block_d, 1)
    if rows:
        kernel[(triton.cdiv(rows, block_t),)](
            *tensors,
            rows,
            eps,
            D=dim,
            BLOCK_T=block_t,
            BLOCK_D=block_d,
            GATED=gate is not None,
            num_warps=8,
        )
