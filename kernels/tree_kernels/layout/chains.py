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

RUN_ROWS = 4096
"""Rows after which a state is kept, so that states are computed again from there, in parallel."""
GROUP_ROWS = 65536
"""Rows whose states stand in memory together. Of 32 heads of 128 by 128, at a bfloat16 state per 64
rows, states and their gradients take 2 GiB."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ChainGroup:
    """Consecutive rows and chunks whose states stand in memory together."""

    first_row: int
    num_rows: int
    first_chunk: int
    num_chunks: int
    levels: tuple[torch.Tensor, ...]
    """The group's chains by the light edges above them, int64: a level needs slots of earlier
    levels and groups alone."""
    runs: torch.Tensor
    """The group's runs, int64."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ChainTable:
    """Chunks in strip order, cut into runs and chains, and the states kept between them.

    A run is what a chain computes between two kept states; a state is kept behind a node with light
    children, behind a node whose end state is asked for, and wherever one run continues another.

    Example:
        Trunk of 3 rows, branches of 2 and 1, size 2: `chunk_begins=[0, 2, 3, 5]`,
        `chunk_lengths=[2, 1, 2, 1]`; runs `run_begins=[0, 3, 5]`, `run_ends=[3, 5, 6]`,
        `run_chunks=[0, 2, 3]`, `run_slots=[1, -1, -1]`, `run_starts=[0, 1, 1]` (slot 0 is the
        root's initial state); chains `chain_runs=[0, 2, 3]`, `chain_slots=[0, 1]` in the levels
        `([0], [1])` of one group; `slot_begins=[0, 1, 2]`, `slot_chains=[0, 1]`.
    """

    chunk_begins: torch.Tensor
    """First row of each chunk, `[NC]` int64."""
    chunk_lengths: torch.Tensor
    """Rows of each chunk, `[NC]` int64."""
    run_begins: torch.Tensor
    """First row of each run, `[runs]` int64."""
    run_ends: torch.Tensor
    """Row behind each run, `[runs]` int64."""
    run_chunks: torch.Tensor
    """First chunk of each run, `[runs]` int64."""
    run_slots: torch.Tensor
    """Where the state behind the run is kept, -1 where nobody needs it, `[runs]` int64."""
    run_starts: torch.Tensor
    """Slot of the state before the run, `[runs]` int64."""
    run_bounds: torch.Tensor
    """0 to the number of runs: each run as a chain of its own, `[runs + 1]` int64."""
    chain_runs: torch.Tensor
    """First run of each chain, then their number, `[chains + 1]` int64."""
    chain_slots: torch.Tensor
    """Slot that each chain starts from, `[chains]` int64."""
    slot_begins: torch.Tensor
    """Where each slot's chains begin in `slot_chains`, then their number, `[slots + 1]` int64."""
    slot_chains: torch.Tensor
    """Chains by the slot that they start from, ascending, `[chains]` int64."""
    root_chains: torch.Tensor
    """Chain of each root; slots `[0, roots)` hold the roots' initial states, `[roots]` int64."""
    end_slots: torch.Tensor
    """Slot of each node whose end state is asked for, int64."""
    groups: tuple[ChainGroup, ...]
    """In strip order."""

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
        """Chains; each belongs to one level of one group."""
        return len(self.chain_slots)

    @property
    def most_chunks(self) -> int:
        """Chunks of the largest group."""
        return max(group.num_chunks for group in self.groups)

    @property
    def most_rows(self) -> int:
        """Rows of the largest group."""
        return max(group.num_rows for group in self.groups)


@dataclass(slots=True)
class _Run:
    begin: int
    end: int
    chunk: int
    start: int
    slot: int = -1
    continues: bool = False
    group: int = 0


