"""Log-probability in PyTorch: chunks of logits, computed again in backward."""

from __future__ import annotations

from typing import Any

import torch


class ActionLogprobs(torch.autograd.Function):
    """See `op.action_logprobs`."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        targets: torch.Tensor,
        scale: torch.Tensor,
        chunk_rows: int,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Log-probabilities and entropies, each `[A]`."""
        logprobs, entropies = [], []
        for rows in _slices(hidden.shape[0], chunk_rows):
            every = _log_softmax(hidden[rows], weight, scale[rows])
            logprobs.append(every.gather(1, targets[rows, None])[:, 0])
            entropies.append(-(every.exp() * every).sum(1))
        ctx.save_for_backward(hidden, weight, targets, scale)
        ctx.chunk_rows = chunk_rows
        empty = scale.new_zeros(0, dtype=_wide_type(hidden))
        return torch.cat([empty, *logprobs]), torch.cat([empty, *entropies])

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """Gradients of hidden and, where needed, of weight."""
        hidden, weight, targets, scale = ctx.saved_tensors
        grad_hidden = torch.zeros_like(hidden)
        grad_weight = (
            torch.zeros_like(weight, dtype=_wide_type(hidden)) if ctx.needs_input_grad[1] else None
        )
        for rows in _slices(hidden.shape[0], ctx.chunk_rows):
            every = _log_softmax(hidden[rows], weight, scale[rows])
            grad = _logit_grad(every, targets[rows], grads[0][rows], grads[1][rows])
            grad = (grad * scale[rows, None]).to(hidden.dtype)
            grad_hidden[rows] = grad @ weight
            if grad_weight is not None:
                grad_weight += grad.t() @ hidden[rows]
        if grad_weight is not None:
            grad_weight = grad_weight.to(weight.dtype)
        return grad_hidden, grad_weight, None, None, None


def _slices(total: int, size: int) -> list[slice]:
    return [slice(begin, min(begin + size, total)) for begin in range(0, total, size)]


def _wide_type(values: torch.Tensor) -> torch.dtype:
    return torch.float64 if values.dtype == torch.float64 else torch.float32


def _log_softmax(hidden: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    logits = (hidden @ weight.t()).to(_wide_type(hidden))
    return (logits * scale[:, None].to(logits.dtype)).log_softmax(1)


def _logit_grad(
    every: torch.Tensor,
    targets: torch.Tensor,
    grad_logprob: torch.Tensor,
    grad_entropy: torch.Tensor,
) -> torch.Tensor:
    """d log p[target] = onehot - p;  d H = -p (log p + H)."""
    p = every.exp()
    entropy = -(p * every).sum(1, keepdim=True)
    grad = -p * (grad_logprob[:, None] + grad_entropy[:, None] * (every + entropy))
    return grad.scatter_add(1, targets[:, None], grad_logprob[:, None])
