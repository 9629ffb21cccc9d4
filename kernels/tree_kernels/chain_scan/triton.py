"""Triton kernels that the gated delta rule (DELTA) and SSD share; README.md derives them.

A program of a `_state` kernel walks one chain; every other program owns one chunk. Products
accumulate in float32 and take operands of the values' type. Rows behind a chunk's end read zeros
and repeat the last running sum: all stays exact.
"""

# pyright: reportArgumentType=false, reportOperatorIssue=false, reportGeneralTypeIssues=false
# pyright: reportPossiblyUnboundVariable=false

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def decay_between(sums, BLOCK_T: tl.constexpr, STRICT: tl.constexpr, FLIP: tl.constexpr):
    """`exp(c[i] - c[j])` where j <= i (j < i if STRICT), else 0; at `[j, i]` if FLIP."""
    row = tl.arange(0, BLOCK_T)
    if FLIP:
        between = sums[None, :] - sums[:, None]
        past = row[None, :] - row[:, None]
    else:
        between = sums[:, None] - sums[None, :]
        past = row[:, None] - row[None, :]
    if STRICT:
        past = past - 1
    return tl.exp(tl.where(past >= 0, between.to(tl.float32), float("-inf")))


@triton.jit
def chain_scan_kernel_sums(
    log_decay,
    sums,
    chunk_begins,
    chunk_lengths,
    H: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_H: tl.constexpr,
):
    """Running sums of the log decay in one chunk, for all heads.

    In float64: their differences cancel in float32 where a token forgets almost everything.
    """
    chunk = tl.program_id(0)
    begin = tl.load(chunk_begins + chunk)
    length = tl.load(chunk_lengths + chunk)
    row = tl.arange(0, BLOCK_T)
    head = tl.arange(0, BLOCK_H)
    at = (begin + row)[:, None] * H + head[None, :]
    real = (row < length)[:, None] & (head < H)[None, :]
    decay = tl.load(log_decay + at, mask=real, other=0.0).to(tl.float64)
    tl.store(sums + at, tl.cumsum(decay, 0), mask=real)


