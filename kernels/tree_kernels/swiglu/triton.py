"""Triton kernels of the gated activation, element by element."""

# pyright: reportArgumentType=false, reportOperatorIssue=false, reportGeneralTypeIssues=false

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def swiglu_fwd_kernel(gate, up, out, N, BLOCK: tl.constexpr):
    """`silu(g) u`."""
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = place < N
    g = tl.load(gate + place, mask=mask, other=0.0).to(tl.float32)
    u = tl.load(up + place, mask=mask, other=0.0).to(tl.float32)
    y = u * g / (1.0 + tl.exp(-g))
    tl.store(out + place, y.to(out.dtype.element_ty), mask=mask)


@triton.jit
def swiglu_bwd_kernel(gate, up, grad_out, grad_gate, grad_up, N, BLOCK: tl.constexpr):
    """Gradients of both."""
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = place < N
    g = tl.load(gate + place, mask=mask, other=0.0).to(tl.float32)
    u = tl.load(up + place, mask=mask, other=0.0).to(tl.float32)
    slope = tl.load(grad_out + place, mask=mask, other=0.0).to(tl.float32)
    sigmoid = 1.0 / (1.0 + tl.exp(-g))
    by_gate = slope * u * sigmoid * (1.0 + g * (1.0 - sigmoid))
    tl.store(grad_gate + place, by_gate.to(grad_gate.dtype.element_ty), mask=mask)
    by_up = slope * g * sigmoid
    tl.store(grad_up + place, by_up.to(grad_up.dtype.element_ty), mask=mask)
