"""The kernels of row by row operations on a GPU against float64 on the CPU."""

from __future__ import annotations

import pytest
import torch

from tests.rowwise_cases import CASES, errors_of
from tests.tree_cases import poisoned_empty

pytestmark = pytest.mark.gpu

LIMITS = {torch.float32: 2e-5, torch.bfloat16: 2e-2, torch.float16: 5e-3}
"""Relative RMS error of outputs and gradients."""


@pytest.mark.parametrize("dtype", LIMITS)
@pytest.mark.parametrize("name", CASES)
def test_kernels_equal_naive(name: str, dtype: torch.dtype) -> None:
    with poisoned_empty():
        errors = errors_of(name, "cuda", dtype)
    assert {tensor: error for tensor, error in errors.items() if not error <= LIMITS[dtype]} == {}
