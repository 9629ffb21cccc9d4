"""Tree attention against a dense mask in float64: on the CPU, and the GPU's path without one."""

from __future__ import annotations

import math
import resource
from collections.abc import Iterator
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch

from tests.attention_cases import (
    CASES,
    GROUPINGS,
    INTERPRETED,
    SHARED,
    Attend,
    AttentionCase,
    changed_rows,
    dense_attention,
    device_parts,
    device_plan,
    errors_of,
    inputs_of,
    outputs_and_gradients,
    visible,
)
from tests.interpreter import interpreted
from tests.tree_cases import TreeCase, poisoned_empty, relative_rms
from tree_kernels.attention import tree_attention
from tree_kernels.attention.calls import Call, plan_calls
from tree_kernels.attention.groups import LONE_FLOPS, PIECE_ROWS, grid_of
from tree_kernels.attention.naive import naive_tree_attention
from tree_kernels.layout import PieceLayout, TreeLayout, cut_pieces

LIMITS = {torch.float64: 1e-12, torch.float32: 2e-6, torch.bfloat16: 2e-2}
"""Relative RMS error of outputs and gradients."""


@pytest.fixture(autouse=True)
def fresh_memory_is_nan() -> Iterator[None]:
    with poisoned_empty():
        yield


def product(case: AttentionCase) -> Attend:
    return partial(tree_attention, layout=case.tree.layout, scale=0.3, mounted=case.mounted)


@pytest.mark.parametrize("dtype", LIMITS)
@pytest.mark.parametrize("name", CASES)
def test_outputs_and_gradients_equal_the_dense_mask(name: str, dtype: torch.dtype) -> None:
    errors = errors_of(product(CASES[name]), CASES[name], "cpu", dtype)
    assert {name: error for name, error in errors.items() if not error <= LIMITS[dtype]} == {}


@pytest.mark.parametrize("name", ["nested_mounts", "random_200", "comb_60"])
def test_naive_equals_the_dense_mask(name: str) -> None:
    case = CASES[name]
    parts = case.tree.layout.parts(mounted=case.mounted)
    errors = errors_of(
        partial(naive_tree_attention, parts=parts, scale=0.3), case, "cpu", torch.float64
    )
    assert max(errors.values()) <= 1e-12


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_changed_branch_leaves_its_siblings_bits_alone(dtype: torch.dtype) -> None:
    case = CASES["star_7"]
    changed = changed_rows(product(case), case, "cpu", dtype)
    last = list(range(case.num_tokens - 63, case.num_tokens))
    assert changed["out"] == changed["d_query"] == last
    trunk = list(range(64))
    assert changed["d_key"] == changed["d_value"] == [*trunk, *last]


@pytest.mark.parametrize("limit", [7, 40, 150])
@pytest.mark.parametrize("mounted", [False, True])
def test_pieces_give_what_the_strip_gives(limit: int, mounted: bool) -> None:
    tree = TreeCase(
        [-1, 0, 1, 1, 0, 4],
        [20, 9, 64, 3, 31, 65],
        [[], [], [], [], [(29, 93)], [(29, 93), (94, 96)]],
    )
    case = AttentionCase(tree=tree, mounted=mounted)
    leaves = inputs_of(case, "cpu", torch.float64)
    wanted = outputs_and_gradients(dense_attention(leaves, visible(case), 0.3), leaves)
    out = torch.zeros_like(wanted["out"])
    for rows in cut_pieces(tree.layout, limit):
        piece = PieceLayout(tree.layout, rows)
        taken = np.concatenate([piece.seen_rows, rows])
        out[rows] = tree_attention(
            leaves["query"][rows],
            leaves["key"][taken],
            leaves["value"][taken],
            piece,
            scale=0.3,
            mounted=mounted,
        )
    found = outputs_and_gradients(out, leaves)
    assert max(relative_rms(found[name], wanted[name]) for name in wanted) <= 1e-12


def test_scores_of_any_size_merge_without_overflow() -> None:
    # Key 0 of the trunk takes everything from some rows and nothing from others.
    case = CASES["star_7"]
    leaves = inputs_of(case, "cpu", torch.float32)
    with torch.no_grad():
        leaves["key"][0] *= 300
    exact = {name: each.detach().double().requires_grad_() for name, each in leaves.items()}
    found = outputs_and_gradients(product(case)(*leaves.values()), leaves)
    wanted = outputs_and_gradients(dense_attention(exact, visible(case), 0.3), exact)
    assert max(relative_rms(found[name], wanted[name]) for name in wanted) <= 1e-4


def test_memory_of_a_long_chain_is_a_few_copies_of_its_inputs() -> None:
    layout = TreeLayout.build([-1], [6000])
    query, key, value = (torch.randn(6000, heads, 32).requires_grad_() for heads in (2, 1, 1))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    tree_attention(query, key, value, layout, scale=0.2, mounted=False).sum().backward()
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    # In KiB. The scores alone would be 281 MiB.
    assert grown < 60 << 10


