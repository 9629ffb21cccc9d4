"""Host side of the Triton kernels and their place in autograd."""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd.function import once_differentiable

from tree_kernels.causal_conv import triton as kernels
from tree_kernels.layout import Layout
from tree_kernels.layout.windows import ConvTable

BLOCK_T, BLOCK_D = 32, 128
STEPS = 16
"""Blocks of rows over which one program adds a tap's gradient."""


def table_causal_conv(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, layout: Layout, *, silu: bool
) -> torch.Tensor:
    """See `op.tree_causal_conv`."""
    table = layout.conv_table(weight.shape[1])
    with torch.cuda.device_of(x):
        return _TableConv.apply(x, weight, bias, table, layout.num_tokens, silu)


class _TableConv(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        table: ConvTable,
        rows: int,
        silu: bool,
    ) -> torch.Tensor:
        x = x if x.stride(1) == 1 else x.contiguous()
        weight = weight.contiguous()
        ctx.save_for_backward(x, weight, bias)
        ctx.table, ctx.silu = table, silu
        out = x.new_empty(rows, x.shape[1])
        kernel: Any = kernels.causal_conv_fwd_kernel
        kernel[_grid(rows, x)](
            x,
            weight,
            weight if bias is None else bias,
            out,
            table.ancestors,
            *_sizes(x, rows),
            x.stride(0),
            W=weight.shape[1],
            BIAS=bias is not None,
            SILU=silu,
            BLOCK_T=BLOCK_T,
            BLOCK_D=BLOCK_D,
        )
        return out

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, *grads: torch.Tensor
    ) -> tuple[torch.Tensor | None, ...]:
        x, weight, bias = ctx.saved_tensors
        dsum = grads[0].contiguous()
        if ctx.silu:
            dsum = _before_silu(ctx.table, x, weight, bias, dsum)
        dx = _inputs_gradient(ctx.table, x, weight, dsum) if ctx.needs_input_grad[0] else None
        if not any(ctx.needs_input_grad[1:3]):
            return dx, None, None, None, None, None
        taps = _taps_gradient(ctx.table, x, weight, dsum)
        dweight = taps[:-1].flip(0).t().to(weight.dtype)
        dbias = None if bias is None else taps[-1].to(bias.dtype)
        return dx, dweight, dbias, None, None, None


def _before_silu(
    table: ConvTable,
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    dout: torch.Tensor,
) -> torch.Tensor:
    """Gradient of the sums, `[T, D]`."""
    dsum = torch.empty_like(dout)
    kernel: Any = kernels.causal_conv_bwd_kernel_dsum
    kernel[_grid(len(dout), x)](
        x,
        weight,
        weight if bias is None else bias,
        dout,
        dsum,
        table.ancestors,
        *_sizes(x, len(dout)),
        x.stride(0),
        W=weight.shape[1],
        BIAS=bias is not None,
        BLOCK_T=BLOCK_T,
        BLOCK_D=BLOCK_D,
    )
    return dsum


def _taps_gradient(
    table: ConvTable, x: torch.Tensor, weight: torch.Tensor, dsum: torch.Tensor
) -> torch.Tensor:
    """Of the taps, newest first, and of the bias, `[W + 1, D]` float32."""
    width, rows = weight.shape[1], len(dsum)
    blocks = -(-rows // (BLOCK_T * STEPS))
    shares = torch.empty(blocks, width + 1, x.shape[1], dtype=torch.float32, device=x.device)
    kernel: Any = kernels.causal_conv_bwd_kernel_taps
    kernel[(blocks, _grid(rows, x)[1], width + 1)](
        x,
        dsum,
        shares,
        table.ancestors,
        *_sizes(x, rows),
        x.stride(0),
        W=width,
        STEPS=STEPS,
        BLOCK_T=BLOCK_T,
        BLOCK_D=BLOCK_D,
    )
    return shares.sum(0)


def _inputs_gradient(
    table: ConvTable, x: torch.Tensor, weight: torch.Tensor, dsum: torch.Tensor
) -> torch.Tensor:
    """`[C + T, D]`; fork rows are computed once more, with all their readers."""
    dx = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    sizes = _sizes(x, len(dsum))
    blocks = {"W": weight.shape[1], "BLOCK_T": BLOCK_T, "BLOCK_D": BLOCK_D}
    grid = _grid(len(x), x)
    kernel: Any = kernels.causal_conv_bwd_kernel_dx
    kernel[grid](weight, dsum, dx, table.ancestors, *sizes, **blocks)
    if len(table.fork_rows):
        forks = (table.fork_rows, table.fork_begins, table.reader_rows, table.reader_taps)
        kernel = kernels.causal_conv_bwd_kernel_forks
        kernel[(len(table.fork_rows), grid[1])](
            weight, dsum, dx, table.ancestors, *forks, *sizes, **blocks
        )
    return dx


def _sizes(x: torch.Tensor, rows: int) -> tuple[int, int, int]:
    """R, C and D."""
    return len(x), len(x) - rows, x.shape[1]


def _grid(rows: int, x: torch.Tensor) -> tuple[int, int]:
    return -(-rows // BLOCK_T), -(-x.shape[1] // BLOCK_D)
