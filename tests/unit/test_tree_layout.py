"""The packed layout against brute force."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.tree_cases import TreeCase, random_case, strip_order
from tree_kernels.layout import AttentionParts, Grid, TreeLayout, heavy_first_order
from tree_kernels.layout.parts import EVERY_KEY


@st.composite
def tree_cases(draw: st.DrawFn, max_nodes: int = 12, max_length: int = 9) -> TreeCase:
    """Forests with mounts that overlap, repeat and touch the reader's own path."""
    count = draw(st.integers(1, max_nodes))
    parents = [-1] + [draw(st.integers(-1, node - 1)) for node in range(1, count)]
    lengths = [draw(st.integers(1, max_length)) for _ in range(count)]
    parents, lengths = strip_order(parents, lengths)
    total = sum(lengths)
    span = st.tuples(st.integers(0, total - 1), st.integers(1, total)).filter(lambda s: s[0] < s[1])
    mounts = [draw(st.lists(span, max_size=3)) for _ in range(count)]
    return TreeCase(parents, lengths, mounts)


def seen_by_parts(parts: AttentionParts, num_queries: int, num_keys: int) -> torch.Tensor:
    """How often each row sees each key, `[num_queries, num_keys]`."""
    counts = torch.zeros(num_queries, num_keys, dtype=torch.int64)
    for index, (rows, columns) in enumerate(zip(parts.queries, parts.keys, strict=True)):
        block = counts[slice(*rows), slice(*columns)]
        assert block.numel() > 0
        if index < parts.num_squares:
            assert block.shape[0] == block.shape[1]
            block += torch.ones_like(block).tril()
        else:
            block += 1
    return counts


@pytest.mark.parametrize("mounted", [False, True])
@pytest.mark.parametrize("grid", [EVERY_KEY, Grid(step=4, digits=2)])
@given(case=tree_cases())
@settings(max_examples=100)
def test_parts_show_each_visible_key_exactly_once(
    case: TreeCase, mounted: bool, grid: Grid
) -> None:
    parts = case.layout.parts(mounted=mounted, grid=grid)
    total = sum(case.lengths)
    visible = case.visible(mounted=mounted).long()
    assert torch.equal(seen_by_parts(parts, total, total), visible)
    assert parts.num_pairs == visible.sum()


@given(case=tree_cases())
@settings(max_examples=60)
def test_ancestors_are_keys_up_to_the_end_of_their_subtree(case: TreeCase) -> None:
    layout = case.layout
    exits = np.repeat(layout.exits, np.diff(layout.cu_seqlens))
    rows = np.arange(layout.num_tokens)
    by_exit = (rows[None] <= rows[:, None]) & (rows[:, None] < exits[None])
    assert np.array_equal(by_exit, case.visible(mounted=False).numpy())


@pytest.mark.parametrize("size", [1, 3, 16])
@given(case=tree_cases())
@settings(max_examples=40)
def test_chunks_continue_the_row_before_them_on_the_path(case: TreeCase, size: int) -> None:
    layout = case.layout
    table = layout.chunks(size)
    rows = table.rows.tolist()
    total = layout.num_tokens
    paths = case.row_paths()
    assert sorted(row for chunk in rows for row in chunk if row < total) == list(range(total))
    assert [table.rows.flatten()[slot].item() for slot in table.slots] == list(range(total))
    level_begins = np.cumsum([0, *table.level_sizes])
    assert level_begins[-1] == len(rows)
    for level, count in enumerate(table.level_sizes):
        for index in range(count):
            chunk = [row for row in rows[level_begins[level] + index] if row < total]
            last = paths[chunk[-1]]
            assert last[-len(chunk) :] == chunk
            before = last[: -len(chunk)]
            if level == 0:
                assert not before
                continue
            source = int(table.sources[level - 1][index])
            previous = [row for row in rows[level_begins[level - 1] + source] if row < total]
            assert before[-1] == previous[-1]


@given(case=tree_cases())
@settings(max_examples=40)
def test_conv_windows_are_the_last_rows_of_the_path(case: TreeCase) -> None:
    total = sum(case.lengths)
    rows, windows = case.layout.conv_taps(4)
    expected = {
        row: [total] * (4 - len(path[-4:])) + path[-4:] for row, path in enumerate(case.row_paths())
    }
    for row, window in zip(rows.tolist(), windows.tolist(), strict=True):
        assert window == expected[row]
    for row in set(range(total)) - set(rows.tolist()):
        plain = [tap if tap >= 0 else total for tap in range(row - 3, row + 1)]
        assert expected[row] == plain