@pytest.fixture(scope="module")
def report() -> dict[str, Any]:
    """What the GPU's path finds in Triton's interpreter, with libraries of the CPU."""
    return interpreted("tests.attention_cases")


@pytest.mark.parametrize("grouping", GROUPINGS)
@pytest.mark.parametrize("name", INTERPRETED)
def test_calls_and_merges_equal_the_dense_mask(
    report: dict[str, Any], name: str, grouping: str
) -> None:
    errors = report["errors"][f"{name} {grouping}"]
    assert {"out", "d_value"} <= set(errors)
    assert {name: error for name, error in errors.items() if not error <= 2e-6} == {}


def test_merges_leave_the_siblings_of_a_changed_branch_alone(report: dict[str, Any]) -> None:
    last, trunk = list(range(17, 22)), list(range(7))
    assert report["changed"] == {
        "out": last,
        "d_query": last,
        "d_key": [*trunk, *last],
        "d_value": [*trunk, *last],
    }


def test_padding_that_is_nan_or_infinite_never_shows(report: dict[str, Any]) -> None:
    clean = {"out": [], "d_query": [], "d_key": [], "d_value": []}
    assert report["spoilt"] == [clean] * 3


@pytest.mark.parametrize("name", CASES)
def test_calls_hold_parts_of_about_one_length(name: str) -> None:
    case = CASES[name]
    parts = device_parts(case, short=False)
    plan = plan_calls(
        parts, case.num_tokens, case.num_tokens, torch.device("cpu"), width=64, lone_flops=1e8
    )
    assert len(plan.calls) <= 9
    for call in plan.calls:
        lengths = call.query_begins.diff()
        assert call.max_queries == int(lengths.max()) <= max(128, 4 * int(lengths.min()))


def test_large_parts_are_lone_calls_on_views() -> None:
    # As Qwen3.5-4B's heads on a trunk of 8,192 rows and 8 branches of 7,168.
    layout = TreeLayout.build([-1] + [0] * 8, [8192] + [7168] * 8)
    plan = plan_calls(
        layout.parts(mounted=False, grid=grid_of(PIECE_ROWS)),
        65536,
        65536,
        torch.device("cpu"),
        width=4096,
        lone_flops=LONE_FLOPS,
    )
    assert [call.lone for call in plan.calls] == [True] * 9
    wide = plan.calls[0]
    assert (wide.query_rows, wide.key_rows) == (slice(15360, 65536), slice(0, 8192))
    assert not wide.square and all(call.square for call in plan.calls[1:])


def test_rectangles_with_as_many_keys_share_a_call() -> None:
    # A comb of 32 nodes of 512 rows, and one of 60 nodes that end beside the grid.
    for depth, length, batches, holes in (
        (32, 512, [(4, 2048), (8, 1024)], 0),
        (60, 275, [(4, 2304), (4, 1152), (2, 1152), (2, 1152), (10, 640)], 1732),
    ):
        parents = [*range(-1, depth - 1), *range(depth - 2, -1, -1)]
        total = length * len(parents)
        plan = plan_calls(
            TreeLayout.build(parents, [length] * len(parents)).parts(
                mounted=False, grid=grid_of(PIECE_ROWS)
            ),
            total,
            total,
            torch.device("cpu"),
            width=4096,
            lone_flops=LONE_FLOPS,
            piece_rows=PIECE_ROWS,
        )
        together = [call for call in plan.calls if call.lone and len(call.query_begins) > 2]
        found = [(len(call.query_begins) - 1, call.max_queries) for call in together]
        assert sorted(found) == sorted(batches)
        assert all(call.exact and not call.square for call in together)
        assert sum(len(call.holes) for call in together if call.holes is not None) == holes