def build_chains(layout: TreeLayout, size: int, end_nodes: tuple[int, ...]) -> ChainTable:
    """Cut the strip into chunks of at most `size` rows and these into runs and chains."""
    runs, slot_of, num_slots = _runs(layout, size, end_nodes)
    _group(runs)
    firsts = [
        index
        for index, run in enumerate(runs)
        if not run.continues or run.group != runs[index - 1].group
    ]
    starts = [runs[first].start for first in firsts]
    begins = [begin for run in runs for begin in range(run.begin, run.end, size)]
    lengths = [min(size, run.end - b) for run in runs for b in range(run.begin, run.end, size)]
    num_roots = int((layout.parents < 0).sum())
    counts = np.bincount(starts, minlength=num_slots)

    def tensor(values: object) -> torch.Tensor:
        return layout.tensor(np.array(values, dtype=np.int64))

    return ChainTable(
        chunk_begins=tensor(begins),
        chunk_lengths=tensor(lengths),
        run_begins=tensor([run.begin for run in runs]),
        run_ends=tensor([run.end for run in runs]),
        run_chunks=tensor([run.chunk for run in runs]),
        run_slots=tensor([run.slot for run in runs]),
        run_starts=tensor([run.start for run in runs]),
        run_bounds=tensor(range(len(runs) + 1)),
        chain_runs=tensor([*firsts, len(runs)]),
        chain_slots=tensor(starts),
        slot_begins=tensor([0, *np.cumsum(counts)]),
        slot_chains=tensor(np.argsort(starts, kind="stable")),
        root_chains=tensor([chain for chain, slot in enumerate(starts) if slot < num_roots]),
        end_slots=tensor([slot_of[node] for node in end_nodes]),
        groups=tuple(
            ChainGroup(
                first_row=runs[members[0]].begin,
                num_rows=runs[members[-1]].end - runs[members[0]].begin,
                first_chunk=runs[members[0]].chunk,
                num_chunks=sum(-(-(runs[m].end - runs[m].begin) // size) for m in members),
                levels=tuple(tensor(level) for level in levels),
                runs=tensor(members),
            )
            for members, levels in _levels(runs, firsts)
        ),
    )


def _runs(
    layout: TreeLayout, size: int, end_nodes: tuple[int, ...]
) -> tuple[list[_Run], dict[int, int], int]:
    """Runs in strip order; the slots of nodes whose end states are kept; the number of slots."""
    parents = layout.parents
    fresh = (parents != np.arange(-1, len(parents) - 1)) | (parents < 0)
    light_parents = parents[fresh]
    kept = sorted({*light_parents[light_parents >= 0].tolist(), *end_nodes})
    num_roots = int((parents < 0).sum())
    slot_of = {node: num_roots + index for index, node in enumerate(kept)}
    num_slots = num_roots + len(kept)
    roots = np.cumsum(parents < 0) - 1
    cuts = [n for n in range(layout.num_nodes) if fresh[n] or n - 1 in slot_of]
    runs: list[_Run] = []
    chunk = 0
    for node, following in zip(cuts, [*cuts[1:], layout.num_nodes], strict=True):
        start, end = int(layout.cu_seqlens[node]), int(layout.cu_seqlens[following])
        for begin in range(start, end, RUN_ROWS):
            continues = begin > start or not fresh[node]
            if continues and runs[-1].slot < 0:
                runs[-1].slot = num_slots
                num_slots += 1
            parent = int(parents[node])
            given = slot_of[parent] if parent >= 0 else int(roots[node])
            before = runs[-1].slot if continues else given
            run_end = min(begin + RUN_ROWS, end)
            runs.append(_Run(begin, run_end, chunk, before, continues=continues))
            chunk += -(-(run_end - begin) // size)
        runs[-1].slot = slot_of.get(following - 1, -1)
    return runs, slot_of, num_slots


def _group(runs: list[_Run]) -> None:
    """Number the groups: as many runs as `GROUP_ROWS` holds, at least one."""
    group, begin = 0, 0
    for run in runs:
        if run.end - begin > GROUP_ROWS and run.begin > begin:
            group, begin = group + 1, run.begin
        run.group = group


def _levels(runs: list[_Run], firsts: list[int]) -> list[tuple[list[int], list[list[int]]]]:
    """For each group its runs, and its chains by the chains of the group that they wait for."""
    num_groups = runs[-1].group + 1
    members: list[list[int]] = [[] for _ in range(num_groups)]
    levels: list[list[list[int]]] = [[] for _ in range(num_groups)]
    owner: dict[int, tuple[int, int]] = {}
    for chain, (first, end) in enumerate(zip(firsts, [*firsts[1:], len(runs)], strict=True)):
        group = runs[first].group
        waits_in, depth = owner.get(runs[first].start, (-1, 0))
        depth = depth + 1 if waits_in == group else 0
        if depth == len(levels[group]):
            levels[group].append([])
        levels[group][depth].append(chain)
        members[group].extend(range(first, end))
        owner.update({runs[r].slot: (group, depth) for r in range(first, end) if runs[r].slot >= 0})
    return list(zip(members, levels, strict=True))
