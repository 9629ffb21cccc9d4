"""Cuts of random trees against brute force: acyclic, within the limit, fewest pieces and states."""

from __future__ import annotations

import math
from graphlib import CycleError, TopologicalSorter
from itertools import combinations

import numpy as np
import pytest
import torch
from hypothesis import given, seed, settings
from hypothesis import strategies as st

from tests.tree_cases import TreeCase
from tests.unit.test_tree_layout import seen_by_parts, tree_cases
from tree_kernels.layout import PieceLayout, TreeLayout, cut_pieces, heavy_first_order
from tree_kernels.layout.plan import carried_states, dependency_order


@st.composite
def acyclic_cases(draw: st.DrawFn, max_nodes: int = 9, max_length: int = 6) -> TreeCase:
    """Forests whose nodes mount what was there before them, wherever the strip puts it."""
    count = draw(st.integers(1, max_nodes))
    parents = [-1] + [draw(st.integers(-1, node - 1)) for node in range(1, count)]
    lengths = [draw(st.integers(1, max_length)) for _ in range(count)]
    order = heavy_first_order(parents, lengths)
    starts = dict(zip(order, np.cumsum([0, *(lengths[node] for node in order)]), strict=False))
    mounts: list[list[tuple[int, int]]] = [[] for _ in parents]
    for node in range(1, count):
        for source in draw(st.lists(st.integers(0, node - 1), max_size=3)):
            begin = draw(st.integers(0, lengths[source] - 1))
            end = draw(st.integers(begin + 1, lengths[source]))
            mounts[node].append((int(starts[source]) + begin, int(starts[source]) + end))
    place = {node: index for index, node in enumerate(order)}
    return TreeCase(
        [place[parents[node]] if parents[node] >= 0 else -1 for node in order],
        [lengths[node] for node in order],
        [mounts[node] for node in order],
    )


@pytest.mark.parametrize("limit", [1, 2, 5, 1000])
@given(case=acyclic_cases())
@settings(max_examples=40)
@seed(1)
def test_pieces_hold_every_row_once_and_see_earlier_pieces_alone(
    limit: int, case: TreeCase
) -> None:
    pieces = cut_pieces(case.layout, limit)
    total = sum(case.lengths)
    assert sorted(np.concatenate(pieces).tolist()) == list(range(total))
    assert len(pieces) == math.ceil(total / limit)
    seen = case.visible(mounted=True)
    done: set[int] = set()
    for rows in pieces:
        assert 0 < len(rows) <= limit and (np.diff(rows) > 0).all()
        wanted = set(seen[rows].any(0).nonzero()[:, 0].tolist()) - set(rows.tolist())
        assert wanted <= done
        assert PieceLayout(case.layout, rows).seen_rows.tolist() == sorted(wanted)
        done |= set(rows.tolist())


def _carried(parents: np.ndarray, order: list[int], cut: int) -> int:
    """Rows before the cut that a row behind it continues."""
    return len({int(parents[row]) for row in order[cut:]} & set(order[:cut]))


@given(case=acyclic_cases(max_nodes=5, max_length=3), limit=st.integers(1, 6))
@settings(max_examples=60)
@seed(2)
def test_no_other_cuts_of_the_order_carry_fewer_states(case: TreeCase, limit: int) -> None:
    layout = case.layout
    starts = layout.cu_seqlens
    nodes = dependency_order(layout)
    order = [row for node in nodes for row in range(starts[node], starts[node + 1])]
    parents, total = layout.row_parents(), layout.num_tokens
    carried = [_carried(parents, order, cut) for cut in range(total)]
    assert carried_states(layout, np.array(order)).tolist() == carried
    pieces = cut_pieces(layout, limit)
    found = np.cumsum([len(rows) for rows in pieces])[:-1]
    costs = [
        sum(carried[cut] for cut in cuts)
        for cuts in combinations(range(1, total), len(pieces) - 1)
        if max(np.diff([0, *cuts, total])) <= limit
    ]
    assert sum(carried[cut] for cut in found) == min(costs)


@given(case=tree_cases(max_nodes=6, max_length=4))
@settings(max_examples=80)
@seed(3)
def test_mounts_are_refused_exactly_where_a_row_sees_what_sees_it(case: TreeCase) -> None:
    seen = case.visible(mounted=True).fill_diagonal_(False)
    rows = TopologicalSorter({row: keys.nonzero()[:, 0].tolist() for row, keys in enumerate(seen)})
    try:
        rows.prepare()
    except CycleError:
        with pytest.raises(ValueError, match="cycle"):
            cut_pieces(case.layout, 3)
    else:
        cut_pieces(case.layout, 3)


def test_cut_falls_behind_a_leaf_where_one_is_in_reach() -> None:
    # Trunk of 4, leaves of 3: a cut inside a leaf would carry its state and the trunk's.
    layout = TreeLayout.build([-1, 0, 0, 0], [4, 3, 3, 3])
    assert [len(rows) for rows in cut_pieces(layout, 8)] == [7, 6]


def test_mounted_node_is_computed_before_a_reader_that_precedes_it() -> None:
    layout = TreeLayout.build([-1, 0, 0], [2, 3, 2], [[], [(5, 7)], []])
    assert dependency_order(layout) == [0, 2, 1]
    assert [rows.tolist() for rows in cut_pieces(layout, 4)] == [[0, 1, 5, 6], [2, 3, 4]]


@pytest.mark.parametrize("mounted", [False, True])
@given(case=acyclic_cases(), limit=st.integers(1, 9))
@settings(max_examples=80)
@seed(4)
def test_parts_of_a_piece_show_each_visible_key_exactly_once(
    mounted: bool, case: TreeCase, limit: int
) -> None:
    visible = case.visible(mounted=mounted).long()
    for rows in cut_pieces(case.layout, limit):
        piece = PieceLayout(case.layout, rows)
        keys = np.concatenate([piece.seen_rows, rows])
        counts = seen_by_parts(piece.parts(mounted=mounted), len(rows), len(keys))
        assert torch.equal(counts, visible[rows][:, keys])


def test_limit_below_one_is_refused() -> None:
    with pytest.raises(ValueError, match="max_tokens 0; allowed: 1 and more"):
        cut_pieces(TreeLayout.build([-1], [3]), 0)
