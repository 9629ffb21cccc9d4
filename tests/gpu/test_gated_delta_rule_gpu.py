"""The gated delta rule's Triton kernels on a GPU against float64 on the CPU."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from tests.gated_delta_rule_cases import (
    CASES,
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

QWEN = replace(CASES["random_200"], key_heads=2, heads=4, key_dim=128, value_dim=128)
"""The head sizes of Qwen3.5."""


@pytest.fixture(autouse=True)
def fresh_memory_is_nan() -> Iterator[None]:
    with poisoned_empty():
        yield


@pytest.mark.parametrize("dtype", LIMITS)
@pytest.mark.parametrize("case", [*CASES.values(), QWEN], ids=[*CASES, "qwen"])
def test_kernels_equal_naive(case: ScanCase, dtype: torch.dtype) -> None:
    if case is QWEN:
        case = replace(case, block_t=default_block_t(dtype))
    errors = errors_of(case, "cuda", dtype)
    assert {name: error for name, error in errors.items() if not error <= LIMITS[dtype]} == {}


@pytest.mark.parametrize("dtype", LIMITS)
def test_two_runs_give_the_same_bits(dtype: torch.dtype) -> None:
    assert unrepeated("cuda", dtype) == []


def test_a_changed_branch_leaves_its_siblings_alone() -> None:
    assert changed_nodes("cuda", torch.float32) == [4, 5, 6, 7]


@pytest.mark.parametrize("dtype", LIMITS)
def test_a_tree_equals_each_of_its_branches(dtype: torch.dtype) -> None:
    assert max(branch_errors("cuda", dtype)) <= LIMITS[dtype]
