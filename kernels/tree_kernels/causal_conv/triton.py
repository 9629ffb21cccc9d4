"""Triton kernels of the tree convolution; README.md names the quantities.

A window's rows are looked up in a table, so that forks are no special case. Of R rows of inputs the
first C belong to other pieces: they have no outputs.
"""

# pyright: reportArgumentType=false, reportOperatorIssue=false, reportGeneralTypeIssues=false

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _convolved(
    x,
    weight,
    bias,
    ancestors,
    row,
    column,
    R,
    D,
    x_stride,
    W: tl.constexpr,
    BIAS: tl.constexpr,
):
    """Outputs of `row` before the activation, `[rows, columns]` float32."""
    real = (row < R)[:, None] & (column < D)[None, :]
    tap = tl.load(weight + column * W + W - 1, mask=column < D, other=0.0).to(tl.float32)
    read = tl.load(x + row[:, None] * x_stride + column[None, :], mask=real, other=0.0)
    out = read.to(tl.float32) * tap[None, :]
    for back in tl.static_range(1, W):
        before = tl.load(ancestors + (back - 1) * R + row, mask=row < R, other=-1)
        tap = tl.load(weight + column * W + W - 1 - back, mask=column < D, other=0.0)
        there = (before >= 0)[:, None] & (column < D)[None, :]
        read = tl.load(x + before[:, None] * x_stride + column[None, :], mask=there, other=0.0)
        out += read.to(tl.float32) * tap.to(tl.float32)[None, :]
    if BIAS:
        out += tl.load(bias + column, mask=column < D, other=0.0).to(tl.float32)[None, :]
    return out


