"""The autograd function: chunks of logits, and each row's gradient beside its log-probability."""

from __future__ import annotations

from typing import Any

import torch

from tree_kernels.logprob.head import head_logits
from tree_kernels.logprob.naive import RowGrads, RowStatistics, naive_row_statistics

MAX_CHUNK_BYTES = 2 << 30
"""Of all that has a logit's shape at one time."""

_NAIVE_COPIES = 4
"""The logits, their wide form, its softmax, and a gradient."""


class ActionLogprobs(torch.autograd.Function):
    """See `op.action_logprobs`."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        targets: torch.Tensor,
        scale: torch.Tensor,
        head_dtype: torch.dtype,
        chunk_rows: int | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Log-probabilities and entropies, each `[A]`."""
        ctx.set_materialize_grads(False)
        ctx.head_dtype = head_dtype
        ctx.chunk_rows = chunk_rows or default_chunk_rows(hidden, weight, head_dtype)
        # A trainable head needs the probabilities in the backward: all is computed again there.
        keeps = ctx.needs_input_grad[0] and not ctx.needs_input_grad[1]
        logprobs, entropies = (scale.new_empty(len(hidden), dtype=_wide(hidden)) for _ in range(2))
        slopes = torch.empty_like(hidden) if keeps else None
        for rows in _slices(len(hidden), ctx.chunk_rows):
            logits = head_logits(hidden[rows], weight, head_dtype)
            grads = RowGrads.of_logprob(scale[rows]) if keeps else None
            found = _statistics(logits, targets[rows], scale[rows], grads, hidden.dtype)
            logprobs[rows], entropies[rows] = found.logprob, found.entropy
            if slopes is not None and found.grad is not None:
                torch.mm(found.grad, weight, out=slopes[rows])
        ctx.save_for_backward(hidden, weight, targets, scale, slopes)
        return logprobs, entropies

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        """Gradients of hidden and, where needed, of weight."""
        hidden, _, _, scale, slopes = ctx.saved_tensors
        of_logprob, of_entropy = grads
        if of_logprob is None and of_entropy is None:
            return None, None, None, None, None, None
        if slopes is not None and of_logprob is not None and of_entropy is None:
            return (slopes * of_logprob[:, None]).to(hidden.dtype), None, None, None, None, None
        zeros = torch.zeros_like(scale, dtype=_wide(hidden))
        given = RowGrads(
            logprob=zeros if of_logprob is None else of_logprob,
            entropy=zeros if of_entropy is None else of_entropy,
        )
        return *_computed_again(ctx, given), None, None, None, None


def default_chunk_rows(hidden: torch.Tensor, weight: torch.Tensor, head_dtype: torch.dtype) -> int:
    """Rows whose logits take at most `MAX_CHUNK_BYTES` with all copies; one row at least."""
    if not _has_kernel(hidden):
        bytes_each = _NAIVE_COPIES * _wide(hidden).itemsize
    elif head_dtype == hidden.dtype:
        bytes_each = hidden.element_size()
    else:
        # A gradient of the narrow type stands beside wide logits.
        bytes_each = head_dtype.itemsize + hidden.element_size()
    return max(MAX_CHUNK_BYTES // (weight.shape[0] * bytes_each), 1)


def _computed_again(ctx: Any, given: RowGrads) -> tuple[torch.Tensor, torch.Tensor | None]:
    hidden, weight, targets, scale, _ = ctx.saved_tensors
    grad_hidden = torch.empty_like(hidden)
    grad_weight = torch.zeros_like(weight, dtype=_wide(hidden)) if ctx.needs_input_grad[1] else None
    for rows in _slices(len(hidden), ctx.chunk_rows):
        logits = head_logits(hidden[rows], weight, ctx.head_dtype)
        own = RowGrads(logprob=given.logprob[rows], entropy=given.entropy[rows])
        grad = _statistics(logits, targets[rows], scale[rows], own, hidden.dtype).grad
        assert grad is not None
        torch.mm(grad, weight, out=grad_hidden[rows])
        if grad_weight is not None:
            grad_weight += grad.t() @ hidden[rows]
    return grad_hidden, None if grad_weight is None else grad_weight.to(weight.dtype)


def _statistics(
    logits: torch.Tensor,
    targets: torch.Tensor,
    scale: torch.Tensor,
    grads: RowGrads | None,
    grad_dtype: torch.dtype,
) -> RowStatistics:
    if not _has_kernel(logits):
        return naive_row_statistics(logits, targets, scale, grads, grad_dtype)
    # Triton does not come with PyTorch's builds for the CPU.
    from tree_kernels.logprob.triton import row_statistics

    return row_statistics(logits, targets, scale, grads, grad_dtype)


def _has_kernel(values: torch.Tensor) -> bool:
    return values.device.type == "cuda" and values.dtype != torch.float64


def _slices(total: int, size: int) -> list[slice]:
    return [slice(begin, min(begin + size, total)) for begin in range(0, total, size)]


def _wide(values: torch.Tensor) -> torch.dtype:
    return torch.float64 if values.dtype == torch.float64 else torch.float32
