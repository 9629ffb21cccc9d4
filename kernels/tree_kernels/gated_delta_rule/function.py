"""Host side of the Triton kernels: buffers, launches, and their place in autograd.

The backward pass computes states and written values again: kept from the forward pass they would
take K * V floats per chunk and head.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from tree_kernels.gated_delta_rule import triton as kernels
from tree_kernels.layout import ChainTable, TreeLayout

BLOCK_SIZES = (16, 32, 64)
"""Rows per chunk that the kernels know."""
MAX_KEY_DIM = 128
"""A program holds all rows of a state; 256 would take more shared memory than an H200 has."""


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


def default_block_t(dtype: torch.dtype) -> int:
    """Rows per chunk: IEEE products of 64 float32 rows spill 18 kB a thread, of 32 rows 3 kB."""
    return 32 if dtype == torch.float32 else 64


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
        given = (query, key, value, log_decay, beta)
        query, key, value, log_decay, beta = (each.contiguous() for each in given)
        ctx.save_for_backward(query, key, value, log_decay, beta, initial_states)
        ctx.chains, ctx.block_t = chains, block_t
        launch = _Launch.of(key, value, chains, block_t)
        scan = launch.scan(key, value, log_decay, beta, initial_states)
        return launch.out(query, key, scan), scan.slots[chains.end_slots]

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, *grads: torch.Tensor
    ) -> tuple[torch.Tensor | None, ...]:
        query, key, value, log_decay, beta, initial_states = ctx.saved_tensors
        launch = _Launch.of(key, value, ctx.chains, ctx.block_t)
        scan = launch.scan(key, value, log_decay, beta, initial_states)
        found = launch.gradients(query, key, value, beta, scan, grads[0].contiguous(), grads[1])
        dinitial = found.pop()
        like = (query, key, value, log_decay, beta)
        wanted = [grad.to(each.dtype) for grad, each in zip(found, like, strict=True)]
        if initial_states is not None:
            return *wanted, dinitial.to(initial_states.dtype), None, None
        return *wanted, None, None, None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Scan:
    """What the forward scan leaves; T rows, NC chunks; all float32 but the sums."""

    sums: torch.Tensor
    """Running sums of the log decay in each chunk, `[T, HV]` float64."""
    inverse: torch.Tensor
    """(I + A)^-1 by row, `[T, HV, BLOCK_T]`."""
    reads: torch.Tensor
    """W, `[T, HV, K]`."""
    new_values: torch.Tensor
    """N, `[T, HV, V]`."""
    states: torch.Tensor
    """State before each chunk, `[NC, HV, K, V]`."""
    slots: torch.Tensor
    """Kept states, `[slots, HV, K, V]`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Launch:
    """Shapes of one call and the kernels' launches over them."""

    chains: ChainTable
    like: torch.Tensor
    """Value's type and device."""
    rows: int
    key_heads: int
    heads: int
    key_dim: int
    value_dim: int
    block_t: int

    @classmethod
    def of(
        cls, key: torch.Tensor, value: torch.Tensor, chains: ChainTable, block_t: int
    ) -> _Launch:
        """The launch for these inputs."""
        return cls(
            chains=chains,
            like=value,
            rows=value.shape[0],
            key_heads=key.shape[1],
            heads=value.shape[1],
            key_dim=key.shape[2],
            value_dim=value.shape[2],
            block_t=block_t,
        )

    def scan(
        self,
        key: torch.Tensor,
        value: torch.Tensor,
        log_decay: torch.Tensor,
        beta: torch.Tensor,
        initial_states: torch.Tensor | None,
    ) -> _Scan:
        """Solve all chunks at once, then carry the state, level by level."""
        scan = _Scan(
            sums=self._empty(self.rows, dtype=torch.float64),
            inverse=self._empty(self.rows, self.block_t),
            reads=self._empty(self.rows, self.key_dim),
            new_values=self._empty(self.rows, self.value_dim),
            states=self._empty(self.chains.num_chunks, self.key_dim, self.value_dim),
            slots=self._empty(self.chains.num_slots, self.key_dim, self.value_dim),
        )
        writes = torch.empty_like(scan.new_values)
        roots = len(self.chains.root_chains)
        scan.slots[:roots] = 0.0 if initial_states is None else initial_states
        kernels.gated_delta_rule_fwd_kernel_solve[(self.chains.num_chunks * self.heads,)](
            key,
            value,
            log_decay,
            beta,
            scan.sums,
            scan.inverse,
            writes,
            scan.reads,
            *self._chunks,
            **self._solve,
            **self._large,
            **self._options,
        )
        for level in self.chains.levels:
            kernels.gated_delta_rule_fwd_kernel_state[(len(level) * self._programs,)](
                key,
                scan.sums,
                writes,
                scan.reads,
                scan.slots,
                scan.states,
                scan.new_values,
                level,
                self.chains.chain_chunks,
                self.chains.chain_slots,
                *self._chunks,
                self.chains.chunk_slots,
                **self._options,
            )
        return scan

    def out(self, query: torch.Tensor, key: torch.Tensor, scan: _Scan) -> torch.Tensor:
        """Outputs, `[T, HV, V]`."""
        out = torch.empty_like(self.like)
        kernels.gated_delta_rule_fwd_kernel_out[(self.chains.num_chunks * self._programs,)](
            query,
            key,
            scan.sums,
            scan.states,
            scan.new_values,
            out,
            *self._chunks,
            self._scale,
            **self._options,
        )
        return out

    def gradients(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        beta: torch.Tensor,
        scan: _Scan,
        dout: torch.Tensor,
        dends: torch.Tensor,
    ) -> list[torch.Tensor]:
        """Of query, key, value, log decay, beta and the initial states, in float32."""
        dnew_values, dstates, dchains = self._state_gradients(query, key, scan, dout, dends)
        solved, dvalue = torch.empty_like(scan.new_values), torch.empty_like(value)
        kernels.gated_delta_rule_bwd_kernel_dv[(self.chains.num_chunks * self._programs,)](
            beta,
            scan.inverse,
            dnew_values,
            solved,
            dvalue,
            *self._chunks,
            **{k: v for k, v in self._options.items() if k not in ("HK", "K", "BLOCK_K")},
        )
        dquery = self._empty(self.rows, self.key_dim)
        dkey = torch.empty_like(dquery)
        ddecay, dbeta = self._empty(self.rows), self._empty(self.rows)
        kernels.gated_delta_rule_bwd_kernel_dqk[(self.chains.num_chunks * self.heads,)](
            query,
            key,
            value,
            beta,
            scan.sums,
            scan.states,
            scan.new_values,
            solved,
            dout,
            dstates,
            dquery,
            dkey,
            ddecay,
            dbeta,
            *self._chunks,
            self._scale,
            **self._large,
            **self._options,
        )
        by_key_head = [grad.unflatten(1, (self.key_heads, -1)).sum(2) for grad in (dquery, dkey)]
        return [*by_key_head, dvalue, ddecay, dbeta, dchains[self.chains.root_chains]]

    def _state_gradients(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        scan: _Scan,
        dout: torch.Tensor,
        dends: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Of N, of the state behind each chunk and of the state that each chain starts from."""
        dnew_values = torch.empty_like(scan.new_values)
        kernels.gated_delta_rule_bwd_kernel_dn[(self.chains.num_chunks * self._programs,)](
            query,
            key,
            scan.sums,
            dout,
            dnew_values,
            *self._chunks,
            self._scale,
            **self._options,
        )
        dslots = torch.zeros_like(scan.slots)
        dslots[self.chains.end_slots] = dends
        dstates = torch.empty_like(scan.states)
        dchains = self._empty(self.chains.num_chains, self.key_dim, self.value_dim)
        for level in reversed(self.chains.levels):
            kernels.gated_delta_rule_bwd_kernel_state[(len(level) * self._programs,)](
                query,
                key,
                scan.sums,
                scan.reads,
                dout,
                dslots,
                dstates,
                dnew_values,
                dchains,
                level,
                self.chains.chain_chunks,
                *self._chunks,
                self.chains.chunk_slots,
                self.chains.slot_begins,
                self.chains.slot_chains,
                self._scale,
                **self._options,
            )
        return dnew_values, dstates, dchains

    @property
    def _chunks(self) -> tuple[torch.Tensor, torch.Tensor]:
        return self.chains.chunk_begins, self.chains.chunk_lengths

    @property
    def _scale(self) -> float:
        return self.key_dim**-0.5

    @property
    def _programs(self) -> int:
        """Heads times blocks of the value dimension."""
        return self.heads * -(-self.value_dim // _block(self.value_dim, 32))

    @property
    def _options(self) -> dict[str, Any]:
        return {
            "HK": self.key_heads,
            "HV": self.heads,
            "K": self.key_dim,
            "V": self.value_dim,
            "BLOCK_T": self.block_t,
            "BLOCK_K": _block(self.key_dim, MAX_KEY_DIM),
            "BLOCK_V": _block(self.value_dim, 32),
            # bfloat16 rounds far above TF32; float32 callers want float32.
            "PRECISION": "ieee" if self.like.dtype == torch.float32 else "tf32",
            # Tiles are float32: more than one stage of them would not fit in shared memory.
            "num_stages": 1,
        }

    @property
    def _solve(self) -> dict[str, Any]:
        return {
            "LOG_T": self.block_t.bit_length() - 1,
            # X feeds all that follows; three products of TF32 are nearly float32.
            "SOLVE_PRECISION": "ieee" if self.like.dtype == torch.float32 else "tf32x3",
        }

    @property
    def _large(self) -> dict[str, Any]:
        """For programs with many tiles of `[BLOCK_T, BLOCK_T]`."""
        return {"num_warps": 8}

    def _empty(self, first: int, *rest: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.empty(first, self.heads, *rest, dtype=dtype, device=self.like.device)


def _block(size: int, limit: int) -> int:
    """Power of two that covers `size`, from what a dot takes to `limit`."""
    return min(max(16, 1 << (size - 1).bit_length()), limit)