@triton.jit
def causal_conv_fwd_kernel(
    x,
    weight,
    bias,
    out,
    ancestors,
    R,
    C,
    D,
    x_stride,
    W: tl.constexpr,
    BIAS: tl.constexpr,
    SILU: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Outputs of a block of rows and columns."""
    column = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    row = C + tl.program_id(0).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
    result = _convolved(x, weight, bias, ancestors, row, column, R, D, x_stride, W, BIAS)
    if SILU:
        result = result * tl.sigmoid(result)
    out_at = (row - C)[:, None] * D + column[None, :]
    real = (row < R)[:, None] & (column < D)[None, :]
    tl.store(out + out_at, result.to(out.dtype.element_ty), mask=real)


@triton.jit
def causal_conv_bwd_kernel_dsum(
    x,
    weight,
    bias,
    dout,
    dsum,
    ancestors,
    R,
    C,
    D,
    x_stride,
    W: tl.constexpr,
    BIAS: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Gradient of a block of sums from that of their SiLU."""
    column = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    row = C + tl.program_id(0).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
    real = (row < R)[:, None] & (column < D)[None, :]
    out_at = (row - C)[:, None] * D + column[None, :]
    gradient = tl.load(dout + out_at, mask=real, other=0.0).to(tl.float32)
    before = _convolved(x, weight, bias, ancestors, row, column, R, D, x_stride, W, BIAS)
    gate = tl.sigmoid(before)
    gradient = gradient * gate * (1.0 + before * (1.0 - gate))
    tl.store(dsum + out_at, gradient.to(dsum.dtype.element_ty), mask=real)


@triton.jit
def causal_conv_bwd_kernel_taps(
    x,
    dsum,
    shares,
    ancestors,
    R,
    C,
    D,
    x_stride,
    W: tl.constexpr,
    STEPS: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """One tap's gradient over a long block of rows; the bias' where the tap is W.

    The shares, `[blocks, W + 1, D]`, are added in fixed order.
    """
    column = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    back = tl.program_id(2)
    begin = C + tl.program_id(0).to(tl.int64) * (BLOCK_T * STEPS)
    total = tl.zeros([BLOCK_D], tl.float32)
    for step in range(STEPS):
        row = begin + step * BLOCK_T + tl.arange(0, BLOCK_T)
        real = (row < R)[:, None] & (column < D)[None, :]
        given = tl.load(dsum + (row - C)[:, None] * D + column[None, :], mask=real, other=0.0)
        given = given.to(tl.float32)
        if back < W:
            before = row
            if W > 1:
                above = tl.maximum(back - 1, 0) * R + row
                before = tl.load(ancestors + above, mask=row < R, other=-1)
                before = tl.where(back > 0, before, row)
            there = real & (before >= 0)[:, None]
            read = tl.load(x + before[:, None] * x_stride + column[None, :], mask=there, other=0.0)
            given = given * read.to(tl.float32)
        total += tl.sum(given, 0)
    share = (tl.program_id(0).to(tl.int64) * (W + 1) + back) * D + column
    tl.store(shares + share, total, mask=column < D)


@triton.jit
def _from_behind(weight, dsum, ancestors, row, column, R, C, D, W: tl.constexpr):
    """Gradient of inputs `row` by the windows of the row itself and of those behind it."""
    own = ((row >= C) & (row < R))[:, None] & (column < D)[None, :]
    tap = tl.load(weight + column * W + W - 1, mask=column < D, other=0.0).to(tl.float32)
    given = tl.load(dsum + (row - C)[:, None] * D + column[None, :], mask=own, other=0.0)
    gradient = given.to(tl.float32) * tap[None, :]
    for back in tl.static_range(1, W):
        reader = row + back
        inside = (reader >= C) & (reader < R)
        read = tl.load(ancestors + (back - 1) * R + reader, mask=inside, other=-1)
        there = (inside & (read == row))[:, None] & (column < D)[None, :]
        tap = tl.load(weight + column * W + W - 1 - back, mask=column < D, other=0.0)
        given_at = (reader - C)[:, None] * D + column[None, :]
        given = tl.load(dsum + given_at, mask=there, other=0.0).to(tl.float32)
        gradient += given * tap.to(tl.float32)[None, :]
    return gradient


@triton.jit
def causal_conv_bwd_kernel_dx(
    weight,
    dsum,
    dx,
    ancestors,
    R,
    C,
    D,
    W: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Gradient of a block of inputs by the rows behind them in the strip."""
    column = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    row = tl.program_id(0).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
    gradient = _from_behind(weight, dsum, ancestors, row, column, R, C, D, W)
    real = (row < R)[:, None] & (column < D)[None, :]
    dx_at = row[:, None] * D + column[None, :]
    tl.store(dx + dx_at, gradient.to(dx.dtype.element_ty), mask=real)


@triton.jit
def causal_conv_bwd_kernel_forks(
    weight,
    dsum,
    dx,
    ancestors,
    fork_rows,
    fork_begins,
    reader_rows,
    reader_taps,
    R,
    C,
    D,
    W: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """The whole gradient of one fork row: its readers elsewhere too, in fixed order."""
    fork = tl.program_id(0)
    column = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    place = tl.arange(0, BLOCK_T)
    fork_row = tl.load(fork_rows + fork)
    row = tl.where(place == 0, fork_row, R)
    gradient = _from_behind(weight, dsum, ancestors, row, column, R, C, D, W)
    end = tl.load(fork_begins + fork + 1)
    for first in range(tl.load(fork_begins + fork), end, BLOCK_T):
        entry = first + place
        reader = tl.load(reader_rows + entry, mask=entry < end, other=0)
        back = tl.load(reader_taps + entry, mask=entry < end, other=0)
        there = ((entry < end) & (reader >= C))[:, None] & (column < D)[None, :]
        tap_at = column[None, :] * W + W - 1 - back[:, None]
        tap = tl.load(weight + tap_at, mask=there, other=0.0).to(tl.float32)
        given_at = (reader - C)[:, None] * D + column[None, :]
        gradient += tl.load(dsum + given_at, mask=there, other=0.0).to(tl.float32) * tap
    total = tl.sum(gradient, 0)
    tl.store(dx + fork_row * D + column, total.to(dx.dtype.element_ty), mask=column < D)
