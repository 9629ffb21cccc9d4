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
from tree_kernels.chain_scan import default_block_t

pytestmark = pytest.mark.gpu

LIMITS = {torch.float32: 2e-5, torch.bfloat16: 2e-2}
"""Relative RMS error of outputs and gradients."""

_REAL = replace(SOAK_CASES["random_200"], key_dim=128)
REAL = {
    "gated_delta_rule": replace(_REAL, key_heads=2, heads=4, value_dim=128),
    "ssd": replace(_REAL, key_heads=1, heads=4, value_dim=64),
}
"""The head sizes of Qwen3.5 and of Granite 4 H."""


@pytest.fixture(autouse=True)
def fresh_memory_is_nan() -> Iterator[None]:
    with poisoned_empty():
        yield


def _wrong(operator: str, case: ScanCase, dtype: torch.dtype) -> dict[str, float]:
    errors = errors_of(OPERATORS[operator], case, "cuda", dtype)
    if case.max_decay > 1:
        # Almost nothing depends on the decay, and its gradient is what cancels.
        errors = {n: e for n, e in errors.items() if n not in ("d_log_decay", "d_dt", "d_a")}
    return {name: error for name, error in errors.items() if not error <= LIMITS[dtype]}


@pytest.mark.parametrize("dtype", LIMITS)
@pytest.mark.parametrize("operator", OPERATORS)
def test_kernels_equal_naive_at_the_sizes_of_real_models(operator: str, dtype: torch.dtype) -> None:
    case = replace(REAL[operator], block_t=default_block_t(dtype))
    assert _wrong(operator, case, dtype) == {}


@pytest.mark.parametrize("dtype", LIMITS)
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("operator", OPERATORS)
def test_kernels_equal_naive(operator: str, name: str, dtype: torch.dtype) -> None:
    assert _wrong(operator, CASES[name], dtype) == {}


@pytest.mark.parametrize("name", SOAK_CASES)
@pytest.mark.parametrize("operator", OPERATORS)
def test_kernels_equal_naive_on_long_nodes_deep_and_wide_trees(operator: str, name: str) -> None:
    assert _wrong(operator, SOAK_CASES[name], torch.bfloat16) == {}


@pytest.mark.parametrize("operator", OPERATORS)
def test_two_runs_give_the_same_bits(operator: str) -> None:
    assert unrepeated(OPERATORS[operator], "cuda", torch.bfloat16) == []


@pytest.mark.parametrize("operator", OPERATORS)
def test_a_changed_branch_leaves_its_siblings_alone(operator: str) -> None:
    assert changed_nodes(OPERATORS[operator], "cuda", torch.bfloat16) == [4, 5, 6, 7]


@pytest.mark.parametrize("dtype", LIMITS)
@pytest.mark.parametrize("operator", OPERATORS)
def test_a_tree_equals_each_of_its_branches(operator: str, dtype: torch.dtype) -> None:
    assert max(branch_errors(OPERATORS[operator], "cuda", dtype)) <= LIMITS[dtype]
