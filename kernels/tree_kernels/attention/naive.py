"""Tree attention as its definition: every score, a dense mask, a softmax; for tests."""

from __future__ import annotations

import torch

from tree_kernels.layout import AttentionParts


def naive_tree_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    parts: AttentionParts,
    scale: float,
) -> torch.Tensor:
    """See `op.tree_attention`; memory grows with the square of the strip."""
    group = query.shape[1] // key.shape[1]
    keys, values = key.repeat_interleave(group, 1), value.repeat_interleave(group, 1)
    scores = torch.einsum("qhd,khd->hqk", query, keys) * scale
    seen = visible(parts, len(query), len(key)).to(query.device)
    return torch.einsum("hqk,khd->qhd", scores.masked_fill(~seen, -torch.inf).softmax(-1), values)


def visible(parts: AttentionParts, num_queries: int, num_keys: int) -> torch.Tensor:
    """Which query row sees which key row, `[num_queries, num_keys]` bool."""
    seen = torch.zeros(num_queries, num_keys, dtype=torch.bool)
    for index, (rows, columns) in enumerate(zip(parts.queries, parts.keys, strict=True)):
        block = seen[slice(*rows), slice(*columns)]
        square = index < parts.num_squares
        block |= torch.ones_like(block).tril() if square else torch.ones_like(block)
    return seen
