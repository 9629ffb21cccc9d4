"""Host side of the Triton kernels and their place in autograd."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from tree_kernels.chain_scan import BLOCK_SIZES, MAX_KEY_DIM, ChainScan, Delta, default_block_t
from tree_kernels.gated_delta_rule import triton as kernels
from tree_kernels.layout import ChainTable, TreeLayout


def chain_scan(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    log_decay: torch.Tensor,
    beta: torch.Tensor,
    layout: TreeLayout,
    *,
    initial_states: torch.Tensor | None,
    end_nodes: Sequence[int],
    chunk_size: int | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """See `op.tree_gated_delta_rule_with_states`.

    Raises:
        ValueError: A chunk size or key dimension that the kernels don't know.
    """
    block_t = chunk_size or default_block_t(value.dtype)
    if block_t not in BLOCK_SIZES:
        raise ValueError(f"chunk_size {block_t}; allowed on this device: {BLOCK_SIZES}")
    if key.shape[2] > MAX_KEY_DIM:
        raise ValueError(
            f"key dimension {key.shape[2]}; allowed in the kernels: 1 to {MAX_KEY_DIM}"
        )
    chains = layout.chains(block_t, end_nodes)
    with torch.cuda.device_of(value):
        return _ChainScan.apply(query, key, value, log_decay, beta, initial_states, chains, block_t)


class _ChainScan(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        log_decay: torch.Tensor,
        beta: torch.Tensor,
        initial_states: torch.Tensor | None,
        chains: ChainTable,
        block_t: int,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        ctx.types = query.dtype, key.dtype, log_decay.dtype, beta.dtype
        ctx.initial_type = None if initial_states is None else initial_states.dtype
        query, key, value = (each.to(value.dtype).contiguous() for each in (query, key, value))
        beta = beta.contiguous()
        scan = ChainScan.of(key, value, chains, block_t, key.shape[2] ** -0.5)
        sums = scan.sums(log_decay.contiguous())
        inverse = _solve(scan, key, beta, sums)
        new_values = scan.empty(scan.rows, scan.value_dim)
        reads = _apply(scan, key, value, beta, sums, inverse, new_values)
        out, slots = scan.forward(query, key, sums, new_values, reads, initial_states)
        ctx.save_for_backward(query, key, value, beta, sums, inverse, new_values, slots)
        ctx.scan = scan
        return out, slots[chains.end_slots]

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, *grads: torch.Tensor
    ) -> tuple[torch.Tensor | None, ...]:
        query, key, value, beta, sums, inverse, new_values, slots = ctx.saved_tensors
        scan: ChainScan = ctx.scan
        reads = _apply(scan, key, value, beta, sums, inverse, None)
        delta = Delta(value=value, beta=beta, inverse=inverse, reads=reads)
        found = scan.backward(
            query, key, sums, new_values, delta, slots, grads[0].contiguous(), grads[1]
        )
        by_key_head = [
            grad.unflatten(1, (scan.key_heads, -1)).sum(2) for grad in (found.query, found.key)
        ]
        dquery, dkey, ddecay, dbeta = (
            None if grad is None else grad.to(dtype)
            for grad, dtype in zip(
                (*by_key_head, found.log_decay, found.beta), ctx.types, strict=True
            )
        )
        initial_type = ctx.initial_type
        dinitial = None if initial_type is None else found.initial_states.to(initial_type)
        return dquery, dkey, found.value, ddecay, dbeta, dinitial, None, None


def _solve(
    scan: ChainScan, key: torch.Tensor, beta: torch.Tensor, sums: torch.Tensor
) -> torch.Tensor:
    """X by row, `[T, H, BLOCK_T]`."""
    inverse = scan.empty(scan.rows, scan.block_t)
    scan.launch(
        kernels.gated_delta_rule_kernel_solve,
        "solve",
        scan.chains.num_chunks * scan.heads,
        key,
        beta,
        sums,
        inverse,
        *scan.chunks,
        LOG_T=scan.block_t.bit_length() - 1,
    )
    return inverse


def _apply(
    scan: ChainScan,
    key: torch.Tensor,
    value: torch.Tensor,
    beta: torch.Tensor,
    sums: torch.Tensor,
    inverse: torch.Tensor,
    writes: torch.Tensor | None,
) -> torch.Tensor:
    """W, `[T, H, K]`; U goes to `writes`, if given."""
    reads = scan.empty(scan.rows, scan.key_dim)
    scan.launch(
        kernels.gated_delta_rule_kernel_apply,
        "apply",
        scan.chains.num_chunks * scan.heads,
        key,
        value,
        beta,
        sums,
        inverse,
        reads,
        value if writes is None else writes,
        *scan.chunks,
        WRITES=writes is not None,
    )
    return reads