def test_calls_that_rectangles_share_equal_the_dense_mask(report: dict[str, Any]) -> None:
    width = SHARED.query_heads * SHARED.dim
    calls = device_plan(SHARED, width=width, lone_flops=4e3, piece_rows=1, short=True).calls
    assert [len(call.holes) for call in calls if call.holes is not None] == [3]
    assert max(report["shared"].values()) <= 2e-6


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("piece_rows", [None, 1, 8, 64])
@pytest.mark.parametrize("short", [False, True])
def test_lone_calls_compute_each_visible_pair_once(
    name: str, piece_rows: int | None, short: bool
) -> None:
    case = CASES[name]
    plan = device_plan(case, width=64, lone_flops=0.0, piece_rows=piece_rows, short=short)
    total = case.num_tokens
    for calls in (plan.calls, plan.backward_calls):
        times = torch.zeros(total, total, dtype=torch.int64)
        for call in calls:
            longest = max(len(rows) for rows, _ in sequences_of(call))
            padding = call.max_queries - longest
            if not call.exact:
                assert padding == 0
            else:
                assert piece_rows is not None
                step = max(piece_rows // 8, 1)
                assert call.max_queries % step == 0
                assert padding < max(step, longest / (2 if short else 128))
            for rows, keys in sequences_of(call):
                pairs = torch.ones(len(rows), len(keys), dtype=torch.int64)
                times[rows[:, None], keys] += pairs.tril() if call.square else pairs
        assert torch.equal(times, visible(case).long())


def sequences_of(call: Call) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Rows of the queries and of the keys of each sequence, without padding."""
    rows, keys = (
        torch.arange(each.start, each.stop) if isinstance(each, slice) else each
        for each in (call.query_rows, call.key_rows)
    )
    is_own = torch.ones(len(rows), dtype=torch.bool)
    if call.holes is not None:
        is_own[call.holes] = False
    return [
        (rows[a:b][is_own[a:b]], keys[c:d])
        for (a, b), (c, d) in zip(
            pairwise(call.query_begins.tolist()), pairwise(call.key_begins.tolist()), strict=True
        )
    ]


def test_pieces_are_nearly_all_pairs_and_of_few_lengths() -> None:
    keys, plans, pairs, exact_pairs, padded_pairs = set(), set(), 0, 0, 0
    for trunk, leaf in (
        (8192, 7168),
        (15_872, 512),
        (5003, 3001),
        (12_288, 8060),
        (32_700, 60),
        (4097, 6145),
    ):
        layout = TreeLayout.build([-1] + [0] * 8, [trunk] + [leaf] * 8)
        total = layout.num_tokens
        plan = plan_calls(
            layout.parts(mounted=False, grid=grid_of(PIECE_ROWS)),
            total,
            total,
            torch.device("cpu"),
            width=4096,
            lone_flops=LONE_FLOPS,
            piece_rows=PIECE_ROWS,
        )
        assert len(plan.backward_calls) <= 60
        for call in plan.backward_calls:
            # cuDNN refuses such a call.
            assert (call.max_queries, call.max_keys) != (1, 1)
            pairs += (num_pairs := call.max_queries * call.max_keys)
            if call.exact:
                exact_pairs += num_pairs
                padded_pairs += call.padding * call.max_keys
                plans.add((call.max_queries, call.max_keys))
                if not call.square:
                    keys.add(call.max_keys)
    assert exact_pairs >= 0.9 * pairs
    assert padded_pairs <= 0.01 * pairs
    assert len(plans) <= 50
    assert keys <= {(8 + ninths) << power for ninths in range(8) for power in range(5, 14)}


@pytest.mark.parametrize("name", ["nested_mounts", "random_200", "random_500"])
def test_mounts_of_the_same_rows_are_one_sequence(name: str) -> None:
    case = CASES[name]
    total = case.num_tokens
    parts = device_parts(case, short=False)
    assert parts.num_mounts > 0
    calls = plan_calls(parts, total, total, torch.device("cpu"), width=64, lone_flops=0.0).calls
    others = len(parts.queries) - parts.num_mounts
    assert len(calls) - others == len(set(intervals(parts.queries[others:])))


@pytest.mark.parametrize("short", [False, True])
@pytest.mark.parametrize("name", ["nested_mounts", "random_200", "random_500", "comb_60"])
def test_small_parts_of_a_squares_rows_are_in_its_sequence(name: str, short: bool) -> None:
    case = CASES[name]
    total = case.num_tokens
    parts = device_parts(case, short=short)
    others = len(parts.queries) - parts.num_mounts
    squares = set(intervals(parts.queries[: parts.num_squares]))
    rectangles = intervals(parts.queries[parts.num_squares : others])
    spans = intervals(parts.queries[others:])
    bounds = sorted({bound for span in spans for bound in span})
    # All mounts of a row are together, whichever rows else see some of them.
    cells = [
        (begin, end)
        for begin, end in pairwise(bounds)
        if any(first <= begin and end <= last for first, last in spans)
    ]
    alone = [each for each in [*rectangles, *cells] if each not in squares]
    assert len(alone) < len(rectangles) + len(cells)
    wanted = torch.ones(total, dtype=torch.int64)
    for begin, end in alone:
        wanted[begin:end] += 1
    calls = plan_calls(
        parts, total, total, torch.device("cpu"), width=64, lone_flops=math.inf
    ).calls
    found = torch.zeros(total, dtype=torch.int64)
    for call in calls:
        rows = torch.arange(total)[call.query_rows]
        found += torch.bincount(rows, minlength=total)
    assert torch.equal(found, wanted)


def intervals(table: np.ndarray) -> list[tuple[int, int]]:
    return [(begin, end) for begin, end in table.tolist()]
