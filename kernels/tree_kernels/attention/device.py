"""Tree attention on a GPU: library calls for the parts, then one kernel that merges their rows."""

# Triton's kernels take plain numbers for what they declare as constants.
# pyright: reportArgumentType=false

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from tree_kernels.attention import groups
from tree_kernels.attention import triton as kernels
from tree_kernels.attention.calls import Call, CallPlan, Terms, plan_calls
from tree_kernels.attention.libraries import CutCudnn, Forward, Grads, Library, Rows
from tree_kernels.attention.streams import SideStreams
from tree_kernels.layout import AttentionParts

_MERGE_BLOCK = 4096
"""Elements of a row that one program merges."""


def device_tree_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    parts: AttentionParts,
    scale: float,
    libraries: tuple[Library, Library | None],
) -> torch.Tensor:
    """See `op.tree_attention`; long parts by the second library, if there is one. Until they are
    merged, the results of all parts are kept: of a row one for each part that it is in."""
    width = query.shape[1] * query.shape[2]
    lone_flops = math.inf if libraries[1] is None else groups.LONE_FLOPS
    piece_rows = groups.PIECE_ROWS if isinstance(libraries[1], CutCudnn) else None
    key_of = ("calls", query.device, width, lone_flops, piece_rows)
    if key_of not in parts.tables:
        parts.tables[key_of] = plan_calls(
            parts,
            len(query),
            len(key),
            query.device,
            width=width,
            lone_flops=lone_flops,
            piece_rows=piece_rows,
        )
    return run_plan(query, key, value, parts.tables[key_of], libraries, scale)


def run_plan(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    plan: CallPlan,
    libraries: tuple[Library, Library | None],
    scale: float,
) -> torch.Tensor:
    """Compute the calls of `plan`, lone ones by the second library; differentiable."""
    out: torch.Tensor = _DeviceAttention.apply(query, key, value, plan, libraries, scale)  # type: ignore[assignment]
    return out


class _DeviceAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        plan: CallPlan,
        libraries: tuple[Library, Library | None],
        scale: float,
    ) -> torch.Tensor:
        query, key, value = query.contiguous(), key.contiguous(), value.contiguous()
        keys = _Keys(key, value, plan.calls)
        with SideStreams(query.device, len(plan.calls)) as side:
            found = [
                side.run(partial(_forward, _library(libraries, call), call, query, keys, scale))
                for call in plan.calls
            ]
            side.join()
            out, logsumexp = _merge(found, plan.out_terms, query)
        ctx.save_for_backward(query, key, value, out, logsumexp)
        ctx.plan, ctx.libraries, ctx.scale = plan, libraries, scale
        ctx.states = [state for _, _, state in found]
        return out

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, *grads: torch.Tensor
    ) -> tuple[torch.Tensor | None, ...]:
        query, key, value, out, logsumexp = ctx.saved_tensors
        plan: CallPlan = ctx.plan
        keys = _Keys(key, value, plan.backward_calls)
        rows = (grads[0].contiguous(), query, out, logsumexp)
        with SideStreams(query.device, len(plan.backward_calls)) as side:
            found = [
                side.run(
                    partial(
                        _backward,
                        _library(ctx.libraries, call),
                        call,
                        rows,
                        keys,
                        ctx.states[call.source],
                        ctx.scale,
                    )
                )
                for call in plan.backward_calls
            ]
            side.join()
            d_query = _sum([each[0] for each in found], plan.query_terms, query)
            d_key = _sum([each[1] for each in found], plan.key_terms, key)
            d_value = _sum([each[2] for each in found], plan.key_terms, value)
        return d_query, d_key, d_value, None, None, None


def _library(libraries: tuple[Library, Library | None], call: Call) -> Library:
    batch, lone = libraries
    return lone if call.lone and lone is not None else batch


