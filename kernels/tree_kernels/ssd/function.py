"""Host side of the Triton kernels and their place in autograd."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from tree_kernels.chain_scan.scan import ChainScan, block, checked_block_t
from tree_kernels.layout import ChainTable, TreeLayout
from tree_kernels.ssd import triton as kernels

BLOCK_R = 64
"""Rows of a program that owns no chunk."""


def chain_ssd(
    x: torch.Tensor,
    dt: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    c: torch.Tensor,
    d: torch.Tensor | None,
    layout: TreeLayout,
    *,
    initial_states: torch.Tensor | None,
    end_nodes: Sequence[int],
    chunk_size: int | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """See `op.tree_ssd_with_states`.

    Raises:
        ValueError: A chunk size or state dimension that the kernels don't know.
    """
    block_t = checked_block_t(chunk_size, b, x, x.device)
    chains = layout.chains(block_t, end_nodes)
    with torch.cuda.device_of(x):
        return _ChainSsd.apply(x, dt, a, b, c, d, initial_states, chains, block_t)


class _ChainSsd(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        dt: torch.Tensor,
        a: torch.Tensor,
        b: torch.Tensor,
        c: torch.Tensor,
        d: torch.Tensor | None,
        initial_states: torch.Tensor | None,
        chains: ChainTable,
        block_t: int,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        ctx.types = [each if each is None else each.dtype for each in (dt, a, b, c, d)]
        ctx.initial_type = None if initial_states is None else initial_states.dtype
        x, dt, b, c = (each.contiguous() for each in (x, dt, b.to(x.dtype), c.to(x.dtype)))
        scan = ChainScan.of(b, x, chains, block_t, 1.0)
        written = torch.empty_like(x)
        log_decay = scan.empty(scan.rows, dtype=torch.float32)
        scan.launch(
            kernels.ssd_fwd_kernel_written,
            "written",
            _programs(scan),
            x,
            dt,
            a,
            written,
            log_decay,
            scan.rows,
            BLOCK_R=BLOCK_R,
            BLOCK_P=block(scan.value_dim, 1 << 20),
        )
        sums = scan.sums(log_decay)
        skip = None if d is None else (x, d)
        out, slots = scan.forward(c, b, sums, written, None, initial_states, skip)
        ctx.save_for_backward(x, dt, a, b, c, d, sums, written, slots)
        ctx.scan = scan
        return out, slots[chains.end_slots]

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, *grads: torch.Tensor
    ) -> tuple[torch.Tensor | None, ...]:
        x, dt, a, b, c, d, sums, written, slots = ctx.saved_tensors
        scan: ChainScan = ctx.scan
        dout = grads[0].contiguous()
        found = scan.backward(c, b, sums, written, None, slots, dout, grads[1])
        dx = torch.empty_like(x)
        ddt = scan.empty(scan.rows, dtype=torch.float32)
        blocks = _programs(scan) // scan.heads
        da = scan.empty(blocks, dtype=torch.float32)
        dd = None if d is None else torch.empty_like(da)
        scan.launch(
            kernels.ssd_bwd_kernel_written,
            "written",
            _programs(scan),
            x,
            dt,
            a,
            a if d is None else d,
            found.new_values,
            found.log_decay,
            dout,
            dx,
            ddt,
            da,
            da if dd is None else dd,
            scan.rows,
            BLOCK_R=BLOCK_R,
            BLOCK_P=block(scan.value_dim, 1 << 20),
            SKIP=d is not None,
        )
        given = (ddt, da.sum(0), found.key, found.query, None if dd is None else dd.sum(0))
        others = [
            None if grad is None else grad.to(dtype)
            for grad, dtype in zip(given, ctx.types, strict=True)
        ]
        initial_type = ctx.initial_type
        dinitial = None if initial_type is None else found.initial_states.to(initial_type)
        return dx, *others, dinitial, None, None


def _programs(scan: ChainScan) -> int:
    return -(-scan.rows // BLOCK_R) * scan.heads
