"""Triton kernels of the gated activation, element by element."""

# pyright: reportArgumentType=false, reportOperatorIssue=false, reportGeneralTypeIssues=false
# pyright: reportCallIssue=false

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

_BLOCK = 4096


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


def fused_swiglu(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """See `op.swiglu`."""
    return _Swiglu.apply(gate, up)


class _Swiglu(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        gate, up = gate.contiguous(), up.contiguous()
        out = torch.empty_like(gate)
        _launch(swiglu_fwd_kernel, gate, up, out)
        ctx.save_for_backward(gate, up)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        gate, up = ctx.saved_tensors
        grad_gate, grad_up = torch.empty_like(gate), torch.empty_like(up)
        _launch(swiglu_bwd_kernel, gate, up, grads[0].contiguous(), grad_gate, grad_up)
        return grad_gate, grad_up


def _launch(kernel: Any, *tensors: torch.Tensor) -> None:
    count = tensors[0].numel()
    if count:
        kernel[(triton.cdiv(count, _BLOCK),)](*tensors, count, BLOCK=_BLOCK, num_warps=8)
