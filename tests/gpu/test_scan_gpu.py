"""The Triton kernels of both recurrences on a GPU against float64 on the CPU."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from tests.scan_cases import (
    CASES,
    OPERATORS,
    SOAK_CASES,
    ScanCase,
    branch_errors,
    changed_nodes,
    errors_of,
    unrepeated,
)
from tests.tree_cases import poisoned_empty
from tree_kernels.chain_scan.scan import default_block_t

pytestmark = pytest.mark.gpu

LIMITS = {torch.float32: 2e-5, torch.bfloat16: 2e-2, torch.float16: 5e-3}
"""Relative RMS error of outputs and gradients; of d_a, a sum that cancels, five times as much."""

HEADS = {
    "gated_delta_rule": {"key_dim": 128, "value_dim": 128},
    "ssd": {"key_dim": 128, "value_dim": 64},
}
"""Those of Qwen3.5 and of Granite 4 H; kernels are used for no others on a GPU."""


def _on_gpu(operator: str, case: ScanCase, dtype: torch.dtype) -> ScanCase:
    return replace(case, block_t=default_block_t(dtype), **HEADS[operator])


@pytest.fixture(autouse=True)
def fresh_memory_is_nan() -> Iterator[None]:
    with poisoned_empty():
        yield


def _wrong(operator: str, case: ScanCase, dtype: torch.dtype) -> dict[str, float]:
    errors = errors_of(OPERATORS[operator], _on_gpu(operator, case, dtype), "cuda", dtype)
    if case.max_decay > 1:
        # Almost nothing depends on the decay, and its gradient is what cancels.
        errors = {n: e for n, e in errors.items() if n not in ("d_log_decay", "d_dt", "d_a")}
    limits = {"d_a": 5 * LIMITS[dtype]}
    return {n: error for n, error in errors.items() if not error <= limits.get(n, LIMITS[dtype])}


@pytest.mark.parametrize("dtype", LIMITS)
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("operator", OPERATORS)
def test_kernels_equal_naive(operator: str, name: str, dtype: torch.dtype) -> None:
    assert _wrong(operator, CASES[name], dtype) == {}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("name", SOAK_CASES)
@pytest.mark.parametrize("operator", OPERATORS)
def test_kernels_equal_naive_on_long_nodes_deep_and_wide_trees(
    operator: str, name: str, dtype: torch.dtype
) -> None:
    assert _wrong(operator, SOAK_CASES[name], dtype) == {}


@pytest.mark.parametrize("operator", OPERATORS)
def test_two_runs_give_the_same_bits(operator: str) -> None:
    case = _on_gpu(operator, CASES["star"], torch.bfloat16)
    assert unrepeated(OPERATORS[operator], case, "cuda", torch.bfloat16) == []


@pytest.mark.parametrize("operator", OPERATORS)
def test_a_changed_branch_leaves_its_siblings_alone(operator: str) -> None:
    case = _on_gpu(operator, CASES["lengths"], torch.bfloat16)
    assert changed_nodes(OPERATORS[operator], case, "cuda", torch.bfloat16) == [4, 5, 6, 7]


@pytest.mark.parametrize("dtype", LIMITS)
@pytest.mark.parametrize("operator", OPERATORS)
def test_a_tree_equals_each_of_its_branches(operator: str, dtype: torch.dtype) -> None:
    case = _on_gpu(operator, CASES["star"], dtype)
    assert max(branch_errors(OPERATORS[operator], case, "cuda", dtype)) <= LIMITS[dtype]
