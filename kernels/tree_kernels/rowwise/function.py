"""Host side of the Triton kernels and their place in autograd."""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd.function import once_differentiable

from tree_kernels.rowwise import triton as kernels

Gradients = tuple[torch.Tensor | None, ...]


def fused_l2_normalised(x: torch.Tensor) -> torch.Tensor:
    """See `op.l2_normalised`."""
    with torch.cuda.device_of(x):
        return _L2Normalised.apply(x)


def fused_delta_gates(
    step: torch.Tensor, beta: torch.Tensor, a_log: torch.Tensor, dt_bias: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """See `op.delta_gates`."""
    with torch.cuda.device_of(step):
        return _DeltaGates.apply(step, beta, a_log, dt_bias)


class _L2Normalised(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        x = x if x.stride()[1:] == (x.shape[2], 1) else x.contiguous()
        ctx.save_for_backward(x)
        out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        _launch_by_head(kernels.rowwise_fwd_kernel_l2, x, out)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor) -> torch.Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        (x,) = ctx.saved_tensors
        dx = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        _launch_by_head(kernels.rowwise_bwd_kernel_l2, x, grads[0].contiguous(), dx)
        return dx


class _DeltaGates(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, step: torch.Tensor, beta: torch.Tensor, a_log: torch.Tensor, dt_bias: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        step, beta = _rows(step), _rows(beta)
        ctx.save_for_backward(step, beta, a_log, dt_bias)
        log_decay = torch.empty(step.shape, dtype=torch.float32, device=step.device)
        strength = torch.empty_like(log_decay)
        _launch(
            kernels.rowwise_fwd_kernel_gates,
            *step.shape,
            step,
            beta,
            a_log,
            dt_bias,
            log_decay,
            strength,
            len(step),
            step.stride(0),
            beta.stride(0),
            H=step.shape[1],
        )
        return log_decay, strength

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor) -> Gradients:  # pyright: ignore[reportIncompatibleMethodOverride]
        step, beta, a_log, dt_bias = ctx.saved_tensors
        dstep = torch.empty(step.shape, dtype=step.dtype, device=step.device)
        dbeta = torch.empty(beta.shape, dtype=beta.dtype, device=beta.device)
        shape = (_blocks(*step.shape)[0], step.shape[1])
        shares = torch.empty(2, *shape, dtype=torch.float32, device=step.device)
        _launch(
            kernels.rowwise_bwd_kernel_gates,
            *step.shape,
            step,
            beta,
            a_log,
            dt_bias,
            *(each.contiguous() for each in grads),
            dstep,
            dbeta,
            *shares,
            len(step),
            step.stride(0),
            beta.stride(0),
            H=step.shape[1],
        )
        da_log, ddt_bias = (
            share.sum(0).to(each.dtype) if is_needed else None
            for share, each, is_needed in zip(
                shares, (a_log, dt_bias), ctx.needs_input_grad[2:], strict=True
            )
        )
        return dstep, dbeta, da_log, ddt_bias


def _launch_by_head(kernel: Any, x: torch.Tensor, *others: torch.Tensor) -> None:
    rows, heads, width = x.shape
    vectors = rows * heads
    _launch(kernel, vectors, width, x, *others, vectors, x.stride(0), H=heads, K=width)


def _launch(kernel: Any, rows: int, width: int, *args: Any, **constants: Any) -> None:
    blocks, block_n, block_k = _blocks(rows, width)
    kernel[(blocks,)](
        *args,
        **constants,
        BLOCK_N=block_n,
        BLOCK_K=block_k,
    )


def _blocks(rows: int, width: int) -> tuple[int, int, int]:
    """Programs, rows of each, and the power of two that covers a row."""
    block_k = 1 << (width - 1).bit_length()
    block_n = max(1, 4096 // block_k)
    return -(-rows // block_n), block_n, block_k


def _rows(values: torch.Tensor) -> torch.Tensor:
    """`values` with rows in one piece each; these may stand apart."""
    return values if values.stride(1) == 1 else values.contiguous()
