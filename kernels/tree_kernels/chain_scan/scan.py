"""Host side of the chain scan: buffers and launches, group by group.

States stand in memory for one group of chunks at a time; the backward computes them again from the
slots, every run at once.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from tree_kernels.chain_scan import triton as kernels
from tree_kernels.layout import ChainTable
from tree_kernels.layout.chains import ChainGroup

BLOCK_SIZES = (16, 32, 64)
"""Rows per chunk that the kernels know."""
MAX_KEY_DIM = 128
"""A program holds all rows of a state; 256 would take more shared memory than an H200 has."""

GPU_HEADS = ((128, 64), (128, 128))
"""Key and value dimensions that have run right on a GPU. For some others ptxas 12.8, of Triton 3.6,
loses the address of an operand in shared memory: 12 by 20 reads outside of it, which no self-test
survives, 16 by 32 and 128 by 20 are wrong. So others are left to PyTorch."""


def default_block_t(dtype: torch.dtype) -> int:
    """Rows per chunk: IEEE products of 64 float32 rows spill 18 kB a thread, of 32 rows 3 kB."""
    return 32 if dtype == torch.float32 else 64


def checked_block_t(
    chunk_size: int | None, key: torch.Tensor, value: torch.Tensor, device: torch.device
) -> int:
    """Rows per chunk of a scan on `device`.

    Raises:
        ValueError: A chunk size or head dimensions that the kernels don't know.
    """
    block_t = chunk_size or default_block_t(value.dtype)
    if block_t not in BLOCK_SIZES:
        raise ValueError(f"chunk_size {block_t}; allowed on this device: {BLOCK_SIZES}")
    dims = (key.shape[2], value.shape[2])
    if dims[0] > MAX_KEY_DIM:
        raise ValueError(f"key dimension {dims[0]}; allowed in the kernels: 1 to {MAX_KEY_DIM}")
    if device.type == "cuda" and dims not in GPU_HEADS:
        raise ValueError(f"heads of {dims[0]} by {dims[1]}; allowed on a GPU: {GPU_HEADS}")
    return block_t


@dataclass(frozen=True, slots=True, kw_only=True)
class Gradients:
    """Of one scan."""

    query: torch.Tensor
    """`[T, HK, K]`."""
    key: torch.Tensor
    """`[T, HK, K]`."""
    new_values: torch.Tensor
    """`[T, H, V]`."""
    log_decay: torch.Tensor
    """`[T, H]` float32."""
    initial_states: torch.Tensor
    """`[roots, H, K, V]` float32."""


AddLocal = Callable[[ChainGroup, torch.Tensor, torch.Tensor, Gradients], None]
"""Given a group, the states before its chunks, `[chunks, H, K, V]`, its keys' gradient by head,
`[rows, H, K]`, and the gradients of all rows: adds what the caller alone knows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChainScan:
    """Shapes of one call and the kernels' launches over them; T rows, NC chunks."""

    chains: ChainTable
    dtype: torch.dtype
    """Of queries, keys and values, of the states in memory and of what products take."""
    device: torch.device
    rows: int
    key_heads: int
    heads: int
    key_dim: int
    value_dim: int
    block_t: int
    scale: float
    """Of the queries."""

    @classmethod
    def of(
        cls,
        key: torch.Tensor,
        value: torch.Tensor,
        chains: ChainTable,
        block_t: int,
        scale: float,
    ) -> ChainScan:
        """The scan for these inputs."""
        return cls(
            chains=chains,
            dtype=value.dtype,
            device=value.device,
            rows=value.shape[0],
            key_heads=key.shape[1],
            heads=value.shape[1],
            key_dim=key.shape[2],
            value_dim=value.shape[2],
            block_t=block_t,
            scale=scale,
        )

    def sums(self, log_decay: torch.Tensor) -> torch.Tensor:
        """Running sums of the log decay in each chunk, `[T, H]` float64."""
        sums = self.empty(self.rows, dtype=torch.float64)
        self.launch(
            kernels.chain_scan_kernel_sums,
            "sums",
            self.chains.num_chunks,
            log_decay,
            sums,
            *self.chunks,
            BLOCK_H=block(self.heads, 1 << 20),
        )
        return sums

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        sums: torch.Tensor,
        new_values: torch.Tensor,
        reads: torch.Tensor | None,
        initial_states: torch.Tensor | None,
        skip: tuple[torch.Tensor, torch.Tensor] | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Outputs, `[T, H, V]`, and kept states, `[slots, H, K, V]` float32.

        Args:
            new_values: N. With `reads`, U, over which N is written.
            reads: W of the delta rule; None without it.
            skip: Values, `[T, H, V]`, and their weights, `[H]`, to add to the outputs.
        """
        out = self.empty(self.rows, self.value_dim)
        slots = self.empty(self.chains.num_slots, self.key_dim, self.value_dim, dtype=torch.float32)
        slots[: len(self.chains.root_chains)] = 0.0 if initial_states is None else initial_states
        states = self._states()
        for group in self.chains.groups:
            for level in group.levels:
                self._walk(
                    key,
                    sums,
                    new_values,
                    new_values if reads is None else reads,
                    slots,
                    states,
                    new_values,
                    level,
                    self.chains.chain_runs,
                    self.chains.chain_slots,
                    *self._runs,
                    group.first_chunk,
                    KEEP=True,
                    DELTA=reads is not None,
                )
            self.launch(
                kernels.chain_scan_fwd_kernel_out,
                "out",
                group.num_chunks * self._programs("out"),
                query,
                key,
                sums,
                states,
                new_values,
                *(skip or (new_values, sums)),
                out,
                *self.chunks,
                group.first_chunk,
                self.scale,
                SKIP=skip is not None,
            )
        return out, slots

    def backward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        sums: torch.Tensor,
        new_values: torch.Tensor,
        reads: torch.Tensor | None,
        slots: torch.Tensor,
        dout: torch.Tensor,
        dends: torch.Tensor,
        add_local: AddLocal | None = None,
    ) -> Gradients:
        """Gradients of one scan from those of its outputs and end states, N held fixed.

        Args:
            reads: W of the delta rule, by which N depends on the states; None without it.
            add_local: Called for each group, last group first.
        """
        found = self._gradients()
        self.launch(
            kernels.chain_scan_bwd_kernel_dn,
            "dn",
            self.chains.num_chunks * self._programs("dn"),
            query,
            key,
            sums,
            dout,
            found.new_values,
            *self.chunks,
            self.scale,
        )
        dslots = torch.zeros_like(slots)
        dslots[self.chains.end_slots] = dends
        dchains = self.empty(
            self.chains.num_chains, self.key_dim, self.value_dim, dtype=torch.float32
        )
        states, dstates = self._states(), self._states()
        by_head = [self.empty(self.chains.most_rows, self.key_dim) for _ in range(2)]
        for group in reversed(self.chains.groups):
            for level in reversed(group.levels):
                self._walk_back(
                    query, key, sums, reads, dout, dslots, dstates, found, dchains, level, group
                )
            self._walk(
                key,
                sums,
                new_values,
                new_values,
                slots,
                states,
                new_values,
                group.runs,
                self.chains.run_bounds,
                self.chains.run_starts,
                *self._runs,
                group.first_chunk,
                KEEP=False,
                DELTA=False,
            )
            self.launch(
                kernels.chain_scan_bwd_kernel_dqk,
                "dqk",
                group.num_chunks * self.heads,
                query,
                key,
                sums,
                states,
                new_values,
                dout,
                dstates,
                *by_head,
                found.log_decay,
                *self.chunks,
                group.first_row,
                group.first_chunk,
                self.scale,
            )
            if add_local is not None:
                add_local(group, states, by_head[1], found)
            rows = slice(group.first_row, group.first_row + group.num_rows)
            for grad, each in zip((found.query, found.key), by_head, strict=True):
                grouped = each[: group.num_rows].unflatten(1, (self.key_heads, -1))
                torch.sum(grouped, 2, out=grad[rows])
        found.initial_states.copy_(dchains[self.chains.root_chains])
        return found

    def _walk(self, *args: Any, **options: Any) -> None:
        """Launch the forward scan over the chains in `args[7]`."""
        programs = len(args[7]) * self._programs("state")
        self.launch(kernels.chain_scan_fwd_kernel_state, "state", programs, *args, **options)

    def _walk_back(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        sums: torch.Tensor,
        reads: torch.Tensor | None,
        dout: torch.Tensor,
        dslots: torch.Tensor,
        dstates: torch.Tensor,
        found: Gradients,
        dchains: torch.Tensor,
        level: torch.Tensor,
        group: ChainGroup,
    ) -> None:
        """Gradients of the states behind the chunks of the chains in `level`."""
        self.launch(
            kernels.chain_scan_bwd_kernel_state,
            "dstate",
            len(level) * self._programs("dstate"),
            query,
            key,
            sums,
            key if reads is None else reads,
            dout,
            dslots,
            dstates,
            found.new_values,
            dchains,
            level,
            self.chains.chain_runs,
            *self._runs,
            self.chains.slot_begins,
            self.chains.slot_chains,
            group.first_chunk,
            self.scale,
            DELTA=reads is not None,
        )

    def _gradients(self) -> Gradients:
        return Gradients(
            query=self.empty(self.rows, self.key_dim, heads=self.key_heads),
            key=self.empty(self.rows, self.key_dim, heads=self.key_heads),
            new_values=self.empty(self.rows, self.value_dim),
            log_decay=self.empty(self.rows, dtype=torch.float32),
            initial_states=self.empty(
                len(self.chains.root_chains), self.key_dim, self.value_dim, dtype=torch.float32
            ),
        )

    def _states(self) -> torch.Tensor:
        """Room for the states of the largest group."""
        return self.empty(self.chains.most_chunks, self.key_dim, self.value_dim)

    @property
    def chunks(self) -> tuple[torch.Tensor, torch.Tensor]:
        """First row and rows of each chunk."""
        return self.chains.chunk_begins, self.chains.chunk_lengths

    @property
    def _runs(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        table = self.chains
        return table.run_begins, table.run_ends, table.run_chunks, table.run_slots

    def _programs(self, tuning: str) -> int:
        """Heads times blocks of the value dimension."""
        return self.heads * -(-self.value_dim // self._tuned(tuning)["BLOCK_V"])

    def launch(self, kernel: Any, tuning: str, programs: int, *args: Any, **constants: Any) -> None:
        """Launch `kernel` with this scan's sizes, as far as it takes them."""
        sizes = {
            "HK": self.key_heads,
            "H": self.heads,
            "K": self.key_dim,
            "V": self.value_dim,
            "BLOCK_T": self.block_t,
            "BLOCK_K": block(self.key_dim, MAX_KEY_DIM),
            # float32 callers want float32; operands of others fit in TF32.
            "PRECISION": "ieee" if self.dtype == torch.float32 else "tf32",
            **self._tuned(tuning),
        }
        launched = (*kernel.arg_names, "num_warps", "num_stages")
        sizes = {name: size for name, size in sizes.items() if name in launched}
        kernel[(programs,)](*args, **constants, **sizes)

    def _tuned(self, kernel: str) -> dict[str, int]:
        tunings = _EXACT if self.dtype == torch.float32 else _FAST
        block_v, num_warps, num_stages = tunings[kernel]
        if kernel in ("dqk", "system"):
            # A loop of one step is unrolled, and then its values don't fit in registers.
            block_v = min(block_v, max(16, block(self.value_dim, 1 << 20) // 2))
        return {
            "BLOCK_V": block(self.value_dim, block_v),
            "num_warps": num_warps,
            "num_stages": num_stages,
        }

    def empty(
        self, first: int, *rest: int, heads: int = 0, dtype: torch.dtype | None = None
    ) -> torch.Tensor:
        """Fresh memory, `[first, H or other heads, *rest]`."""
        shape = (first, heads or self.heads, *rest)
        return torch.empty(shape, dtype=dtype or self.dtype, device=self.device)


_FAST = {
    "sums": (16, 4, 1),
    "solve": (16, 4, 1),
    "apply": (64, 4, 1),
    "written": (64, 4, 1),
    "state": (32, 4, 3),
    "out": (64, 4, 2),
    "dn": (64, 4, 2),
    "dstate": (32, 4, 3),
    "dqk": (64, 8, 2),
    "system": (64, 4, 2),
}
"""Kernel -> BLOCK_V, warps, stages, of 16-bit values."""
_EXACT = {name: (32, 8 if name in ("dqk", "system") else 4, 1) for name in _FAST}
"""The same of float32: more than one stage would not fit in shared memory."""


def block(size: int, limit: int) -> int:
    """Power of two that covers `size`, from what a dot takes to `limit`."""
    return min(max(16, 1 << (size - 1).bit_length()), limit)