@triton.jit
def chain_scan_fwd_kernel_state(
    key,
    sums,
    values,
    reads,
    slots,
    states,
    new_values,
    chains,
    chain_runs,
    chain_slots,
    run_begins,
    run_ends,
    run_chunks,
    run_slots,
    first_chunk,
    KEEP: tl.constexpr,
    HK: tl.constexpr,
    H: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
    DELTA: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """State before each chunk of one chain, the values N that DELTA writes, and, if KEEP, slots."""
    NV: tl.constexpr = (V + BLOCK_V - 1) // BLOCK_V
    pid = tl.program_id(0)
    head = (pid // NV) % H
    chain = tl.load(chains + pid // (NV * H))
    row = tl.arange(0, BLOCK_T)
    dim = tl.arange(0, BLOCK_K)
    column = (pid % NV) * BLOCK_V + tl.arange(0, BLOCK_V)
    cell = dim[:, None] * V + column[None, :]
    cell_real = (dim < K)[:, None] & (column < V)[None, :]

    start = (tl.load(chain_slots + chain) * H + head) * K * V
    state = tl.load(slots + start + cell, mask=cell_real, other=0.0)
    for run in range(tl.load(chain_runs + chain), tl.load(chain_runs + chain + 1)):
        run_begin = tl.load(run_begins + run)
        run_end = tl.load(run_ends + run)
        place = tl.load(run_chunks + run) - first_chunk
        for begin in range(run_begin, run_end, BLOCK_T):
            state_at = states + (place * H + head) * K * V + cell
            tl.store(state_at, state.to(states.dtype.element_ty), mask=cell_real)
            place += 1
            at = begin + row
            real = at < run_end
            last = tl.minimum(begin + BLOCK_T, run_end) - 1
            v_at = (at * H + head)[:, None] * V + column[None, :]
            v_real = real[:, None] & (column < V)[None, :]
            new = tl.load(values + v_at, mask=v_real, other=0.0).to(tl.float32)
            if DELTA:
                w_at = (at * H + head)[:, None] * K + dim[None, :]
                w_real = real[:, None] & (dim < K)[None, :]
                read = tl.load(reads + w_at, mask=w_real, other=0.0)
                new -= tl.dot(read, state.to(read.dtype), input_precision=PRECISION)
                tl.store(new_values + v_at, new.to(new_values.dtype.element_ty), mask=v_real)

            c = tl.load(sums + tl.minimum(at, last) * H + head)
            c_last = tl.load(sums + last * H + head)
            k_row = at * HK + head // (H // HK)
            k_t_real = (dim < K)[:, None] & real[None, :]
            k_t = tl.load(key + k_row[None, :] * K + dim[:, None], mask=k_t_real, other=0.0)
            weighed = (new * tl.exp((c_last - c).to(tl.float32))[:, None]).to(k_t.dtype)
            state = state * tl.exp(c_last.to(tl.float32))
            state += tl.dot(k_t, weighed, input_precision=PRECISION)
        if KEEP:
            slot = tl.load(run_slots + run)
            if slot >= 0:
                tl.store(slots + (slot * H + head) * K * V + cell, state, mask=cell_real)


@triton.jit
def chain_scan_fwd_kernel_out(
    query,
    key,
    sums,
    states,
    new_values,
    skipped,
    skip,
    out,
    chunk_begins,
    chunk_lengths,
    first_chunk,
    scale,
    HK: tl.constexpr,
    H: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
    SKIP: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Outputs of one chunk from the state before it and the values that it writes.

    With SKIP, what `skipped` holds is added, times `skip` of the head.
    """
    NV: tl.constexpr = (V + BLOCK_V - 1) // BLOCK_V
    pid = tl.program_id(0)
    head = (pid // NV) % H
    place = (pid // (NV * H)).to(tl.int64)
    begin = tl.load(chunk_begins + first_chunk + place)
    length = tl.load(chunk_lengths + first_chunk + place)
    row = tl.arange(0, BLOCK_T)
    dim = tl.arange(0, BLOCK_K)
    column = (pid % NV) * BLOCK_V + tl.arange(0, BLOCK_V)
    real = row < length
    v_at = ((begin + row) * H + head)[:, None] * V + column[None, :]
    v_real = real[:, None] & (column < V)[None, :]
    k_at = ((begin + row) * HK + head // (H // HK))[:, None] * K + dim[None, :]
    k_real = real[:, None] & (dim < K)[None, :]
    cell = (place * H + head) * K * V + dim[:, None] * V + column[None, :]

    q = tl.load(query + k_at, mask=k_real, other=0.0)
    k = tl.load(key + k_at, mask=k_real, other=0.0)
    c = tl.load(sums + (begin + tl.minimum(row, length - 1)) * H + head)
    state = tl.load(states + cell, mask=(dim < K)[:, None] & (column < V)[None, :], other=0.0)
    new = tl.load(new_values + v_at, mask=v_real, other=0.0)
    scores = tl.dot(q, tl.trans(k), input_precision=PRECISION)
    scores = scores * decay_between(c, BLOCK_T, False, False)
    result = tl.dot(q, state, input_precision=PRECISION) * tl.exp(c.to(tl.float32))[:, None]
    result += tl.dot(scores.to(new.dtype), new, input_precision=PRECISION)
    result = result * scale
    if SKIP:
        x = tl.load(skipped + v_at, mask=v_real, other=0.0).to(tl.float32)
        result += x * tl.load(skip + head).to(tl.float32)
    tl.store(out + v_at, result.to(out.dtype.element_ty), mask=v_real)


@triton.jit
def chain_scan_bwd_kernel_dn(
    query,
    key,
    sums,
    dout,
    dnew_values,
    chunk_begins,
    chunk_lengths,
    scale,
    HK: tl.constexpr,
    H: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Gradient of N through the outputs of its own chunk."""
    NV: tl.constexpr = (V + BLOCK_V - 1) // BLOCK_V
    pid = tl.program_id(0)
    head = (pid // NV) % H
    chunk = pid // (NV * H)
    begin = tl.load(chunk_begins + chunk)
    length = tl.load(chunk_lengths + chunk)
    row = tl.arange(0, BLOCK_T)
    dim = tl.arange(0, BLOCK_K)
    column = (pid % NV) * BLOCK_V + tl.arange(0, BLOCK_V)
    real = row < length
    v_at = ((begin + row) * H + head)[:, None] * V + column[None, :]
    v_real = real[:, None] & (column < V)[None, :]
    k_at = ((begin + row) * HK + head // (H // HK))[:, None] * K + dim[None, :]
    k_real = real[:, None] & (dim < K)[None, :]

    q = tl.load(query + k_at, mask=k_real, other=0.0)
    k = tl.load(key + k_at, mask=k_real, other=0.0)
    c = tl.load(sums + (begin + tl.minimum(row, length - 1)) * H + head)
    do = tl.load(dout + v_at, mask=v_real, other=0.0)
    scores_t = tl.dot(k, tl.trans(q), input_precision=PRECISION)
    scores_t = scores_t * decay_between(c, BLOCK_T, False, True) * scale
    dnew = tl.dot(scores_t.to(do.dtype), do, input_precision=PRECISION)
    tl.store(dnew_values + v_at, dnew.to(dnew_values.dtype.element_ty), mask=v_real)


@triton.jit
def chain_scan_bwd_kernel_state(
    query,
    key,
    sums,
    reads,
    dout,
    dslots,
    dstates,
    dnew_values,
    dchains,
    chains,
    chain_runs,
    run_begins,
    run_ends,
    run_chunks,
    run_slots,
    slot_begins,
    slot_chains,
    first_chunk,
    scale,
    HK: tl.constexpr,
    H: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
    DELTA: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Gradient of the state behind each chunk of one chain, of its N, and of the chain's start."""
    NV: tl.constexpr = (V + BLOCK_V - 1) // BLOCK_V
    pid = tl.program_id(0)
    head = (pid // NV) % H
    chain = tl.load(chains + pid // (NV * H))
    row = tl.arange(0, BLOCK_T)
    dim = tl.arange(0, BLOCK_K)
    column = (pid % NV) * BLOCK_V + tl.arange(0, BLOCK_V)
    cell = dim[:, None] * V + column[None, :]
    cell_real = (dim < K)[:, None] & (column < V)[None, :]

    first_run = tl.load(chain_runs + chain)
    last_run = tl.load(chain_runs + chain + 1) - 1
    dstate = tl.zeros([BLOCK_K, BLOCK_V], tl.float32)
    for run_back in range(0, last_run - first_run + 1):
        run = last_run - run_back
        slot = tl.load(run_slots + run)
        if slot >= 0:
            # What others ask of the kept state: its own gradient, then the chains in fixed order.
            dstate += tl.load(dslots + (slot * H + head) * K * V + cell, mask=cell_real, other=0.0)
            for entry in range(tl.load(slot_begins + slot), tl.load(slot_begins + slot + 1)):
                child = tl.load(slot_chains + entry)
                dstate += tl.load(
                    dchains + (child * H + head) * K * V + cell, mask=cell_real, other=0.0
                )
        run_begin = tl.load(run_begins + run)
        run_end = tl.load(run_ends + run)
        num_chunks = (run_end - run_begin + BLOCK_T - 1) // BLOCK_T
        place = tl.load(run_chunks + run) - first_chunk + num_chunks - 1
        last_begin = run_begin + (num_chunks - 1) * BLOCK_T
        for back in range(0, num_chunks * BLOCK_T, BLOCK_T):
            dstate_at = dstates + (place * H + head) * K * V + cell
            tl.store(dstate_at, dstate.to(dstates.dtype.element_ty), mask=cell_real)
            place -= 1
            at = last_begin - back + row
            real = at < run_end
            last = tl.minimum(last_begin - back + BLOCK_T, run_end) - 1
            v_at = (at * H + head)[:, None] * V + column[None, :]
            v_real = real[:, None] & (column < V)[None, :]
            k_row = at * HK + head // (H // HK)
            k_real = real[:, None] & (dim < K)[None, :]
            k_t_real = (dim < K)[:, None] & real[None, :]
            c = tl.load(sums + tl.minimum(at, last) * H + head)
            c_last = tl.load(sums + last * H + head)
            k = tl.load(key + k_row[:, None] * K + dim[None, :], mask=k_real, other=0.0)
            dnew = tl.dot(k, dstate.to(k.dtype), input_precision=PRECISION)
            dnew = dnew * tl.exp((c_last - c).to(tl.float32))[:, None]
            dnew += tl.load(dnew_values + v_at, mask=v_real, other=0.0).to(tl.float32)
            tl.store(dnew_values + v_at, dnew.to(dnew_values.dtype.element_ty), mask=v_real)

            do = tl.load(dout + v_at, mask=v_real, other=0.0)
            from_start = tl.exp(c.to(tl.float32)) * scale
            weighed = (do.to(tl.float32) * from_start[:, None]).to(do.dtype)
            q_t = tl.load(query + k_row[None, :] * K + dim[:, None], mask=k_t_real, other=0.0)
            dstate = dstate * tl.exp(c_last.to(tl.float32))
            dstate += tl.dot(q_t, weighed, input_precision=PRECISION)
            if DELTA:
                w_at = (at * H + head)[None, :] * K + dim[:, None]
                read_t = tl.load(reads + w_at, mask=k_t_real, other=0.0)
                dstate -= tl.dot(read_t, dnew.to(read_t.dtype), input_precision=PRECISION)
    tl.store(dchains + (chain * H + head) * K * V + cell, dstate, mask=cell_real)


@triton.jit
def chain_scan_bwd_kernel_dqk(
    query,
    key,
    sums,
    states,
    new_values,
    dout,
    dstates,
    dquery,
    dkey,
    ddecay,
    chunk_begins,
    chunk_lengths,
    first_row,
    first_chunk,
    scale,
    HK: tl.constexpr,
    H: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Gradients of q and k by head and of the log decay of one chunk, N held fixed."""
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

    # Products over the value dimension. The one that is needed transposed is computed so: Triton
    # 3.4 to 3.7 may miscompile the transpose of a product as an operand on Hopper.
    do_n = tl.zeros([BLOCK_T, BLOCK_T], tl.float32)
    n_do = tl.zeros([BLOCK_T, BLOCK_T], tl.float32)
    dq = tl.zeros([BLOCK_T, BLOCK_K], tl.float32)
    dk = tl.zeros([BLOCK_T, BLOCK_K], tl.float32)
    dlast = tl.zeros([BLOCK_K], tl.float32)
    for first in range(0, V, BLOCK_V):
        column = first + tl.arange(0, BLOCK_V)
        v_at = at[:, None] * V + column[None, :]
        v_real = real[:, None] & (column < V)[None, :]
        s_real = (column < V)[:, None] & (dim < K)[None, :]
        do = tl.load(dout + v_at, mask=v_real, other=0.0)
        new = tl.load(new_values + v_at, mask=v_real, other=0.0)
        state = tl.load(states + state_at + column[:, None], mask=s_real, other=0.0)
        dstate = tl.load(dstates + state_at + column[:, None], mask=s_real, other=0.0)
        do_n += tl.dot(do, tl.trans(new), input_precision=PRECISION)
        n_do += tl.dot(new, tl.trans(do), input_precision=PRECISION)
        dq += tl.dot(do, state, input_precision=PRECISION)
        dk += tl.dot(new, dstate, input_precision=PRECISION)
        dlast += tl.sum(state.to(tl.float32) * dstate.to(tl.float32), 0)

    c = tl.load(sums + (begin + tl.minimum(row, length - 1)) * H + head)
    c_last = tl.load(sums + (begin + length - 1) * H + head)
    k_at = ((begin + row) * HK + head // (H // HK))[:, None] * K + dim[None, :]
    q = tl.load(query + k_at, mask=k_real, other=0.0)
    k = tl.load(key + k_at, mask=k_real, other=0.0)
    # A row's own part of dq and dk cancels in dc: it is added behind.
    own = tl.sum(tl.where(row[:, None] == row[None, :], do_n, 0.0), 1) * scale
    dscores = do_n * decay_between(c, BLOCK_T, True, False) * scale
    dq = dq * (tl.exp(c.to(tl.float32)) * scale)[:, None]
    dq += tl.dot(dscores.to(k.dtype), k, input_precision=PRECISION)
    dc = tl.sum(q.to(tl.float32) * dq, 1)
    dq += own[:, None] * k.to(tl.float32)
    q_at = (at - first_row * H)[:, None] * K + dim[None, :]
    tl.store(dquery + q_at, dq.to(dquery.dtype.element_ty), mask=k_real)

    # As the state behind the chunk reads the key, then as later rows do.
    dk = dk * tl.exp((c_last - c).to(tl.float32))[:, None]
    end = tl.sum(tl.sum(k.to(tl.float32) * dk, 1), 0)
    end += tl.sum(dlast, 0) * tl.exp(c_last.to(tl.float32))
    dscores_t = n_do * decay_between(c, BLOCK_T, True, True) * scale
    dk += tl.dot(dscores_t.to(q.dtype), q, input_precision=PRECISION)
    dc -= tl.sum(k.to(tl.float32) * dk, 1)
    dk += own[:, None] * q.to(tl.float32)
    tl.store(dkey + q_at, dk.to(dkey.dtype.element_ty), mask=k_real)
    dg = tl.sum(tl.where(row[None, :] >= row[:, None], dc[None, :], 0.0), 1) + end
    tl.store(ddecay + at, dg, mask=real)
