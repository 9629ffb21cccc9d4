"""Triton kernels of the norm: a program owns a few whole rows."""

# pyright: reportArgumentType=false, reportOperatorIssue=false, reportGeneralTypeIssues=false
# pyright: reportCallIssue=false

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

_TILE = 4096
"""Elements of a program, where a row is not longer."""


@triton.jit
def rms_norm_fwd_kernel(
    x,
    weight,
    gate,
    out,
    T,
    eps,
    D: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_D: tl.constexpr,
    GATED: tl.constexpr,
):
    """`n w`, times `silu(g)` if GATED."""
    row = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    dim = tl.arange(0, BLOCK_D)
    mask = (row < T)[:, None] & (dim < D)[None, :]
    place = row.to(tl.int64)[:, None] * D + dim[None, :]
    rows = tl.load(x + place, mask=mask, other=0.0).to(tl.float32)
    factor = tl.load(weight + dim, mask=dim < D, other=0.0).to(tl.float32)
    scale = 1.0 / tl.sqrt(tl.sum(rows * rows, 1) / D + eps)
    y = rows * scale[:, None] * factor[None, :]
    if GATED:
        g = tl.load(gate + place, mask=mask, other=0.0).to(tl.float32)
        y = y * g / (1.0 + tl.exp(-g))
    tl.store(out + place, y.to(out.dtype.element_ty), mask=mask)


@triton.jit
def rms_norm_bwd_kernel(
    x,
    weight,
    gate,
    grad_out,
    grad_x,
    grad_gate,
    T,
    eps,
    D: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_D: tl.constexpr,
    GATED: tl.constexpr,
):
    """Gradients of x and, if GATED, of the gate."""
    row = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    dim = tl.arange(0, BLOCK_D)
    mask = (row < T)[:, None] & (dim < D)[None, :]
    place = row.to(tl.int64)[:, None] * D + dim[None, :]
    rows = tl.load(x + place, mask=mask, other=0.0).to(tl.float32)
    slope = tl.load(grad_out + place, mask=mask, other=0.0).to(tl.float32)
    factor = tl.load(weight + dim, mask=dim < D, other=0.0).to(tl.float32)
    scale = 1.0 / tl.sqrt(tl.sum(rows * rows, 1) / D + eps)
    normed = rows * scale[:, None]
    slope = slope * factor[None, :]
    if GATED:
        g = tl.load(gate + place, mask=mask, other=0.0).to(tl.float32)
        sigmoid = 1.0 / (1.0 + tl.exp(-g))
        by_gate = slope * normed * sigmoid * (1.0 + g * (1.0 - sigmoid))
        tl.store(grad_gate + place, by_gate.to(grad_gate.dtype.element_ty), mask=mask)
        slope = slope * g * sigmoid
    shared = tl.sum(slope * normed, 1) / D
    by_x = (slope - normed * shared[:, None]) * scale[:, None]
    tl.store(grad_x + place, by_x.to(grad_x.dtype.element_ty), mask=mask)


def fused_rms_norm(
    x: torch.Tensor, weight: torch.Tensor, gate: torch.Tensor | None, eps: float
) -> torch.Tensor:
    """See `op.rms_norm`."""
    return _RmsNorm.apply(x, weight, gate, eps)


class _RmsNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, weight: torch.Tensor, gate: torch.Tensor | None, eps: float
    ) -> torch.Tensor:
        x = x.contiguous()
        gate = gate.contiguous() if gate is not None else None
        out = torch.empty_like(x)
        _launch(rms_norm_fwd_kernel, x, [x, weight, x if gate is None else gate, out], gate, eps)
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
        _launch(rms_norm_bwd_kernel, x, given, gate, ctx.eps)
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
