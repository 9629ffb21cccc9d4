"""Host side of the Triton kernels and their place in autograd."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from tree_kernels.chain_scan.scan import ChainScan, Gradients, checked_block_t
from tree_kernels.gated_delta_rule import triton as kernels
from tree_kernels.layout import ChainTable, TreeLayout
from tree_kernels.layout.chains import ChainGroup


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
    block_t = checked_block_t(chunk_size, key, value, value.device)
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
        query, key = (each.to(value.dtype).contiguous() for each in (query, key))
        if value.stride()[1:] != (value.shape[2], 1):
            value = value.contiguous()
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
        dvalue = scan.empty(scan.rows, scan.value_dim)
        dbeta = scan.empty(scan.rows, dtype=torch.float32)

        def add_local(
            group: ChainGroup, states: torch.Tensor, dkey: torch.Tensor, found: Gradients
        ) -> None:
            scan.launch(
                kernels.gated_delta_rule_bwd_kernel_system,
                "system",
                group.num_chunks * scan.heads,
                key,
                value,
                beta,
                sums,
                inverse,
                states,
                new_values,
                found.new_values,
                dkey,
                dvalue,
                found.log_decay,
                dbeta,
                *scan.chunks,
                group.first_row,
                group.first_chunk,
                value.stride(0),
            )

        dout, dends = grads
        found = scan.backward(
            query, key, sums, new_values, reads, slots, dout.contiguous(), dends, add_local
        )
        dlike = (found.query, found.key, found.log_decay, dbeta)
        dquery, dkey, ddecay, dbeta = (
            grad.to(dtype) for grad, dtype in zip(dlike, ctx.types, strict=True)
        )
        initial_type = ctx.initial_type
        dinitial = None if initial_type is None else found.initial_states.to(initial_type)
        return dquery, dkey, dvalue, ddecay, dbeta, dinitial, None, None


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
        value.stride(0),
        WRITES=writes is not None,
    )
    return reads
