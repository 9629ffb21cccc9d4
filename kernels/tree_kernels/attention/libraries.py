"""Dense attention of PyTorch's CUDA libraries: forward with log-sum-exp, backward that takes it.

Every library takes the sequences of one `Call`: query `[N, HQ, D]`, key and value `[M, H, D]`, all
contiguous, but for memory between the keys of exact calls. Forward gives the output
`[N, HQ, D]` and the log-sum-exp `[N, HQ]` float32; backward takes both, of all keys that a row
sees, and gives the call's share of the three gradients.
"""

from __future__ import annotations

import os
import warnings
from typing import Any, NamedTuple, Protocol

import torch

from tree_kernels.attention.calls import Call

Forward = tuple[torch.Tensor, torch.Tensor, Any]
"""Output, log-sum-exp, and what the library's backward wants of its forward."""
Grads = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
"""Of query, key and value."""


class Rows(NamedTuple):
    """What backward is given of a call's sequences."""

    d_out: torch.Tensor
    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    out: torch.Tensor
    """Of all keys that a row sees, as is the log-sum-exp."""
    logsumexp: torch.Tensor


# Said once a process by PyTorch; what it warns of, `self_test.py` tries, or `CutCudnn` wants.
warnings.filterwarnings("ignore", message="TORCH_CUDNN_SDPA_AVOID_RECOMPILE=1")


class Library(Protocol):
    """Dense attention over the sequences of a call."""

    def forward(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, call: Call, scale: float
    ) -> Forward:
        """See `Forward`."""
        ...

    def backward(self, rows: Rows, state: Any, call: Call, scale: float) -> Grads:
        """The call's share of the gradients."""
        ...


class Cudnn:
    """cuDNN, one sequence a call or equally long ones."""

    def forward(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, call: Call, scale: float
    ) -> Forward:
        """See `Library`."""
        found = torch.ops.aten._scaled_dot_product_cudnn_attention(
            *(_heads_first(each, call) for each in (query, key, value)),
            None,
            True,
            0.0,
            call.square,
            False,
            scale=scale,
        )
        out, logsumexp = found[:2]
        # Plans by rounded lengths keep the log-sum-exp row by row, exact ones head by head.
        by_row = not logsumexp.is_contiguous()
        state = (by_row, logsumexp.ndim, found[2], found[3], found[6], found[7])
        logsumexp = logsumexp[..., 0] if logsumexp.ndim == 4 else logsumexp
        return _rows_first(out), _rows_first(logsumexp), state

    def backward(self, rows: Rows, state: Any, call: Call, scale: float) -> Grads:
        """See `Library`."""
        by_row, ndim, query_begins, key_begins, seed, offset = state
        stats = _heads_first(rows.logsumexp, call)
        stats = stats if by_row else stats.contiguous()
        d_query, d_key, d_value = torch.ops.aten._scaled_dot_product_cudnn_attention_backward(
            *(_heads_first(each, call) for each in rows[:5]),
            stats[..., None] if ndim == 4 else stats,
            seed,
            offset,
            None,
            query_begins,
            key_begins,
            call.max_queries,
            call.max_keys,
            0.0,
            call.square,
            scale=scale,
        )
        return _rows_first(d_query), _rows_first(d_key), _rows_first(d_value)


class CutCudnn(Cudnn):
    """cuDNN whose exact calls have plans of exact lengths: faster, but each is compiled once."""

    def backward(self, rows: Rows, state: Any, call: Call, scale: float) -> Grads:
        """See `Library`."""
        return super().backward(rows, (_is_rounded(call), *state[1:]), call, scale)


class Flash:
    """FlashAttention 2 as PyTorch brings it, many sequences a call."""

    def forward(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, call: Call, scale: float
    ) -> Forward:
        """See `Library`."""
        out, logsumexp, seed, offset, _ = torch.ops.aten._flash_attention_forward(
            query,
            key,
            value,
            call.query_begins,
            call.key_begins,
            _bound(call),
            call.max_keys,
            0.0,
            call.square,
            False,
            scale=scale,
        )
        return out, logsumexp.t().contiguous(), (seed, offset)

    def backward(self, rows: Rows, state: Any, call: Call, scale: float) -> Grads:
        """See `Library`."""
        return torch.ops.aten._flash_attention_backward(
            *rows[:5],
            rows.logsumexp.t().contiguous(),
            call.query_begins,
            call.key_begins,
            _bound(call),
            call.max_keys,
            0.0,
            call.square,
            *state,
            scale=scale,
        )


class Efficient:
    """PyTorch's memory-efficient kernels: any type and size, as many key heads as query heads."""

    def forward(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, call: Call, scale: float
    ) -> Forward:
        """See `Library`."""
        group = query.shape[1] // key.shape[1]
        out, padded, seed, offset, *_ = torch.ops.aten._efficient_attention_forward(
            query[None],
            key.repeat_interleave(group, 1)[None],
            value.repeat_interleave(group, 1)[None],
            None,
            call.query_begins,
            call.key_begins,
            call.max_queries,
            call.max_keys,
            0.0,
            _mask_type(call),
            True,
            scale=scale,
        )
        sequences, places = call.places
        return out[0], padded[sequences, :, places].contiguous(), (seed, offset)

    def backward(self, rows: Rows, state: Any, call: Call, scale: float) -> Grads:
        """See `Library`."""
        query_heads, heads = rows.query.shape[1], rows.key.shape[1]
        group = query_heads // heads
        sequences, places = call.places
        # The kernel wants a multiple of 32 rows, infinite behind a sequence's end.
        shape = (len(call.query_begins) - 1, query_heads, -(-call.max_queries // 32) * 32)
        padded = rows.logsumexp.new_full(shape, torch.inf)
        padded[sequences, :, places] = rows.logsumexp
        d_query, d_key, d_value, _ = torch.ops.aten._efficient_attention_backward(
            rows.d_out[None],
            rows.query[None],
            rows.key.repeat_interleave(group, 1)[None],
            rows.value.repeat_interleave(group, 1)[None],
            None,
            rows.out[None],
            call.query_begins,
            call.key_begins,
            call.max_queries,
            call.max_keys,
            padded,
            0.0,
            *state,
            _mask_type(call),
            False,
            scale=scale,
        )
        d_key, d_value = (each[0].unflatten(1, (heads, group)).sum(2) for each in (d_key, d_value))
        return d_query[0], d_key, d_value


def _mask_type(call: Call) -> int:
    """Of the memory-efficient kernels: none, or causal from the bottom right."""
    return 2 if call.square else 0


def _bound(call: Call) -> int:
    """The longest sequence or 2: for 1, FlashAttention rearranges heads as for decoding."""
    return max(call.max_queries, 2)


def _is_rounded(call: Call) -> bool:
    """PyTorch rounds a call's lengths only if no memory lies between its rows."""
    return not call.exact and os.environ.get("TORCH_CUDNN_SDPA_AVOID_RECOMPILE") == "1"


def _heads_first(rows: torch.Tensor, call: Call) -> torch.Tensor:
    """`[B * N, H, ...]` as a view `[B, H, N, ...]`."""
    return rows.unflatten(0, (len(call.query_begins) - 1, -1)).transpose(1, 2)


def _rows_first(heads: torch.Tensor) -> torch.Tensor:
    """`[B, H, N, ...]` as `[B * N, H, ...]`, contiguous."""
    return heads.transpose(1, 2).flatten(0, 1).contiguous()
