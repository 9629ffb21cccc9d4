"""Tree attention on a GPU against a dense mask in float64 on the CPU."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
from torch.utils.checkpoint import checkpoint

from tests.attention_cases import (
    CASES,
    Attend,
    AttentionCase,
    changed_rows,
    errors_of,
    inputs_of,
    outputs_and_gradients,
    spoilt_rows,
)
from tests.tree_cases import TreeCase, poisoned_empty, relative_rms
from tree_kernels.attention import groups, tree_attention
from tree_kernels.attention.libraries import CutCudnn, Efficient, Flash
from tree_kernels.attention.self_test import batch_library, lone_library
from tree_kernels.layout import PieceLayout, cut_pieces

pytestmark = pytest.mark.gpu

LIMITS = {torch.float32: 5e-6, torch.bfloat16: 2e-2, torch.float16: 5e-3}
"""Relative RMS error of outputs and gradients."""

HEADS = {64: (8, 2), 128: (8, 2), 256: (4, 1)}
"""Query heads and key heads by their size."""


@pytest.fixture(autouse=True)
def fresh_memory_is_nan() -> Iterator[None]:
    with poisoned_empty():
        yield


def product(case: AttentionCase) -> Attend:
    layout = case.tree.layout.to("cuda")
    return partial(tree_attention, layout=layout, scale=0.3, mounted=case.mounted)


def wide(name: str, dim: int) -> AttentionCase:
    query_heads, heads = HEADS[dim]
    return replace(CASES[name], query_heads=query_heads, heads=heads, dim=dim)


def test_fast_libraries_pass_their_self_test() -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    major = torch.cuda.get_device_capability(device)[0]
    for dim, heads in HEADS.items():
        assert batch_library(device, torch.float32, *heads, dim) is Efficient
        if major >= 8:
            assert batch_library(device, torch.bfloat16, *heads, dim) is Flash
        if major == 9:
            assert lone_library(device, torch.bfloat16, *heads, dim) is CutCudnn


def test_the_first_call_may_be_in_a_checkpointed_layer(short_pieces: None) -> None:
    batch_library.cache_clear()
    lone_library.cache_clear()
    case = wide("random_200", 64)
    leaves = inputs_of(case, "cuda", torch.bfloat16)
    out = checkpoint(product(case), *leaves.values(), use_reentrant=False)
    assert isinstance(out, torch.Tensor)
    found = outputs_and_gradients(out, leaves)
    wanted = outputs_and_gradients(product(case)(*leaves.values()), leaves)
    assert max(relative_rms(found[name], wanted[name]) for name in wanted) <= 1e-3


@contextmanager
def deterministic() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def too_wrong(case: AttentionCase, dtype: torch.dtype) -> dict[str, float]:
    # Scores of the size that they have in a model, whatever the head's size.
    scale = case.dim**-0.5
    attend = partial(product(case), scale=scale)
    errors = errors_of(attend, case, "cuda", dtype, scale=scale)
    return {name: error for name, error in errors.items() if not error <= LIMITS[dtype]}


@pytest.mark.parametrize("dtype", LIMITS)
@pytest.mark.parametrize("name", CASES)
def test_outputs_and_gradients_equal_the_dense_mask(name: str, dtype: torch.dtype) -> None:
    assert too_wrong(CASES[name], dtype) == {}


@pytest.mark.parametrize("dtype", LIMITS)
@pytest.mark.parametrize("dim", HEADS)
@pytest.mark.parametrize("name", ["lengths", "nested_mounts", "random_500", "one_node_1000"])
def test_heads_of_every_size_equal_the_dense_mask(name: str, dim: int, dtype: torch.dtype) -> None:
    assert too_wrong(wide(name, dim), dtype) == {}


@pytest.mark.parametrize("dim", HEADS)
@pytest.mark.parametrize("name", ["lengths", "nested_mounts", "random_500", "one_node_1000"])
def test_lone_calls_equal_the_dense_mask(
    name: str, dim: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(groups, "LONE_FLOPS", 1e6)
    assert too_wrong(wide(name, dim), torch.bfloat16) == {}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("dim", HEADS)
@pytest.mark.parametrize("name", ["lengths", "nested_mounts", "random_500", "one_node_1000"])
def test_padding_and_exact_lengths_equal_the_dense_mask(
    name: str, dim: int, dtype: torch.dtype, short_pieces: None
) -> None:
    assert too_wrong(wide(name, dim), dtype) == {}


@pytest.fixture
def short_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Calls on their own, padding and exact lengths for parts of some rows."""
    monkeypatch.setattr(groups, "LONE_FLOPS", 1e6)
    monkeypatch.setattr(groups, "PIECE_ROWS", 32)