class _Keys:
    """Keys and values of calls."""

    def __init__(self, key: torch.Tensor, value: torch.Tensor, calls: Sequence[Call]) -> None:
        self._key, self._value = key, value
        # PyTorch rounds a call's lengths only if no memory lies between its rows: exact ones take
        # keys from `[S + T, H + 1, D]`, of which nobody reads the last head.
        self._apart = None
        if any(call.exact for call in calls):
            self._apart = key.new_empty(len(key), key.shape[1] + 1, key.shape[2])
            self._apart[:, :-1] = key

    def of(self, call: Call) -> tuple[torch.Tensor, torch.Tensor]:
        padding = call.padding if call.square else 0
        value = _take(self._value, call.key_rows, padding)
        if call.exact and self._apart is not None:
            return _take(self._apart, call.key_rows, padding)[:, :-1], value
        return _take(self._key, call.key_rows, padding), value


def _forward(
    library: Library, call: Call, query: torch.Tensor, keys: _Keys, scale: float
) -> Forward:
    return library.forward(_take_on(query, call), *keys.of(call), call, scale)


def _backward(
    library: Library,
    call: Call,
    rows: tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor],
    keys: _Keys,
    state: Any,
    scale: float,
) -> Grads:
    """`rows` are d_out, queries, outputs and their log-sum-exp."""
    d_out, query, out, logsumexp = (_take(each, call.query_rows, call.padding) for each in rows)
    if call.holes is not None:
        d_out.index_fill_(0, call.holes, 0)
    return library.backward(Rows(d_out, query, *keys.of(call), out, logsumexp), state, call, scale)


def _take_on(query: torch.Tensor, call: Call) -> torch.Tensor:
    """The call's queries; padding is the next rows, if there are: forward never mixes queries."""
    rows = call.query_rows
    if isinstance(rows, slice) and rows.stop + call.padding <= len(query):
        return query[rows.start : rows.stop + call.padding]
    return _take(query, rows, call.padding)


def _take(tensor: torch.Tensor, rows: torch.Tensor | slice, padding: int) -> torch.Tensor:
    """The rows and zeros behind them, which add nothing to gradients; other rows may hold NaN."""
    found = tensor[rows] if isinstance(rows, slice) else tensor.index_select(0, rows)
    if not padding:
        return found
    return torch.cat((found, found.new_zeros(padding, *found.shape[1:])))


def _merge(
    found: Sequence[Forward], terms: Terms, query: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Output `[T, HQ, D]` and log-sum-exp `[T, HQ]` of the calls' results."""
    rows, heads, dim = query.shape
    if terms.given_whole:
        return found[0][0][:rows], found[0][1][:rows]
    out = torch.empty_like(query)
    logsumexp = query.new_empty(rows, heads, dtype=torch.float32)
    block_d = _power(dim)
    block_h = max(1, min(_power(heads), _MERGE_BLOCK // block_d))
    kernels.tree_attention_fwd_kernel_merge[(rows, -(-heads // block_h))](
        out,
        logsumexp,
        _addresses([each[0] for each in found]),
        _addresses([each[1] for each in found]),
        terms.begins,
        terms.calls,
        terms.rows,
        HEADS=heads,
        DIM=dim,
        BLOCK_H=block_h,
        BLOCK_D=block_d,
    )
    return out, logsumexp


def _sum(found: Sequence[torch.Tensor], terms: Terms, like: torch.Tensor) -> torch.Tensor:
    """Gradient of `like`, `[T, H, D]`, of the calls' shares."""
    if terms.given_whole:
        return found[0][: len(like)]
    total = torch.empty_like(like)
    width = like.shape[1] * like.shape[2]
    block = min(_power(width), _MERGE_BLOCK)
    kernels.tree_attention_bwd_kernel_sum[(len(like), -(-width // block))](
        total,
        _addresses(found),
        terms.begins,
        terms.calls,
        terms.rows,
        WIDTH=width,
        BLOCK_W=block,
    )
    return total


def _addresses(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Where the tensors lie, `[calls]` int64; the caller keeps them until the kernel started."""
    assert all(each.is_contiguous() for each in tensors)
    addresses = torch.tensor([each.data_ptr() for each in tensors], dtype=torch.int64)
    return addresses.to(tensors[0].device, non_blocking=True)


def _power(value: int) -> int:
    """The power of two that is at least `value`."""
    return 1 << (value - 1).bit_length()
