"""Triton kernels of the gated delta rule alone: each chunk's linear system; see README.md."""

# pyright: reportArgumentType=false, reportOperatorIssue=false, reportGeneralTypeIssues=false

from __future__ import annotations

import triton
import triton.language as tl

from tree_kernels.chain_scan.triton import decay_between


@triton.jit
def gated_delta_rule_kernel_solve(
    key,
    beta,
    sums,
    inverse,
    chunk_begins,
    chunk_lengths,
    HK: tl.constexpr,
    H: tl.constexpr,
    K: tl.constexpr,
    BLOCK_T: tl.constexpr,
    LOG_T: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """X = (I + A)^-1 of one chunk."""
    pid = tl.program_id(0)
    head = pid % H
    chunk = pid // H
    begin = tl.load(chunk_begins + chunk)
    length = tl.load(chunk_lengths + chunk)
    row = tl.arange(0, BLOCK_T)
    dim = tl.arange(0, BLOCK_K)
    real = row < length
    at = (begin + row) * H + head
    k_at = ((begin + row) * HK + head // (H // HK))[:, None] * K + dim[None, :]
    k = tl.load(key + k_at, mask=real[:, None] & (dim < K)[None, :], other=0.0)
    b = tl.load(beta + at, mask=real, other=0.0).to(tl.float32)
    c = tl.load(sums + (begin + tl.minimum(row, length - 1)) * H + head)
    a = tl.dot(k, tl.trans(k), input_precision=PRECISION) * b[:, None]
    a = a * decay_between(c, BLOCK_T, True, False)

    # Inverses of diagonal blocks of 2, 4, 8, ... rows: a pair of blocks needs the block below the
    # first one, -X2 A21 X1. Powers of A, which may be huge where X is small, never appear.
    pair = (row[:, None] == row[None, :] + 1) & ((row % 2) == 1)[:, None]
    x = tl.where(row[:, None] == row[None, :], 1.0, 0.0) - tl.where(pair, a, 0.0)
    for level in range(1, LOG_T):
        block = row >> level
        pair = (block[:, None] == block[None, :] + 1) & ((block % 2) == 1)[:, None]
        below = tl.where(pair, a, 0.0)
        x_below = tl.dot(below, x, input_precision=PRECISION)
        x = x - tl.dot(x, x_below, input_precision=PRECISION)
    x_at = inverse + at[:, None] * BLOCK_T + row[None, :]
    tl.store(x_at, x.to(inverse.dtype.element_ty), mask=real[:, None])


@triton.jit
def gated_delta_rule_kernel_apply(
    key,
    value,
    beta,
    sums,
    inverse,
    reads,
    writes,
    chunk_begins,
    chunk_lengths,
    HK: tl.constexpr,
    H: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
    WRITES: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """W = X beta exp(c) k of one chunk and, if WRITES, U = X beta v."""
    pid = tl.program_id(0)
    head = pid % H
    chunk = pid // H
    begin = tl.load(chunk_begins + chunk)
    length = tl.load(chunk_lengths + chunk)
    row = tl.arange(0, BLOCK_T)
    dim = tl.arange(0, BLOCK_K)
    real = row < length
    at = (begin + row) * H + head
    k_at = ((begin + row) * HK + head // (H // HK))[:, None] * K + dim[None, :]
    k_real = real[:, None] & (dim < K)[None, :]
    x = tl.load(inverse + at[:, None] * BLOCK_T + row[None, :], mask=real[:, None], other=0.0)
    b = tl.load(beta + at, mask=real, other=0.0).to(tl.float32)
    c = tl.load(sums + at, mask=real, other=0.0)
    k = tl.load(key + k_at, mask=k_real, other=0.0)
    weighed = (k.to(tl.float32) * (b * tl.exp(c.to(tl.float32)))[:, None]).to(x.dtype)
    read = tl.dot(x, weighed, input_precision=PRECISION)
    w_at = reads + at[:, None] * K + dim[None, :]
    tl.store(w_at, read.to(reads.dtype.element_ty), mask=k_real)
    if WRITES:
        for first in range(0, V, BLOCK_V):
            column = first + tl.arange(0, BLOCK_V)
            v_at = at[:, None] * V + column[None, :]
            v_real = real[:, None] & (column < V)[None, :]
            v = tl.load(value + v_at, mask=v_real, other=0.0).to(tl.float32)
            write = tl.dot(x, (v * b[:, None]).to(x.dtype), input_precision=PRECISION)
            tl.store(writes + v_at, write.to(writes.dtype.element_ty), mask=v_real)
