"""Host side of the Triton kernels and their place in autograd."""

from __future__ import annotations

from typing import Any

import torch
import triton

from tree_kernels.swiglu import triton as kernels

_BLOCK = 4096


def fused_swiglu(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """See `op.swiglu`."""
    with torch.cuda.device_of(gate):
        return _Swiglu.apply(gate, up)


class _Swiglu(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        gate, up = gate.contiguous(), up.contiguous()
        out = torch.empty_like(gate)
        _launch(kernels.swiglu_fwd_kernel, gate, up, out)
        ctx.save_for_backward(gate, up)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        gate, up = ctx.saved_tensors
        grad_gate, grad_up = torch.empty_like(gate), torch.empty_like(up)
        _launch(kernels.swiglu_bwd_kernel, gate, up, grads[0].contiguous(), grad_gate, grad_up)
        return grad_gate, grad_up


def _launch(kernel: Any, *tensors: torch.Tensor) -> None:
    count = tensors[0].numel()
    if count:
        kernel[(triton.cdiv(count, _BLOCK),)](*tensors, count, BLOCK=_BLOCK, num_warps=8)
