"""Triton kernels of the gated delta rule; README.md derives what they compute.

A program of a `_state` kernel walks one chain; every other program owns one chunk. Tiles are
float32; rows behind a chunk's end read zeros and repeat the last running sum: all stays exact.
"""

# pyright: reportArgumentType=false, reportOperatorIssue=false, reportGeneralTypeIssues=false

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _decay_between(sums, BLOCK_T: tl.constexpr, STRICT: tl.constexpr, FLIP: tl.constexpr):
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
def gated_delta_rule_fwd_kernel_solve(
    key,
    value,
    log_decay,
    beta,
    sums,
    inverse,
    writes,
    reads,
    chunk_begins,
    chunk_lengths,
    HK: tl.constexpr,
    HV: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    BLOCK_T: tl.constexpr,
    LOG_T: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
    PRECISION: tl.constexpr,
    SOLVE_PRECISION: tl.constexpr,
):
    """Running sums c, X = (I + A)^-1, U = X beta v and W = X beta exp(c) k of one chunk."""
    pid = tl.program_id(0)
    head = pid % HV
    chunk = pid // HV
    begin = tl.load(chunk_begins + chunk)
    length = tl.load(chunk_lengths + chunk)
    row = tl.arange(0, BLOCK_T)
    dim = tl.arange(0, BLOCK_K)
    real = row < length
    at = (begin + row) * HV + head

    # In float64: differences of running sums cancel where a token forgets almost everything.
    decay = tl.load(log_decay + at, mask=real, other=0.0).to(tl.float64)
    c = tl.sum(tl.where(row[:, None] >= row[None, :], decay[None, :], 0.0), 1)
    tl.store(sums + at, c, mask=real)

    k_at = ((begin + row) * HK + head // (HV // HK))[:, None] * K + dim[None, :]
    k_real = real[:, None] & (dim < K)[None, :]
    k = tl.load(key + k_at, mask=k_real, other=0.0).to(tl.float32)
    b = tl.load(beta + at, mask=real, other=0.0).to(tl.float32)
    a = tl.dot(k, tl.trans(k), input_precision=SOLVE_PRECISION) * b[:, None]
    a = a * _decay_between(c, BLOCK_T, True, False)

    # Inverses of diagonal blocks of 1, 2, 4, ... rows: a pair of blocks needs the block below the
    # first one, -X2 A21 X1. Powers of A, which may be huge where X is small, never appear.
    x = tl.where(row[:, None] == row[None, :], 1.0, 0.0)
    for level in range(LOG_T):
        block = row >> level
        pair = (block[:, None] == block[None, :] + 1) & ((block % 2) == 1)[:, None]
        below = tl.where(pair, a, 0.0)
        x_below = tl.dot(below, x, input_precision=SOLVE_PRECISION)
        x = x - tl.dot(x, x_below, input_precision=SOLVE_PRECISION)
    tl.store(inverse + at[:, None] * BLOCK_T + row[None, :], x, mask=real[:, None])

    read = tl.dot(x, k * (b * tl.exp(c.to(tl.float32)))[:, None], input_precision=PRECISION)
    tl.store(reads + at[:, None] * K + dim[None, :], read, mask=k_real)
    for first in range(0, V, BLOCK_V):
        column = first + tl.arange(0, BLOCK_V)
        v_at = at[:, None] * V + column[None, :]
        v_real = real[:, None] & (column < V)[None, :]
        v = tl.load(value + v_at, mask=v_real, other=0.0).to(tl.float32)
        tl.store(writes + v_at, tl.dot(x, v * b[:, None], input_precision=PRECISION), mask=v_real)


@triton.jit
def gated_delta_rule_fwd_kernel_state(
    key,
    sums,
    writes,
    reads,
    slots,
    states,
    new_values,
    chains,
    chain_chunks,
    chain_slots,
    chunk_begins,
    chunk_lengths,
    chunk_slots,
    HK: tl.constexpr,
    HV: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """The state before each chunk of one chain, the values N that it writes, and kept states."""
    NV: tl.constexpr = (V + BLOCK_V - 1) // BLOCK_V
    pid = tl.program_id(0)
    head = (pid // NV) % HV
    chain = tl.load(chains + pid // (NV * HV))
    row = tl.arange(0, BLOCK_T)
    dim = tl.arange(0, BLOCK_K)
    column = (pid % NV) * BLOCK_V + tl.arange(0, BLOCK_V)
    cell = dim[:, None] * V + column[None, :]
    cell_real = (dim < K)[:, None] & (column < V)[None, :]

    start = (tl.load(chain_slots + chain) * HV + head) * K * V
    state = tl.load(slots + start + cell, mask=cell_real, other=0.0)
    for chunk in range(tl.load(chain_chunks + chain), tl.load(chain_chunks + chain + 1)):
        tl.store(states + (chunk * HV + head) * K * V + cell, state, mask=cell_real)
        begin = tl.load(chunk_begins + chunk)
        length = tl.load(chunk_lengths + chunk)
        real = row < length
        at = (begin + row) * HV + head
        v_at = at[:, None] * V + column[None, :]
        v_real = real[:, None] & (column < V)[None, :]
        k_real = real[:, None] & (dim < K)[None, :]
        read = tl.load(reads + at[:, None] * K + dim[None, :], mask=k_real, other=0.0)
        new = tl.load(writes + v_at, mask=v_real, other=0.0)
        new = new - tl.dot(read, state, input_precision=PRECISION)
        tl.store(new_values + v_at, new, mask=v_real)

        c = tl.load(sums + (begin + tl.minimum(row, length - 1)) * HV + head)
        c_last = tl.load(sums + (begin + length - 1) * HV + head)
        k_row = (begin + row) * HK + head // (HV // HK)
        k_t_real = (dim < K)[:, None] & real[None, :]
        k_t = tl.load(key + k_row[None, :] * K + dim[:, None], mask=k_t_real, other=0.0)
        weighed = new * tl.exp((c_last - c).to(tl.float32))[:, None]
        state = state * tl.exp(c_last.to(tl.float32))
        state += tl.dot(k_t.to(tl.float32), weighed, input_precision=PRECISION)
        slot = tl.load(chunk_slots + chunk)
        if slot >= 0:
            tl.store(slots + (slot * HV + head) * K * V + cell, state, mask=cell_real)


@triton.jit
def gated_delta_rule_fwd_kernel_out(
    query,
    key,
    sums,
    states,
    new_values,
    out,
    chunk_begins,
    chunk_lengths,
    scale,
    HK: tl.constexpr,
    HV: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Outputs of one chunk from the state before it and the values that it writes."""
    NV: tl.constexpr = (V + BLOCK_V - 1) // BLOCK_V
    pid = tl.program_id(0)
    head = (pid // NV) % HV
    chunk = (pid // (NV * HV)).to(tl.int64)
    begin = tl.load(chunk_begins + chunk)
    length = tl.load(chunk_lengths + chunk)
    row = tl.arange(0, BLOCK_T)
    dim = tl.arange(0, BLOCK_K)
    column = (pid % NV) * BLOCK_V + tl.arange(0, BLOCK_V)
    real = row < length
    v_at = ((begin + row) * HV + head)[:, None] * V + column[None, :]
    v_real = real[:, None] & (column < V)[None, :]
    k_at = ((begin + row) * HK + head // (HV // HK))[:, None] * K + dim[None, :]
    k_real = real[:, None] & (dim < K)[None, :]
    cell = (chunk * HV + head) * K * V + dim[:, None] * V + column[None, :]

    q = tl.load(query + k_at, mask=k_real, other=0.0).to(tl.float32) * scale
    k = tl.load(key + k_at, mask=k_real, other=0.0).to(tl.float32)
    c = tl.load(sums + (begin + tl.minimum(row, length - 1)) * HV + head)
    new = tl.load(new_values + v_at, mask=v_real, other=0.0)
    state = tl.load(states + cell, mask=(dim < K)[:, None] & (column < V)[None, :], other=0.0)
    scores = tl.dot(q, tl.trans(k), input_precision=PRECISION)
    scores = scores * _decay_between(c, BLOCK_T, False, False)
    result = tl.dot(scores, new, input_precision=PRECISION)
    result += tl.dot(q * tl.exp(c.to(tl.float32))[:, None], state, input_precision=PRECISION)
    tl.store(out + v_at, result.to(out.dtype.element_ty), mask=v_real)


@triton.jit
def gated_delta_rule_bwd_kernel_dn(
    query,
    key,
    sums,
    dout,
    dnew_values,
    chunk_begins,
    chunk_lengths,
    scale,
    HK: tl.constexpr,
    HV: tl.constexpr,
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
    head = (pid // NV) % HV
    chunk = pid // (NV * HV)
    begin = tl.load(chunk_begins + chunk)
    length = tl.load(chunk_lengths + chunk)
    row = tl.arange(0, BLOCK_T)
    dim = tl.arange(0, BLOCK_K)
    column = (pid % NV) * BLOCK_V + tl.arange(0, BLOCK_V)
    real = row < length
    v_at = ((begin + row) * HV + head)[:, None] * V + column[None, :]
    v_real = real[:, None] & (column < V)[None, :]
    k_at = ((begin + row) * HK + head // (HV // HK))[:, None] * K + dim[None, :]
    k_real = real[:, None] & (dim < K)[None, :]

    q = tl.load(query + k_at, mask=k_real, other=0.0).to(tl.float32) * scale
    k = tl.load(key + k_at, mask=k_real, other=0.0).to(tl.float32)
    c = tl.load(sums + (begin + tl.minimum(row, length - 1)) * HV + head)
    do = tl.load(dout + v_at, mask=v_real, other=0.0).to(tl.float32)
    scores_t = tl.dot(k, tl.trans(q), input_precision=PRECISION)
    scores_t = scores_t * _decay_between(c, BLOCK_T, False, True)
    tl.store(dnew_values + v_at, tl.dot(scores_t, do, input_precision=PRECISION), mask=v_real)


@triton.jit
def gated_delta_rule_bwd_kernel_state(
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
    chain_chunks,
    chunk_begins,
    chunk_lengths,
    chunk_slots,
    slot_begins,
    slot_chains,
    scale,
    HK: tl.constexpr,
    HV: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Gradient of the state behind each chunk of one chain, of its N, and of the chain's start."""
    NV: tl.constexpr = (V + BLOCK_V - 1) // BLOCK_V
    pid = tl.program_id(0)
    head = (pid // NV) % HV
    chain = tl.load(chains + pid // (NV * HV))
    row = tl.arange(0, BLOCK_T)
    dim = tl.arange(0, BLOCK_K)
    column = (pid % NV) * BLOCK_V + tl.arange(0, BLOCK_V)
    cell = dim[:, None] * V + column[None, :]
    cell_real = (dim < K)[:, None] & (column < V)[None, :]

    first = tl.load(chain_chunks + chain)
    last = tl.load(chain_chunks + chain + 1) - 1
    dstate = tl.zeros([BLOCK_K, BLOCK_V], tl.float32)
    for step in range(0, last - first + 1):
        chunk = last - step
        slot = tl.load(chunk_slots + chunk)
        if slot >= 0:
            # What others ask of the kept state: its own gradient, then the chains in fixed order.
            dstate += tl.load(dslots + (slot * HV + head) * K * V + cell, mask=cell_real, other=0.0)
            for place in range(tl.load(slot_begins + slot), tl.load(slot_begins + slot + 1)):
                child = tl.load(slot_chains + place)
                dstate += tl.load(
                    dchains + (child * HV + head) * K * V + cell, mask=cell_real, other=0.0
                )
        tl.store(dstates + (chunk * HV + head) * K * V + cell, dstate, mask=cell_real)

        begin = tl.load(chunk_begins + chunk)
        length = tl.load(chunk_lengths + chunk)
        real = row < length
        at = (begin + row) * HV + head
        v_at = at[:, None] * V + column[None, :]
        v_real = real[:, None] & (column < V)[None, :]
        k_row = (begin + row) * HK + head // (HV // HK)
        k_real = real[:, None] & (dim < K)[None, :]
        k_t_real = (dim < K)[:, None] & real[None, :]
        c = tl.load(sums + (begin + tl.minimum(row, length - 1)) * HV + head)
        c_last = tl.load(sums + (begin + length - 1) * HV + head)
        k = tl.load(key + k_row[:, None] * K + dim[None, :], mask=k_real, other=0.0)
        dnew = tl.dot(k.to(tl.float32), dstate, input_precision=PRECISION)
        dnew = dnew * tl.exp((c_last - c).to(tl.float32))[:, None]
        dnew += tl.load(dnew_values + v_at, mask=v_real, other=0.0)
        tl.store(dnew_values + v_at, dnew, mask=v_real)

        do = tl.load(dout + v_at, mask=v_real, other=0.0).to(tl.float32)
        q_t = tl.load(query + k_row[None, :] * K + dim[:, None], mask=k_t_real, other=0.0)
        q_t = q_t.to(tl.float32) * (tl.exp(c.to(tl.float32)) * scale)[None, :]
        read_t = tl.load(reads + at[None, :] * K + dim[:, None], mask=k_t_real, other=0.0)
        dstate = dstate * tl.exp(c_last.to(tl.float32))
        dstate += tl.dot(q_t, do, input_precision=PRECISION)
        dstate -= tl.dot(read_t, dnew, input_precision=PRECISION)
    tl.store(dchains + (chain * HV + head) * K * V + cell, dstate, mask=cell_real)


@triton.jit
def gated_delta_rule_bwd_kernel_dv(
    beta,
    inverse,
    dnew_values,
    solved,
    dvalue,
    chunk_begins,
    chunk_lengths,
    HV: tl.constexpr,
    V: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_V: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Y = X^T dN and the gradient of the values of one chunk."""
    NV: tl.constexpr = (V + BLOCK_V - 1) // BLOCK_V
    pid = tl.program_id(0)
    head = (pid // NV) % HV
    chunk = pid // (NV * HV)
    begin = tl.load(chunk_begins + chunk)
    length = tl.load(chunk_lengths + chunk)
    row = tl.arange(0, BLOCK_T)
    column = (pid % NV) * BLOCK_V + tl.arange(0, BLOCK_V)
    real = row < length
    at = (begin + row) * HV + head
    v_at = at[:, None] * V + column[None, :]
    v_real = real[:, None] & (column < V)[None, :]

    x_t = tl.load(inverse + at[None, :] * BLOCK_T + row[:, None], mask=real[None, :], other=0.0)
    dnew = tl.load(dnew_values + v_at, mask=v_real, other=0.0)
    b = tl.load(beta + at, mask=real, other=0.0).to(tl.float32)
    y = tl.dot(x_t, dnew, input_precision=PRECISION)
    tl.store(solved + v_at, y, mask=v_real)
    tl.store(dvalue + v_at, (y * b[:, None]).to(dvalue.dtype.element_ty), mask=v_real)


@triton.jit
def gated_delta_rule_bwd_kernel_dqk(
    query,
    key,
    value,
    beta,
    sums,
    states,
    new_values,
    solved,
    dout,
    dstates,
    dquery,
    dkey,
    ddecay,
    dbeta,
    chunk_begins,
    chunk_lengths,
    scale,
    HK: tl.constexpr,
    HV: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Gradients of q and k by value head, of the log decay and of beta, of one chunk."""
    pid = tl.program_id(0)
    head = pid % HV
    chunk = (pid // HV).to(tl.int64)
    begin = tl.load(chunk_begins + chunk)
    length = tl.load(chunk_lengths + chunk)
    row = tl.arange(0, BLOCK_T)
    dim = tl.arange(0, BLOCK_K)
    real = row < length
    at = (begin + row) * HV + head
    k_at = ((begin + row) * HK + head // (HV // HK))[:, None] * K + dim[None, :]
    k_real = real[:, None] & (dim < K)[None, :]
    c = tl.load(sums + (begin + tl.minimum(row, length - 1)) * HV + head)
    c_last = tl.load(sums + (begin + length - 1) * HV + head)
    b = tl.load(beta + at, mask=real, other=0.0).to(tl.float32)
    from_start = tl.exp(c.to(tl.float32))
    to_end = tl.exp((c_last - c).to(tl.float32))
    across = tl.exp(c_last.to(tl.float32))

    # Products over the value dimension. Those that are needed transposed are computed so: Triton
    # 3.4 to 3.7 may miscompile the transpose of a product as an operand on Hopper.
    do_n = tl.zeros([BLOCK_T, BLOCK_T], tl.float32)
    n_do = tl.zeros([BLOCK_T, BLOCK_T], tl.float32)
    y_n = tl.zeros([BLOCK_T, BLOCK_T], tl.float32)
    n_y = tl.zeros([BLOCK_T, BLOCK_T], tl.float32)
    db = tl.zeros([BLOCK_T], tl.float32)
    for first in range(0, V, BLOCK_V):
        column = first + tl.arange(0, BLOCK_V)
        v_at = at[:, None] * V + column[None, :]
        v_real = real[:, None] & (column < V)[None, :]
        do = tl.load(dout + v_at, mask=v_real, other=0.0).to(tl.float32)
        new = tl.load(new_values + v_at, mask=v_real, other=0.0)
        y = tl.load(solved + v_at, mask=v_real, other=0.0)
        v = tl.load(value + v_at, mask=v_real, other=0.0).to(tl.float32)
        do_n += tl.dot(do, tl.trans(new), input_precision=PRECISION)
        n_do += tl.dot(new, tl.trans(do), input_precision=PRECISION)
        y_n += tl.dot(y, tl.trans(new), input_precision=PRECISION)
        n_y += tl.dot(new, tl.trans(y), input_precision=PRECISION)
        db += tl.sum(y * v, 1)

    # The outputs' scores and the system A.
    q = tl.load(query + k_at, mask=k_real, other=0.0).to(tl.float32) * scale
    k = tl.load(key + k_at, mask=k_real, other=0.0).to(tl.float32)
    dscores = do_n * _decay_between(c, BLOCK_T, False, False)
    dscores_t = n_do * _decay_between(c, BLOCK_T, False, True)
    dsystem = -y_n * _decay_between(c, BLOCK_T, True, False)
    dsystem_t = -n_y * _decay_between(c, BLOCK_T, True, True) * b[None, :]
    through_system = dsystem * tl.dot(k, tl.trans(k), input_precision=PRECISION)
    db += tl.sum(through_system, 1)
    dsystem = dsystem * b[:, None]
    flow = dscores * tl.dot(q, tl.trans(k), input_precision=PRECISION)
    flow += through_system * b[:, None]
    dc = tl.sum(flow, 1) - tl.sum(flow, 0)
    dk = tl.dot(dscores_t, q, input_precision=PRECISION)
    dk += tl.dot(dsystem, k, input_precision=PRECISION)
    dk += tl.dot(dsystem_t, k, input_precision=PRECISION)

    # The state before the chunk, as the outputs read it.
    state_at = (chunk * HV + head) * K * V + dim[None, :] * V
    product = tl.zeros([BLOCK_T, BLOCK_K], tl.float32)
    dlast = tl.zeros([BLOCK_K], tl.float32)
    for first in range(0, V, BLOCK_V):
        column = first + tl.arange(0, BLOCK_V)
        v_real = real[:, None] & (column < V)[None, :]
        s_real = (column < V)[:, None] & (dim < K)[None, :]
        do = tl.load(dout + at[:, None] * V + column[None, :], mask=v_real, other=0.0)
        state = tl.load(states + state_at + column[:, None], mask=s_real, other=0.0)
        dstate = tl.load(dstates + state_at + column[:, None], mask=s_real, other=0.0)
        product += tl.dot(do.to(tl.float32), state, input_precision=PRECISION)
        dlast += tl.sum(state * dstate, 0)
    product = product * from_start[:, None]
    dc += tl.sum(q * product, 1)
    dq = (product + tl.dot(dscores, k, input_precision=PRECISION)) * scale
    q_at = at[:, None] * K + dim[None, :]
    tl.store(dquery + q_at, dq, mask=k_real)

    # The same state, as the written values read it.
    product = tl.zeros([BLOCK_T, BLOCK_K], tl.float32)
    for first in range(0, V, BLOCK_V):
        column = first + tl.arange(0, BLOCK_V)
        v_real = real[:, None] & (column < V)[None, :]
        s_real = (column < V)[:, None] & (dim < K)[None, :]
        y = tl.load(solved + at[:, None] * V + column[None, :], mask=v_real, other=0.0)
        state = tl.load(states + state_at + column[:, None], mask=s_real, other=0.0)
        product -= tl.dot(y, state, input_precision=PRECISION)
    product = product * from_start[:, None]
    along = tl.sum(k * product, 1)
    db += along
    dc += along * b
    dk += product * b[:, None]

    # The state behind the chunk.
    product = tl.zeros([BLOCK_T, BLOCK_K], tl.float32)
    for first in range(0, V, BLOCK_V):
        column = first + tl.arange(0, BLOCK_V)
        v_real = real[:, None] & (column < V)[None, :]
        s_real = (column < V)[:, None] & (dim < K)[None, :]
        new = tl.load(new_values + at[:, None] * V + column[None, :], mask=v_real, other=0.0)
        dstate = tl.load(dstates + state_at + column[:, None], mask=s_real, other=0.0)
        product += tl.dot(new, dstate, input_precision=PRECISION)
    product = product * to_end[:, None]
    along = tl.sum(k * product, 1)
    dc -= along
    dk += product
    tl.store(dkey + q_at, dk, mask=k_real)
    tl.store(dbeta + at, db, mask=real)
    end = tl.sum(along, 0) + tl.sum(dlast, 0) * across
    dg = tl.sum(tl.where(row[None, :] >= row[:, None], dc[None, :], 0.0), 1) + end
    tl.store(ddecay + at, dg, mask=real)
