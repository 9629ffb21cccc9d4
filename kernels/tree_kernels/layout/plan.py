"""Cuts of a strip into pieces that are computed one after the other.

Rows are put in an order in which each follows everything that it sees, and the order is cut into
intervals: the graph of the pieces over tree and mount edges is then acyclic wherever the cuts fall.
A long node is cut inside; a cycle between nodes is one between rows, which no cut would mend.
"""

from __future__ import annotations

import heapq
from collections import deque
from graphlib import TopologicalSorter

import numpy as np

from tree_kernels.layout.tree import TreeLayout


def cut_pieces(layout: TreeLayout, max_tokens: int) -> list[np.ndarray]:
    """Rows of each piece, ascending, in the order in which pieces are computed.

    There are `ceil(T / max_tokens)` pieces, and no fewer are possible. Among all such cuts of the
    order these carry the fewest recurrent states over their boundaries, summed over the cuts;
    a cut behind a leaf carries one less than a cut inside a node. The search is exact and linear.

    Raises:
        ValueError: `max_tokens` below 1, or a row that sees, through mounts, what sees it.
    """
    if max_tokens < 1:
        raise ValueError(f"max_tokens {max_tokens}; allowed: 1 and more")
    rows = np.concatenate(
        [
            np.arange(layout.cu_seqlens[node], layout.cu_seqlens[node + 1])
            for node in dependency_order(layout)
        ]
    )
    cuts = _best_cuts(carried_states(layout, rows).tolist(), max_tokens)
    return [np.sort(piece) for piece in np.split(rows, cuts)]


def dependency_order(layout: TreeLayout) -> list[int]:
    """Nodes after their parents and the nodes that they mount; strip order where that allows it.

    Raises:
        ValueError: Mounts that depend on their readers.
    """
    sorter = TopologicalSorter(_needs(layout))
    sorter.prepare()
    ready = list(sorter.get_ready())
    heapq.heapify(ready)
    order: list[int] = []
    while ready:
        order.append(heapq.heappop(ready))
        sorter.done(order[-1])
        for node in sorter.get_ready():
            heapq.heappush(ready, node)
    return order


def _needs(layout: TreeLayout) -> dict[int, set[int]]:
    """Nodes that come before each node."""
    parents = layout.parents.tolist()
    needs: dict[int, set[int]] = {
        node: {parent} if parent >= 0 else set() for node, parent in enumerate(parents)
    }
    for mount in layout.mounts:
        rows = [mount.query_begin, mount.query_end - 1, mount.key_begin, mount.key_end - 1]
        begin, last, first_key, last_key = (
            np.searchsorted(layout.cu_seqlens, rows, side="right") - 1
        ).tolist()
        for reader in range(begin, last + 1):
            # What a node inherits its parent waits for already.
            if not begin <= parents[reader] <= last:
                needs[reader].update(range(first_key, last_key + 1))
    return needs


def carried_states(layout: TreeLayout, rows: np.ndarray) -> np.ndarray:
    """For a cut before each place of the order `rows`: earlier rows that a later one continues.

    Returns:
        `[T]` int64.
    """
    place = np.argsort(rows)
    parents = layout.row_parents()
    children = np.flatnonzero(parents >= 0)
    last_child = np.full(len(rows), -1)
    np.maximum.at(last_child, parents[children], place[children])
    continued = np.flatnonzero(last_child >= 0)
    change = np.zeros(len(rows) + 1, dtype=np.int64)
    np.add.at(change, place[continued] + 1, 1)
    np.add.at(change, last_child[continued] + 1, -1)
    return change[:-1].cumsum()


def _best_cuts(carried: list[int], max_tokens: int) -> list[int]:
    """Cuts with the fewest pieces, then the smallest sum of `carried`."""
    total = len(carried)
    best = [(0, 0)] * (total + 1)
    source = [0] * (total + 1)
    window: deque[tuple[tuple[int, int], int]] = deque()
    for end in range(1, total + 1):
        begin = end - 1
        cost = (best[begin][0] + 1, best[begin][1] + carried[begin])
        while window and window[-1][0] >= cost:
            window.pop()
        window.append((cost, begin))
        while window[0][1] < end - max_tokens:
            window.popleft()
        best[end], source[end] = window[0]
    cuts: list[int] = []
    end = source[total]
    while end:
        cuts.append(end)
        end = source[end]
    return cuts[::-1]
