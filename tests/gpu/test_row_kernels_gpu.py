"""Triton kernels over rows on a GPU against float64 on the CPU."""

from __future__ import annotations

import pytest
import torch

from tests.row_kernel_cases import NAMES, errors_of, fused_errors
from tests.tiny_models import FAMILIES, tiny_model

pytestmark = pytest.mark.gpu

LIMITS = {torch.float32: 5e-6, torch.bfloat16: 1e-2}
"""Relative RMS error of outputs and gradients."""


@pytest.mark.parametrize("dtype", LIMITS)
@pytest.mark.parametrize("name", NAMES)
def test_kernels_equal_float64(name: str, dtype: torch.dtype) -> None:
    errors = errors_of(name, "cuda", dtype)
    assert {tensor: error for tensor, error in errors.items() if not error <= LIMITS[dtype]} == {}


@pytest.mark.parametrize("family", FAMILIES)
def test_fused_modules_equal_their_own_forward(family: str) -> None:
    assert len(fused_errors(tiny_model(family).to("cuda"))) >= 2
    assert max(fused_errors(tiny_model(family).to("cuda")).values()) <= 1e-5
