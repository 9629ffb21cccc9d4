"""Checks of the log-probability arguments; the computation is `naive.py`'s."""

from __future__ import annotations

import torch

from tree_kernels.logprob.naive import ActionLogprobs


def action_logprobs(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    targets: torch.Tensor,
    scale: torch.Tensor,
    *,
    chunk_rows: int = 4096,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probability of each target and entropy of its distribution.

    Logits are `scale * (hidden @ weight.T)`; only `chunk_rows` of them exist at a time, and the
    weight's gradient is computed only where it is asked for.

    Args:
        hidden: Final hidden state of each action's source row, `[A, D]`.
        weight: Output embedding, `[V, D]`.
        targets: Token that was chosen, `[A]` int64.
        scale: Inverse temperature (and the model's own logit factor), `[A]`.
        chunk_rows: Rows per chunk.

    Returns:
        Log-probabilities and entropies in nats, each `[A]` float32 (float64 for float64 inputs).

    Raises:
        ValueError: Shapes that do not fit each other.
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
    if chunk_rows < 1:
        raise ValueError(f"chunk_rows {chunk_rows}; allowed: 1 and more")
    return ActionLogprobs.apply(hidden, weight, targets, scale, chunk_rows)
