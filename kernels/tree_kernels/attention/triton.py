"""Triton kernels that add up what parts gave: outputs by their log-sum-exp, gradients as they are.

A row's terms lie in the results of several calls. Term e of a row is row `rows[e]` of the result at
address `addresses[calls[e]]`; terms are added in their order, so the same row has the same bits.
"""

# pyright: reportArgumentType=false, reportOperatorIssue=false, reportGeneralTypeIssues=false

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _term(addresses, calls, rows, e, like):
    """Address of term e's row as a pointer like `like`, and the row's number."""
    address = tl.load(addresses + tl.load(calls + e)).to(like.dtype)
    # Tensors begin at multiples of 16 bytes; told so, the compiler reads as many at a time.
    return tl.multiple_of(address, 16), tl.load(rows + e).to(tl.int64)


@triton.jit
def tree_attention_fwd_kernel_merge(
    out,
    logsumexp,
    part_outs,
    part_logsumexps,
    term_begins,
    calls,
    rows,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Output `[T, HEADS, DIM]` and log-sum-exp `[T, HEADS]` of one row and a block of heads."""
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    column = tl.arange(0, BLOCK_D)
    heads = head < HEADS
    block = heads[:, None] & (column < DIM)[None, :]
    offsets = head[:, None] * DIM + column[None, :]
    begin = tl.load(term_begins + row)
    end = tl.load(term_begins + row + 1)
    top = tl.full((BLOCK_H,), float("-inf"), tl.float32)
    for e in range(begin, end):
        base, at = _term(part_logsumexps, calls, rows, e, logsumexp)
        top = tl.maximum(top, tl.load(base + at * HEADS + head, mask=heads, other=0.0))
    total = tl.zeros((BLOCK_H,), tl.float32)
    merged = tl.zeros((BLOCK_H, BLOCK_D), tl.float32)
    for e in range(begin, end):
        base, at = _term(part_logsumexps, calls, rows, e, logsumexp)
        weight = tl.exp(tl.load(base + at * HEADS + head, mask=heads, other=0.0) - top)
        base, at = _term(part_outs, calls, rows, e, out)
        part = tl.load(base + at * HEADS * DIM + offsets, mask=block, other=0.0)
        merged += weight[:, None] * part.to(tl.float32)
        total += weight
    merged = merged / total[:, None]
    tl.store(out + row * HEADS * DIM + offsets, merged.to(out.dtype.element_ty), mask=block)
    tl.store(logsumexp + row * HEADS + head, top + tl.log(total), mask=heads)


@triton.jit
def tree_attention_bwd_kernel_sum(
    out,
    parts,
    term_begins,
    calls,
    rows,
    WIDTH: tl.constexpr,
    BLOCK_W: tl.constexpr,
):
    """Sum of a row's terms, `[T, WIDTH]`; zero where there is none."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK_W + tl.arange(0, BLOCK_W)
    columns = column < WIDTH
    total = tl.zeros((BLOCK_W,), tl.float32)
    for e in range(tl.load(term_begins + row), tl.load(term_begins + row + 1)):
        base, at = _term(parts, calls, rows, e, out)
        total += tl.load(base + at * WIDTH + column, mask=columns, other=0.0).to(tl.float32)
    tl.store(out + row * WIDTH + column, total.to(out.dtype.element_ty), mask=columns)