def test_heavy_first_keeps_chains_together_and_light_depth_low() -> None:
    rng = np.random.default_rng(0)
    for _ in range(50):
        count = int(rng.integers(2, 40))
        parents = [-1] + [int(rng.integers(0, node)) for node in range(1, count)]
        order = heavy_first_order(parents, [1] * count)
        children = {node: [c for c in range(count) if parents[c] == node] for node in range(count)}
        num_leaves = {}
        for node in reversed(range(count)):
            num_leaves[node] = sum(num_leaves[child] for child in children[node]) or 1
        place = {node: index for index, node in enumerate(order)}
        light_depth = {0: 0}
        for node in order[1:]:
            parent = parents[node]
            heavy = max(num_leaves[child] for child in children[parent])
            follows = place[node] == place[parent] + 1
            assert not follows or num_leaves[node] == heavy
            light_depth[node] = light_depth[parent] + (0 if follows else 1)
        assert max(light_depth.values()) <= math.log2(num_leaves[0])


def test_rows_off_a_long_chain_are_in_few_rectangles() -> None:
    # A comb: each of 256 nodes of the chain has one leaf beside the next node.
    nodes = 256
    parents = [*range(-1, nodes - 1), *range(nodes - 2, -1, -1)]
    parts = TreeLayout.build(parents, [3] * len(parents)).parts(mounted=False)
    assert len(parts.queries) == 2 * nodes - 1
    counts = np.zeros(3 * len(parents), dtype=np.int64)
    for begin, end in parts.queries[parts.num_squares :]:
        counts[begin:end] += 1
    assert counts.max() <= math.log2(nodes) + 1


def test_rectangles_on_a_grid_have_few_numbers_of_keys() -> None:
    nodes, step = 230, 64
    parents = [*range(-1, nodes - 1), *range(nodes - 2, -1, -1)]
    layout = TreeLayout.build(parents, [3] * len(parents))
    parts = layout.parts(mounted=False, grid=Grid(step=step, digits=2))
    counts = np.zeros(layout.num_tokens, dtype=np.int64)
    numbers, rests = set(), []
    for (begin, end), (first, last) in zip(
        parts.queries[parts.num_squares :], parts.keys[parts.num_squares :], strict=True
    ):
        counts[begin:end] += 1
        if last % step:
            rests.append((begin, end))
            assert last - first < step
        else:
            numbers.add(int(last - first))
    assert numbers <= {64, 128, 192, 256, 384, 512}
    # One rest for each leaf, and rectangles for all that are wider than a step.
    assert len(rests) == len(set(rests)) <= nodes - 1
    assert counts.max() <= math.log2(3 * nodes / step) + 3


def test_a_span_that_the_whole_subtree_sees_is_one_rectangle() -> None:
    layout = TreeLayout.build(
        [-1, 0, 1, 1, 0], [4, 2, 2, 2, 3], [[], [(10, 12)]] + [[(10, 12)]] * 2 + [[]]
    )
    assert layout.mounts == ((4, 10, 10, 12),)


@pytest.mark.parametrize(
    ("parents", "lengths", "mounts", "message"),
    [
        ([], [], None, "at least one node"),
        ([-1, 0], [1, 0], None, "length 0"),
        ([-1, 0, 0, 1], [1, 1, 1, 1], None, "depth-first"),
        ([-1], [2], [[(1, 3)]], r"mounted rows \[1, 3\)"),
        ([-1], [2, 3], None, "1 parents but 2 lengths"),
    ],
)
def test_build_refuses_what_is_no_strip(
    parents: list[int], lengths: list[int], mounts: list[list[tuple[int, int]]], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        TreeLayout.build(parents, lengths, mounts)


def test_layout_tables_are_built_once_and_follow_the_device() -> None:
    layout = random_case(np.random.default_rng(0), 50, 8).layout
    assert layout.chunks(16) is layout.chunks(16)
    assert layout.parts(mounted=True) is layout.parts(mounted=True)
    assert layout.to("cpu") is layout
    moved = layout.to("meta")
    assert moved.chunks(16).rows.device.type == "meta"
    assert layout.to("meta") is moved
