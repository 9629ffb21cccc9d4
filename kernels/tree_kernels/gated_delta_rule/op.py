"""Checks of the gated delta rule's arguments; the computation is `naive.py`'s."""

from __future__ import annotations

import torch

from tree_kernels.gated_delta_rule.naive import naive_tree_gated_delta_rule
from tree_kernels.layout import TreeLayout


def tree_gated_delta_rule(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    log_decay: torch.Tensor,
    beta: torch.Tensor,
    layout: TreeLayout,
    *,
    chunk_size: int | None = None,
) -> torch.Tensor:
    """Gated DeltaNet recurrence; each node starts from its parent's end state.

    Args:
        query: Normalised queries, `[T, HK, K]`; scaled by `K**-0.5` inside.
        key: Normalised keys, `[T, HK, K]`.
        value: Values, `[T, HV, V]`; HV is a multiple of HK.
        log_decay: Log of the state's decay, at most 0, `[T, HV]`.
        beta: Write strength in [0, 1], `[T, HV]`.
        layout: The tree; T rows. Mounts play no part.
        chunk_size: Rows per chunk; None chooses by the tree's runs.

    Returns:
        `[T, HV, V]` in `value`'s type; the state is float32, or float64 for float64 inputs.

    Raises:
        ValueError: Shapes that do not fit each other or the layout.
    """
    rows = layout.num_tokens
    if query.ndim != 3 or query.shape != key.shape or query.shape[0] != rows:
        raise ValueError(
            f"query {tuple(query.shape)} and key {tuple(key.shape)}; allowed: [{rows}, HK, K]"
        )
    if value.ndim != 3 or value.shape[0] != rows or value.shape[1] % key.shape[1]:
        raise ValueError(
            f"value {tuple(value.shape)}; allowed: [{rows}, a multiple of {key.shape[1]}, V]"
        )
    if log_decay.shape != value.shape[:2] or beta.shape != value.shape[:2]:
        raise ValueError(
            f"log_decay {tuple(log_decay.shape)} and beta {tuple(beta.shape)}; "
            f"allowed: {tuple(value.shape[:2])}"
        )
    return naive_tree_gated_delta_rule(
        query, key, value, log_decay, beta, layout, chunk_size=chunk_size
    )
