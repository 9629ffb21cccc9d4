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
    value_stride,
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
            given_at = (begin + row)[:, None] * value_stride + head * V + column[None, :]
            v = tl.load(value + given_at, mask=v_real, other=0.0).to(tl.float32)
            write = tl.dot(x, (v * b[:, None]).to(x.dtype), input_precision=PRECISION)
            tl.store(writes + v_at, write.to(writes.dtype.element_ty), mask=v_real)


@triton.jit
def gated_delta_rule_bwd_kernel_system(
    key,
    value,
    beta,
    sums,
    inverse,
    states,
    new_values,
    dnew_values,
    dkey,
    dvalue,
    ddecay,
    dbeta,
    chunk_begins,
    chunk_lengths,
    first_row,
    first_chunk,
    value_stride,
    HK: tl.constexpr,
    H: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """What dN gives v and beta of one chunk, and adds to the gradients of k and the log decay."""
    pid = tl.program_id(0)
    head = pid % H
    place = (pid // H).to(tl.int64)
    begin = tl.load(chunk_begins + first_chunk + place)
    length = tl.load(chunk_lengths + first_chunk + place)
    row = tl.arange(0, BLOCK_T)
    dim = tl.arange(0, BLOCK_K)
    real = row < length
    at = (begin + row) * H + head
    k_real = real[:, None] & (dim < K)[None, :]
    state_at = (place * H + head) * K * V + dim[None, :] * V
    x_at = at[:, None] * BLOCK_T + row[None, :]
    x = tl.load(inverse + x_at, mask=real[:, None], other=0.0)
    x_t = tl.trans(x)
    b = tl.load(beta + at, mask=real, other=0.0).to(tl.float32)

    # Products over the value dimension, of what stands in memory. The one that is needed transposed
    # is computed so: Triton 3.4 to 3.7 may miscompile the transpose of a product as an operand.
    dn_n = tl.zeros([BLOCK_T, BLOCK_T], tl.float32)
    n_dn = tl.zeros([BLOCK_T, BLOCK_T], tl.float32)
    dn_s = tl.zeros([BLOCK_T, BLOCK_K], tl.float32)
    db = tl.zeros([BLOCK_T], tl.float32)
    for first in range(0, V, BLOCK_V):
        column = first + tl.arange(0, BLOCK_V)
        v_at = at[:, None] * V + column[None, :]
        v_real = real[:, None] & (column < V)[None, :]
        s_real = (column < V)[:, None] & (dim < K)[None, :]
        new = tl.load(new_values + v_at, mask=v_real, other=0.0)
        dnew = tl.load(dnew_values + v_at, mask=v_real, other=0.0)
        state = tl.load(states + state_at + column[:, None], mask=s_real, other=0.0)
        dn_n += tl.dot(dnew, tl.trans(new), input_precision=PRECISION)
        n_dn += tl.dot(new, tl.trans(dnew), input_precision=PRECISION)
        dn_s += tl.dot(dnew, state, input_precision=PRECISION)
        y = tl.dot(x_t, dnew, input_precision=PRECISION)
        given_at = (begin + row)[:, None] * value_stride + head * V + column[None, :]
        v = tl.load(value + given_at, mask=v_real, other=0.0).to(tl.float32)
        db += tl.sum(y * v, 1)
        tl.store(dvalue + v_at, (y * b[:, None]).to(dvalue.dtype.element_ty), mask=v_real)

    c = tl.load(sums + (begin + tl.minimum(row, length - 1)) * H + head)
    k_at = ((begin + row) * HK + head // (H // HK))[:, None] * K + dim[None, :]
    k = tl.load(key + k_at, mask=k_real, other=0.0)
    # The system A, by the earlier row and by the later one.
    dsystem_t = tl.dot(n_dn.to(x.dtype), x, input_precision=PRECISION)
    dsystem_t = -dsystem_t * decay_between(c, BLOCK_T, True, True) * b[None, :]
    dk = tl.dot(dsystem_t.to(k.dtype), k, input_precision=PRECISION)
    dsystem = tl.dot(x_t, dn_n.to(x.dtype), input_precision=PRECISION)
    dsystem = -dsystem * decay_between(c, BLOCK_T, True, False)
    dread = tl.dot(x_t, dn_s.to(x.dtype), input_precision=PRECISION)
    dread = dread * -tl.exp(c.to(tl.float32))[:, None]
    dread += tl.dot(dsystem.to(k.dtype), k, input_precision=PRECISION)
    along = tl.sum(k.to(tl.float32) * dread, 1)
    tl.store(dbeta + at, db + along, mask=real)
    dc = along * b - tl.sum(k.to(tl.float32) * dk, 1)
    dk += dread * b[:, None]
    dk_at = dkey + (at - first_row * H)[:, None] * K + dim[None, :]
    dk += tl.load(dk_at, mask=k_real, other=0.0).to(tl.float32)
    tl.store(dk_at, dk.to(dkey.dtype.element_ty), mask=k_real)
    dg = tl.sum(tl.where(row[None, :] >= row[:, None], dc[None, :], 0.0), 1)
    dg += tl.load(ddecay + at, mask=real, other=0.0)
    tl.store(ddecay + at, dg, mask=real)
