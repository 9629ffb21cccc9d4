"""Softmax statistics of a chunk of logits in PyTorch."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RowGrads:
    """Derivatives of a loss by each row's log-probability and entropy, `[n]` wide."""

    logprob: torch.Tensor
    entropy: torch.Tensor

    @classmethod
    def of_logprob(cls, like: torch.Tensor) -> RowGrads:
        """Those of the log-probability itself, for rows as in `like`."""
        return cls(logprob=torch.ones_like(like), entropy=torch.zeros_like(like))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RowStatistics:
    """What a chunk of n rows of logits gives."""

    logprob: torch.Tensor
    """Of each target, nats, `[n]` float32 (float64 for float64 logits)."""
    entropy: torch.Tensor
    """Nats, `[n]`."""
    grad: torch.Tensor | None
    """Derivative of the loss by the unscaled logits, `[n, V]`; None unless asked."""


def naive_row_statistics(
    logits: torch.Tensor,
    targets: torch.Tensor,
    scale: torch.Tensor,
    grads: RowGrads | None,
    grad_dtype: torch.dtype,
) -> RowStatistics:
    """Of `scale * logits`; see `op.action_logprobs`.

    Args:
        logits: `[n, V]`.
        targets: `[n]` int64.
        scale: `[n]`.
        grads: The loss's; None asks for no gradient.
        grad_dtype: Of the gradient.
    """
    wide = torch.float64 if logits.dtype == torch.float64 else torch.float32
    every = (logits.to(wide) * scale[:, None].to(wide)).log_softmax(1)
    logprob = every.gather(1, targets[:, None])[:, 0]
    p = every.exp()
    entropy = -(p * every).sum(1)
    if grads is None:
        return RowStatistics(logprob=logprob, entropy=entropy, grad=None)
    by_logprob, by_entropy = grads.logprob.to(wide)[:, None], grads.entropy.to(wide)[:, None]
    # d log p[target] = onehot - p;  d H = -p (log p + H).
    grad = p.mul_(-(by_logprob + by_entropy * (every + entropy[:, None])))
    grad = grad.scatter_add_(1, targets[:, None], by_logprob) * scale[:, None].to(wide)
    return RowStatistics(logprob=logprob, entropy=entropy, grad=grad.to(grad_dtype))
