"""Chains for kernels that scan a recurrence: a chain of first children is one program.

A chain starts from a stored state, so that one launch per light level suffices, however deep the
tree is. Chunks restart where the tree forks and behind every node whose end state is asked for.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

if TYPE_CHECKING:
    from tree_kernels.layout.tree import TreeLayout


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ChainTable:
    """Chunks in strip order, the chains that they form, and the states kept between chains.

    Example:
        Trunk of 3 rows, branches of 2 and 1, size 2: `chunk_begins=[0, 2, 3, 5]`,
        `chunk_lengths=[2, 1, 2, 1]`, `chunk_slots=[-1, 1, -1, -1]` (slot 0 is the root's initial
        state), `chain_chunks=[0, 3, 4]`, `chain_slots=[0, 1]`, `levels=([0], [1])`,
        `slot_begins=[0, 1, 2]`, `slot_chains=[0, 1]`.
    """

    chunk_begins: torch.Tensor
    """First row of each chunk, `[NC]` int64."""
    chunk_lengths: torch.Tensor
    """Rows of each chunk, `[NC]` int64."""
    chunk_slots: torch.Tensor
    """Where the state behind the chunk is kept, -1 where nobody needs it, `[NC]` int64."""
    chain_chunks: torch.Tensor
    """First chunk of each chain, then NC, `[chains + 1]` int64."""
    chain_slots: torch.Tensor
    """Slot that each chain starts from, `[chains]` int64."""
    levels: tuple[torch.Tensor, ...]
    """Chains by light depth, int64: a level needs slots of the levels before it alone."""
    slot_begins: torch.Tensor
    """Where each slot's chains begin in `slot_chains`, then their number, `[slots + 1]` int64."""
    slot_chains: torch.Tensor
    """Chains by the slot that they start from, ascending, `[chains]` int64."""
    root_chains: torch.Tensor
    """Chain of each root; slots `[0, roots)` hold the roots' initial states, `[roots]` int64."""
    end_slots: torch.Tensor
    """Slot of each node whose end state is asked for, int64."""

    @property
    def num_chunks(self) -> int:
        """Chunks, NC."""
        return len(self.chunk_begins)

    @property
    def num_slots(self) -> int:
        """Kept states, the roots' initial states included."""
        return len(self.slot_begins) - 1

    @property
    def num_chains(self) -> int:
        """Chains; each belongs to one level."""
        return len(self.chain_slots)


def build_chains(layout: TreeLayout, size: int, end_nodes: tuple[int, ...]) -> ChainTable:
    """Cut the strip into chunks of at most `size` rows and these into chains."""
    parents = layout.parents
    continues = parents == np.arange(-1, len(parents) - 1)
    first_nodes = np.flatnonzero(~continues | (parents < 0))
    slot_of = _slots(parents, first_nodes, end_nodes)
    begins, lengths, slots, node_chunks = _chunks(layout, size, set(first_nodes.tolist()), slot_of)
    num_roots = int((parents < 0).sum())
    roots = np.cumsum(parents < 0) - 1
    starts = [
        slot_of[int(parents[node])] if parents[node] >= 0 else int(roots[node])
        for node in first_nodes
    ]
    order = np.argsort(starts, kind="stable")
    counts = np.bincount(starts, minlength=num_roots + len(slot_of))
    tensor = layout.tensor
    return ChainTable(
        chunk_begins=tensor(np.array(begins)),
        chunk_lengths=tensor(np.array(lengths)),
        chunk_slots=tensor(np.array(slots)),
        chain_chunks=tensor(np.array([*(node_chunks[node] for node in first_nodes), len(begins)])),
        chain_slots=tensor(np.array(starts)),
        levels=tuple(tensor(level) for level in _levels(parents, first_nodes)),
        slot_begins=tensor(np.concatenate([[0], np.cumsum(counts)])),
        slot_chains=tensor(order),
        root_chains=tensor(np.flatnonzero(parents[first_nodes] < 0)),
        end_slots=tensor(np.array([slot_of[node] for node in end_nodes], dtype=np.int64)),
    )


def _slots(
    parents: np.ndarray, first_nodes: np.ndarray, end_nodes: tuple[int, ...]
) -> dict[int, int]:
    """Slot of each node whose end state is needed, behind the slots of the roots."""
    light_parents = parents[first_nodes]
    kept = sorted({*light_parents[light_parents >= 0].tolist(), *end_nodes})
    num_roots = int((parents < 0).sum())
    return {node: num_roots + index for index, node in enumerate(kept)}


def _chunks(
    layout: TreeLayout, size: int, first_nodes: set[int], slot_of: dict[int, int]
) -> tuple[list[int], list[int], list[int], dict[int, int]]:
    """First row, rows and slot of each chunk; first chunk of each node that begins one."""
    cuts = [n for n in range(layout.num_nodes) if n in first_nodes or n - 1 in slot_of]
    begins: list[int] = []
    lengths: list[int] = []
    slots: list[int] = []
    node_chunks: dict[int, int] = {}
    for node, following in zip(cuts, [*cuts[1:], layout.num_nodes], strict=True):
        node_chunks[node] = len(begins)
        start, end = int(layout.cu_seqlens[node]), int(layout.cu_seqlens[following])
        for begin in range(start, end, size):
            begins.append(begin)
            lengths.append(min(size, end - begin))
            slots.append(-1)
        slots[-1] = slot_of.get(following - 1, -1)
    return begins, lengths, slots, node_chunks


def _levels(parents: np.ndarray, first_nodes: np.ndarray) -> list[np.ndarray]:
    """Chains by the number of light edges above them."""
    chain_of = np.zeros(len(parents), dtype=np.int64)
    chain_of[first_nodes] = 1
    chain_of = np.cumsum(chain_of) - 1
    depths: list[int] = []
    for node in first_nodes:
        parent = int(parents[node])
        depths.append(depths[chain_of[parent]] + 1 if parent >= 0 else 0)
    return [np.flatnonzero(np.array(depths) == depth) for depth in range(max(depths) + 1)]
