"""The tree convolution's Triton kernels in Triton's interpreter; its tables."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from tests.conv_cases import CASES
from tests.interpreter import interpreted
from tests.tree_cases import path_causal_conv, random_case, relative_rms
from tree_kernels.causal_conv import tree_causal_conv
from tree_kernels.layout.windows import ConvTable

LIMIT = 2e-6
"""Relative RMS error in float32."""


@pytest.fixture(scope="module")
def report() -> dict[str, Any]:
    return interpreted("tests.conv_cases")


@pytest.mark.parametrize("name", CASES)
def test_kernels_equal_naive(report: dict[str, Any], name: str) -> None:
    errors = report["errors"][name]
    bias = ["d_bias"] if CASES[name].with_bias else []
    assert set(errors) == {"out", "d_x", "d_weight", *bias}
    assert {tensor: error for tensor, error in errors.items() if not error <= LIMIT} == {}


def test_two_runs_give_the_same_bits(report: dict[str, Any]) -> None:
    assert report["unrepeated"] == []


def test_the_self_test_passes_where_the_kernels_run(report: dict[str, Any]) -> None:
    assert report["works"] is True


def test_silu_follows_the_sum_over_the_path() -> None:
    case = random_case(np.random.default_rng(0), 30, 8, with_mounts=False)
    x, weight = torch.randn(30, 6).double(), torch.randn(6, 4).double()
    found = tree_causal_conv(x, weight, None, case.layout, silu=True)
    assert relative_rms(found, F.silu(path_causal_conv(x, weight, None, case))) <= 1e-12


def test_a_bias_of_another_width_is_refused() -> None:
    case = random_case(np.random.default_rng(0), 30, 8, with_mounts=False)
    with pytest.raises(ValueError, match="bias"):
        tree_causal_conv(torch.randn(30, 6), torch.randn(6, 4), torch.randn(5), case.layout)


def test_the_table_of_a_small_tree() -> None:
    """Trunk of 2 rows, branches of 1 and 2."""
    table = ConvTable.of(np.array([-1, 0, 1, 1, 3]), 3, torch.device("cpu"))
    assert table.ancestors.tolist() == [[-1, 0, 1, 1, 3], [-1, -1, 0, 0, 1]]
    assert table.fork_rows.tolist() == [0, 1]
    assert table.fork_begins.tolist() == [0, 1, 3]
    assert table.reader_rows.tolist() == [3, 3, 4]
    assert table.reader_taps.tolist() == [2, 1, 2]
