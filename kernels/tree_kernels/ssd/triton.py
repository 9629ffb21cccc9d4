"""Triton kernels of SSD alone: what its scan takes, and what the scan's gradients give."""

# pyright: reportArgumentType=false, reportOperatorIssue=false, reportGeneralTypeIssues=false

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def ssd_fwd_kernel_written(
    x,
    dt,
    a,
    written,
    log_decay,
    T,
    H: tl.constexpr,
    V: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_P: tl.constexpr,
):
    """`dt x` and `dt a` of a block of rows of one head."""
    pid = tl.program_id(0)
    head = pid % H
    row = (pid // H).to(tl.int64) * BLOCK_R + tl.arange(0, BLOCK_R)
    column = tl.arange(0, BLOCK_P)
    at = row * H + head
    x_at = at[:, None] * V + column[None, :]
    real = (row < T)[:, None] & (column < V)[None, :]
    step = tl.load(dt + at, mask=row < T, other=0.0).to(tl.float32)
    rate = tl.load(a + head).to(tl.float32)
    value = tl.load(x + x_at, mask=real, other=0.0).to(tl.float32)
    tl.store(written + x_at, (value * step[:, None]).to(written.dtype.element_ty), mask=real)
    tl.store(log_decay + at, step * rate, mask=row < T)


@triton.jit
def ssd_bwd_kernel_written(
    x,
    dt,
    a,
    d,
    dwritten,
    ddecay,
    dout,
    dx,
    ddt,
    da,
    dd,
    T,
    H: tl.constexpr,
    V: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_P: tl.constexpr,
    SKIP: tl.constexpr,
):
    """Gradients of x and dt, and a block's share of those of a and, with SKIP, of d."""
    pid = tl.program_id(0)
    head = pid % H
    row = (pid // H).to(tl.int64) * BLOCK_R + tl.arange(0, BLOCK_R)
    column = tl.arange(0, BLOCK_P)
    at = row * H + head
    x_at = at[:, None] * V + column[None, :]
    real = (row < T)[:, None] & (column < V)[None, :]
    step = tl.load(dt + at, mask=row < T, other=0.0).to(tl.float32)
    rate = tl.load(a + head).to(tl.float32)
    value = tl.load(x + x_at, mask=real, other=0.0).to(tl.float32)
    through = tl.load(dwritten + x_at, mask=real, other=0.0).to(tl.float32)
    decay = tl.load(ddecay + at, mask=row < T, other=0.0)
    gradient = through * step[:, None]
    if SKIP:
        above = tl.load(dout + x_at, mask=real, other=0.0).to(tl.float32)
        gradient += above * tl.load(d + head).to(tl.float32)
        tl.store(dd + pid, tl.sum(tl.sum(above * value, 1), 0))
    tl.store(dx + x_at, gradient.to(dx.dtype.element_ty), mask=real)
    tl.store(ddt + at, tl.sum(through * value, 1) + decay * rate, mask=row < T)
    tl.store(da + pid, tl.sum(decay * step, 0))
