"""The Triton kernels of both recurrences in Triton's interpreter."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest

from tests.interpreter import interpreted
from tests.scan_cases import CASES, OPERATORS, SOAK_CASES, ScanCase

LIMIT = 3e-6
"""Relative RMS error in float32."""
LOOSE = {"forgetful", "one_node_63", "chain"}
"""Cases in which almost nothing depends on `a`: its gradient is what cancels."""
GRADIENTS = {
    "gated_delta_rule": {"d_query", "d_key", "d_value", "d_log_decay", "d_beta"},
    "ssd": {"d_x", "d_dt", "d_a", "d_b", "d_c"},
}


def _assert_equal(errors: dict[str, float], operator: str, name: str, case: ScanCase) -> None:
    assert {"out"} | GRADIENTS[operator] <= set(errors)
    assert ("ends" in errors) is bool(case.end_nodes)
    assert ("d_initial_states" in errors) is case.with_initial
    # A sum over all rows, much of which cancels.
    limits = {"d_a": 1e-4 if name in LOOSE else 1e-5}
    assert {t: error for t, error in errors.items() if not error <= limits.get(t, LIMIT)} == {}


@pytest.fixture(scope="module")
def report() -> dict[str, Any]:
    return interpreted("tests.scan_cases")


def _pairs(cases: Iterable[str]) -> list[tuple[str, str]]:
    return [(operator, name) for operator in OPERATORS for name in cases]


@pytest.mark.parametrize(("operator", "name"), _pairs(CASES))
def test_kernels_equal_naive(report: dict[str, Any], operator: str, name: str) -> None:
    _assert_equal(report[operator]["errors"][name], operator, name, CASES[name])


@pytest.mark.parametrize("operator", OPERATORS)
def test_kernels_for_16_bits_are_as_near(report: dict[str, Any], operator: str) -> None:
    errors = report[operator]["half_errors"]
    assert {tensor: error for tensor, error in errors.items() if not error <= 5e-3} == {}


@pytest.mark.parametrize("operator", OPERATORS)
def test_two_runs_give_the_same_bits(report: dict[str, Any], operator: str) -> None:
    assert report[operator]["unrepeated"] == []


@pytest.mark.parametrize("operator", OPERATORS)
def test_a_changed_branch_leaves_its_siblings_alone(report: dict[str, Any], operator: str) -> None:
    assert report[operator]["changed_nodes"] == [4, 5, 6, 7]


@pytest.mark.parametrize("operator", OPERATORS)
def test_a_tree_equals_each_of_its_branches(report: dict[str, Any], operator: str) -> None:
    assert len(report[operator]["branches"]) == 5
    assert max(report[operator]["branches"]) <= LIMIT


@pytest.mark.parametrize("operator", OPERATORS)
def test_the_self_test_passes_where_the_kernels_run(report: dict[str, Any], operator: str) -> None:
    assert report[operator]["works"] is True


@pytest.mark.soak
@pytest.mark.timeout(1300)
def test_kernels_equal_naive_on_long_nodes_deep_and_wide_trees() -> None:
    found = interpreted("tests.scan_cases", "soak")
    for operator, name in _pairs(SOAK_CASES):
        _assert_equal(found[operator]["errors"][name], operator, name, SOAK_CASES[name])
