"""Checks of the log-probability arguments; the computation is `function.py`'s."""

from __future__ import annotations

import torch

from tree_kernels.logprob.function import ActionLogprobs


def action_logprobs(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    targets: torch.Tensor,
    scale: torch.Tensor,
    *,
    head_dtype: torch.dtype | None = None,
    chunk_rows: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probability of each target and entropy of its distribution.

    Logits are `scale * (hidden @ weight.T)`, with float32 sums; at most 2 GiB of them and of what
    has their shape exist at a time. Under a frozen weight no `[V, D]` gradient does, and forward
    and backward are two products of `[A, D]` with the weight, four where the entropy has a
    gradient; with a trainable weight they are four. Gradients are multiplied in the model's type.

    Args:
        hidden: Final hidden state of each action's source row, `[A, D]`.
        weight: Output embedding, `[V, D]`.
        targets: Token that was chosen, `[A]` int64.
        scale: Inverse temperature (and the model's own logit factor), `[A]`.
        head_dtype: That the sums are rounded to; None is the model's.
        chunk_rows: Rows per chunk; None takes what fits 2 GiB.

    Returns:
        Log-probabilities and entropies in nats, each `[A]` float32 (float64 for float64 inputs).

    Raises:
        ValueError: Shapes that do not fit each other, or a `head_dtype` narrower than the model's.
    """
    if hidden.ndim != 2 or weight.ndim != 2 or hidden.shape[1] != weight.shape[1]:
        raise ValueError(
            f"hidden {tuple(hidden.shape)} and weight {tuple(weight.shape)}; "
            "allowed: [A, D] and [V, D]"
        )
    if targets.shape != hidden.shape[:1] or scale.shape != hidden.shape[:1]:
        raise ValueError(
            f"targets {tuple(targets.shape)} and scale {tuple(scale.shape)}; "
            f"allowed: [{hidden.shape[0]}]"
        )
    if chunk_rows is not None and chunk_rows < 1:
        raise ValueError(f"chunk_rows {chunk_rows}; allowed: 1 and more")
    head_dtype = head_dtype or hidden.dtype
    if torch.promote_types(head_dtype, hidden.dtype) != head_dtype:
        raise ValueError(f"head_dtype {head_dtype}; allowed: {hidden.dtype} and wider")
    return ActionLogprobs.apply(hidden, weight, targets, scale, head_dtype, chunk_rows)
