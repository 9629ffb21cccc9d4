"""Triton kernels of the norm: a program owns a few whole rows."""

# pyright: reportArgumentType=false, reportOperatorIssue=false, reportGeneralTypeIssues=false

from __future__ import annotations

import triton
import triton.language as tl


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
