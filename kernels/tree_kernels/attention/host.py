"""Tree attention on the CPU: one dense call of PyTorch's flash kernel for each part.

Parts of a row merge by their log-sum-exp. Backward gives each part the row's final output and
log-sum-exp, as ring attention does, so that gradients of parts only need to be added.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd.function import once_differentiable

from tree_kernels.layout import AttentionParts


def host_tree_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    parts: AttentionParts,
    scale: float,
) -> torch.Tensor:
    """See `op.tree_attention`. Beside the output it keeps a float32 or float64 copy of it while it
    runs, and as much again as one part's operands."""
    out: torch.Tensor = _HostAttention.apply(query, key, value, parts, scale)  # type: ignore[assignment]
    return out


class _HostAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        parts: AttentionParts,
        scale: float,
    ) -> torch.Tensor:
        out, logsumexp = _forward(query, key, value, parts, scale)
        ctx.save_for_backward(query, key, value, out, logsumexp)
        ctx.parts, ctx.scale = parts, scale
        return out

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, *grads: torch.Tensor
    ) -> tuple[torch.Tensor | None, ...]:
        query, key, value, out, logsumexp = ctx.saved_tensors
        found = _backward(
            grads[0], query, key, value, out, logsumexp, parts=ctx.parts, scale=ctx.scale
        )
        return *found, None, None


def _forward(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    parts: AttentionParts,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Output `[T, HQ, D]` and log-sum-exp `[G, H, T]` of all keys that a row sees."""
    group, heads = query.shape[1] // key.shape[1], key.shape[1]
    sums = query.new_zeros(query.shape, dtype=_sum_type(query))
    merged = _by_head(sums, heads)
    # Summed over many parts, rounding in float32 would show in small gradients.
    logsumexp = sums.new_full((group, heads, len(query)), -torch.inf, dtype=torch.float64)
    for rows, columns, square in _slices(parts):
        part, part_logsumexp = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            _by_head(query[rows], heads),
            _repeated(key[columns], group),
            _repeated(value[columns], group),
            0.0,
            square,
            scale=scale,
        )
        before = logsumexp[..., rows]
        after = torch.logaddexp(before, part_logsumexp)
        block = merged[:, :, rows]
        block *= (before - after).exp()[..., None].to(sums.dtype)
        block += part * (part_logsumexp - after).exp()[..., None].to(sums.dtype)
        logsumexp[..., rows] = after
    return sums.to(query.dtype), logsumexp.to(sums.dtype)


def _backward(
    d_out: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    out: torch.Tensor,
    logsumexp: torch.Tensor,
    *,
    parts: AttentionParts,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients of query, key and value."""
    group, heads = query.shape[1] // key.shape[1], key.shape[1]
    grads = [each.new_zeros(each.shape, dtype=_sum_type(each)) for each in (query, key, value)]
    d_query, d_key, d_value = (_by_head(each, heads) for each in grads)
    for rows, columns, square in _slices(parts):
        part = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            _by_head(d_out[rows], heads),
            _by_head(query[rows], heads),
            _repeated(key[columns], group),
            _repeated(value[columns], group),
            _by_head(out[rows], heads),
            # The kernel wants the order of dimensions in which its forward gives it.
            logsumexp[..., rows].permute(0, 2, 1).contiguous().permute(0, 2, 1),
            0.0,
            square,
            scale=scale,
        )
        d_query[:, :, rows] += part[0]
        d_key[0, :, columns] += part[1].sum(0)
        d_value[0, :, columns] += part[2].sum(0)
    d_query, d_key, d_value = (
        grad.to(each.dtype) for grad, each in zip(grads, (query, key, value), strict=True)
    )
    return d_query, d_key, d_value


def _slices(parts: AttentionParts) -> list[tuple[slice, slice, bool]]:
    """Query rows, key rows, and whether the part is a square."""
    return [
        (slice(*rows), slice(*columns), index < parts.num_squares)
        for index, (rows, columns) in enumerate(
            zip(parts.queries.tolist(), parts.keys.tolist(), strict=True)
        )
    ]


def _sum_type(tensor: torch.Tensor) -> torch.dtype:
    return torch.float64 if tensor.dtype == torch.float64 else torch.float32


def _by_head(rows: torch.Tensor, heads: int) -> torch.Tensor:
    """`[N, G * H, D]` as a view `[G, H, N, D]`: a batch entry for each query head of a key head."""
    return rows.unflatten(1, (heads, -1)).permute(2, 1, 0, 3)


def _repeated(rows: torch.Tensor, group: int) -> torch.Tensor:
    """`[N, H, D]` as a view `[G, H, N, D]`."""
    return rows.transpose(0, 1).expand(group, -1, -1, -1)
