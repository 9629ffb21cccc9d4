"""Triton kernels of what DeltaNet computes row by row; each program owns a block of rows."""

# pyright: reportArgumentType=false, reportOperatorIssue=false, reportGeneralTypeIssues=false

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def rowwise_fwd_kernel_l2(
    x,
    out,
    N,
    x_stride,
    H: tl.constexpr,
    K: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """`x / sqrt(sum(x^2) + 1e-6)`; of N vectors, H stand together in each row of `x`."""
    vector = tl.program_id(0).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    dim = tl.arange(0, BLOCK_K)
    real = (vector < N)[:, None] & (dim < K)[None, :]
    x_at = (vector // H * x_stride + vector % H * K)[:, None] + dim[None, :]
    value = tl.load(x + x_at, mask=real, other=0.0).to(tl.float32)
    result = value * tl.rsqrt(tl.sum(value * value, 1) + 1e-6)[:, None]
    out_at = vector[:, None] * K + dim[None, :]
    tl.store(out + out_at, result.to(out.dtype.element_ty), mask=real)


@triton.jit
def rowwise_bwd_kernel_l2(
    x,
    dout,
    dx,
    N,
    x_stride,
    H: tl.constexpr,
    K: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Gradient of `rowwise_fwd_kernel_l2`."""
    vector = tl.program_id(0).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    dim = tl.arange(0, BLOCK_K)
    real = (vector < N)[:, None] & (dim < K)[None, :]
    x_at = (vector // H * x_stride + vector % H * K)[:, None] + dim[None, :]
    out_at = vector[:, None] * K + dim[None, :]
    value = tl.load(x + x_at, mask=real, other=0.0).to(tl.float32)
    given = tl.load(dout + out_at, mask=real, other=0.0).to(tl.float32)
    scale = tl.rsqrt(tl.sum(value * value, 1) + 1e-6)
    along = tl.sum(value * given, 1) * scale * scale
    result = (given - value * along[:, None]) * scale[:, None]
    tl.store(dx + out_at, result.to(dx.dtype.element_ty), mask=real)


@triton.jit
def rowwise_fwd_kernel_gates(
    step,
    beta,
    a_log,
    dt_bias,
    log_decay,
    strength,
    T,
    step_stride,
    beta_stride,
    H: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """`-exp(a_log) softplus(step + dt_bias)` and `sigmoid(beta)`."""
    row = tl.program_id(0).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    head = tl.arange(0, BLOCK_K)
    real = (row < T)[:, None] & (head < H)[None, :]
    rate = tl.exp(tl.load(a_log + head, mask=head < H, other=0.0).to(tl.float32))
    bias = tl.load(dt_bias + head, mask=head < H, other=0.0).to(tl.float32)
    moved = tl.load(step + row[:, None] * step_stride + head[None, :], mask=real, other=0.0)
    moved = moved.to(tl.float32) + bias[None, :]
    # Stable where exp overflows.
    soft = tl.maximum(moved, 0.0) + tl.log(1.0 + tl.exp(-tl.abs(moved)))
    out_at = row[:, None] * H + head[None, :]
    tl.store(log_decay + out_at, -rate[None, :] * soft, mask=real)
    written = tl.load(beta + row[:, None] * beta_stride + head[None, :], mask=real, other=0.0)
    tl.store(strength + out_at, tl.sigmoid(written.to(tl.float32)), mask=real)


@triton.jit
def rowwise_bwd_kernel_gates(
    step,
    beta,
    a_log,
    dt_bias,
    ddecay,
    dstrength,
    dstep,
    dbeta,
    da_log,
    ddt_bias,
    T,
    step_stride,
    beta_stride,
    H: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Gradients of `rowwise_fwd_kernel_gates`; of a_log and dt_bias the block's share."""
    row = tl.program_id(0).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    head = tl.arange(0, BLOCK_K)
    real = (row < T)[:, None] & (head < H)[None, :]
    rate = tl.exp(tl.load(a_log + head, mask=head < H, other=0.0).to(tl.float32))
    bias = tl.load(dt_bias + head, mask=head < H, other=0.0).to(tl.float32)
    moved = tl.load(step + row[:, None] * step_stride + head[None, :], mask=real, other=0.0)
    moved = moved.to(tl.float32) + bias[None, :]
    soft = tl.maximum(moved, 0.0) + tl.log(1.0 + tl.exp(-tl.abs(moved)))
    out_at = row[:, None] * H + head[None, :]
    given = -rate[None, :] * tl.load(ddecay + out_at, mask=real, other=0.0).to(tl.float32)
    through = given * tl.sigmoid(moved)
    tl.store(dstep + out_at, through.to(dstep.dtype.element_ty), mask=real)
    share = tl.program_id(0) * H + head
    tl.store(da_log + share, tl.sum(given * soft, 0), mask=head < H)
    tl.store(ddt_bias + share, tl.sum(through, 0), mask=head < H)
    written = tl.load(beta + row[:, None] * beta_stride + head[None, :], mask=real, other=0.0)
    open_by = tl.sigmoid(written.to(tl.float32))
    given = tl.load(dstrength + out_at, mask=real, other=0.0).to(tl.float32)
    result = given * open_by * (1.0 - open_by)
    tl.store(dbeta + out_at, result.to(dbeta.dtype.element_ty), mask=real)