@pytest.mark.parametrize("dim", HEADS)
@pytest.mark.parametrize(
    "settings",
    [{}, {"LONE_FLOPS": 1e6}, {"LONE_FLOPS": 1e6, "PIECE_ROWS": 32}],
    ids=["batches", "rounded", "exact"],
)
def test_padding_that_is_nan_or_infinite_never_shows(
    settings: dict[str, float], dim: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in settings.items():
        monkeypatch.setattr(groups, name, value)
    # A chain of 4 nodes and 3 leaves, each but the last with rows of another behind it.
    tree = TreeCase([-1, 0, 1, 2, 2, 1, 0], [70, 65, 90, 75, 61, 83, 97], [[]] * 7)
    query_heads, heads = HEADS[dim]
    case = AttentionCase(tree=tree, query_heads=query_heads, heads=heads, dim=dim)
    attend = partial(product(case), scale=dim**-0.5)
    for leaf in (4, 5, 6):
        spoilt = spoilt_rows(attend, case, leaf, "cuda", torch.bfloat16)
        assert spoilt == {"out": [], "d_query": [], "d_key": [], "d_value": []}


def test_side_streams_wait_for_inputs_and_for_readers_of_results(short_pieces: None) -> None:
    # 0.1 s in which nothing that is asked for afterwards may run.
    late = 200_000_000
    case = wide("random_500", 256)
    attend, leaves = product(case), inputs_of(case, "cuda", torch.bfloat16)
    wanted = outputs_and_gradients(attend(*leaves.values()), leaves)
    upstream = torch.randn(wanted["out"].shape, generator=torch.Generator().manual_seed(3))
    d_out = upstream.to("cuda", torch.bfloat16)
    torch.cuda.synchronize()
    mains, found = [torch.cuda.Stream() for _ in range(2)], []
    # The passes share side streams, and with them the memory of results.
    for main in mains * 2:
        with torch.cuda.stream(main):
            own = {name: torch.zeros_like(each).requires_grad_() for name, each in leaves.items()}
            given = torch.zeros_like(d_out)
            torch.cuda._sleep(late)
            with torch.no_grad():
                for name, each in leaves.items():
                    own[name].copy_(each)
            out = attend(*own.values())
            torch.cuda._sleep(late)
            given.copy_(d_out)
            grads = torch.autograd.grad(out, list(own.values()), given)
            with torch.no_grad():
                for each in (*own.values(), given):
                    each.fill_(torch.nan)
            names = [f"d_{name}" for name in leaves]
            found.append({"out": out.detach(), **dict(zip(names, grads, strict=True))})
    torch.cuda.synchronize()
    for each in found:
        for name in ("out", "d_key", "d_value"):
            assert torch.equal(each[name], wanted[name]), name
        assert relative_rms(each["d_query"], wanted["d_query"]) <= 1e-3


@pytest.mark.parametrize("dtype", LIMITS)
def test_two_deterministic_runs_give_the_same_bits(dtype: torch.dtype) -> None:
    case = wide("random_500", 128)
    leaves = inputs_of(case, "cuda", dtype)
    with deterministic():
        once, again = (
            outputs_and_gradients(product(case)(*leaves.values()), leaves) for _ in range(2)
        )
    assert [name for name in once if not torch.equal(once[name], again[name])] == []


@pytest.mark.parametrize("dtype", LIMITS)
def test_a_changed_branch_leaves_its_siblings_bits_alone(dtype: torch.dtype) -> None:
    case = wide("star_7", 128)
    with deterministic():
        changed = changed_rows(product(case), case, "cuda", dtype)
    last, trunk = set(range(case.num_tokens - 63, case.num_tokens)), set(range(64))
    assert set(changed["out"]) <= last and set(changed["d_query"]) <= last
    assert set(changed["d_key"]) <= trunk | last and set(changed["d_value"]) <= trunk | last


def test_without_determinism_too_siblings_outputs_keep_their_bits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(groups, "LONE_FLOPS", 1e6)
    case = wide("star_7", 256)
    changed = changed_rows(product(case), case, "cuda", torch.bfloat16)
    assert set(changed["out"]) <= set(range(case.num_tokens - 63, case.num_tokens))


@pytest.mark.parametrize("dtype", LIMITS)
@pytest.mark.parametrize("limit", [40, 150])
def test_pieces_give_what_the_strip_gives(limit: int, dtype: torch.dtype) -> None:
    tree = TreeCase(
        [-1, 0, 1, 1, 0, 4],
        [20, 9, 64, 3, 31, 65],
        [[], [], [], [], [(29, 93)], [(29, 93), (94, 96)]],
    )
    case = AttentionCase(tree=tree, dim=64)
    leaves = inputs_of(case, "cuda", dtype)
    layout = tree.layout.to("cuda")
    whole = tree_attention(*leaves.values(), layout=layout, scale=0.1, mounted=True)
    wanted = outputs_and_gradients(whole, leaves)
    out = torch.zeros_like(whole)
    for rows in cut_pieces(layout, limit):
        piece = PieceLayout(layout, rows)
        taken = torch.from_numpy(np.concatenate([piece.seen_rows, rows])).cuda()
        query = leaves["query"][torch.from_numpy(rows).cuda()]
        key, value = leaves["key"][taken], leaves["value"][taken]
        out[rows] = tree_attention(query, key, value, piece, scale=0.1, mounted=True)
    found = outputs_and_gradients(out, leaves)
    limits = {name: relative_rms(found[name], wanted[name]) for name in wanted}
    assert {name: error for name, error in limits.items() if not error <= LIMITS[dtype]} == {}
