"""Triton kernel of the softmax statistics: one program a row, two passes over its logits."""

# pyright: reportArgumentType=false, reportOperatorIssue=false, reportGeneralTypeIssues=false, reportCallIssue=false

from __future__ import annotations

import torch
import triton
import triton.language as tl

from tree_kernels.logprob.naive import RowGrads, RowStatistics

_BLOCK_V = 4096
_NUM_WARPS = 8


@triton.jit
def logprob_kernel(
    logits,
    targets,
    scale,
    logprob,
    entropy,
    grad_logprob,
    grad_entropy,
    grad,
    V,
    BLOCK_V: tl.constexpr,
    WITH_GRAD: tl.constexpr,
):
    """Log-probability and entropy of a row; `grad` may be the logits' own place."""
    row = tl.program_id(0)
    own = logits + row.to(tl.int64) * V
    own_grad = grad + row.to(tl.int64) * V
    factor = tl.load(scale + row).to(tl.float32)
    target = tl.load(targets + row)
    offset = tl.arange(0, BLOCK_V)
    # Finite, so that the first shift of an empty sum is 0 and no NaN.
    top = -1.0e38
    total = 0.0
    moment = 0.0
    for begin in range(0, V, BLOCK_V):
        mask = begin + offset < V
        z = tl.load(own + begin + offset, mask=mask, other=float("-inf")).to(tl.float32) * factor
        new_top = tl.maximum(top, tl.max(tl.where(mask, z, -1.0e38), 0))
        shifted = tl.where(mask, z - new_top, 0.0)
        weight = tl.where(mask, tl.exp(shifted), 0.0)
        decay = tl.exp(top - new_top)
        moment = decay * (moment + total * (top - new_top)) + tl.sum(weight * shifted, 0)
        total = decay * total + tl.sum(weight, 0)
        top = new_top
    log_total = tl.log(total)
    row_entropy = log_total - moment / total
    chosen = tl.load(own + target).to(tl.float32) * factor
    tl.store(logprob + row, chosen - top - log_total)
    tl.store(entropy + row, row_entropy)
    if WITH_GRAD:
        by_logprob = tl.load(grad_logprob + row).to(tl.float32)
        by_entropy = tl.load(grad_entropy + row).to(tl.float32)
        for begin in range(0, V, BLOCK_V):
            mask = begin + offset < V
            z = tl.load(own + begin + offset, mask=mask, other=0.0).to(tl.float32) * factor
            logp = z - top - log_total
            slope = -tl.exp(logp) * (by_logprob + by_entropy * (logp + row_entropy))
            slope = tl.where(begin + offset == target, slope + by_logprob, slope) * factor
            tl.store(own_grad + begin + offset, slope.to(grad.dtype.element_ty), mask=mask)


def row_statistics(
    logits: torch.Tensor,
    targets: torch.Tensor,
    scale: torch.Tensor,
    grads: RowGrads | None,
    grad_dtype: torch.dtype,
) -> RowStatistics:
    """As `naive_row_statistics`, in float32; a gradient of the logits' type takes their place."""
    rows, vocab = logits.shape
    logprob, entropy = (
        torch.empty(rows, device=logits.device, dtype=torch.float32) for _ in range(2)
    )
    given = grads or RowGrads(logprob=logprob, entropy=entropy)
    in_place = grads is None or grad_dtype == logits.dtype
    grad = logits if in_place else torch.empty_like(logits, dtype=grad_dtype)
    if rows:
        logprob_kernel[(rows,)](
            logits,
            targets.contiguous(),
            scale.contiguous(),
            logprob,
            entropy,
            given.logprob.contiguous(),
            given.entropy.contiguous(),
            grad,
            vocab,
            BLOCK_V=min(_BLOCK_V, triton.next_power_of_2(vocab)),
            WITH_GRAD=grads is not None,
            num_warps=_NUM_WARPS,
        )
    return RowStatistics(logprob=logprob, entropy=entropy, grad=None if grads is None else grad)
