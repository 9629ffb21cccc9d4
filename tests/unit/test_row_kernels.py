"""Triton kernels over rows in Triton's interpreter, and the modules that use them."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.interpreter import interpreted
from tests.row_kernel_cases import NAMES, fused_errors
from tests.tiny_models import tiny_model
from tree_kernels.rms_norm import rms_norm
from tree_kernels.swiglu import swiglu

LIMIT = 2e-6
"""Relative RMS error in float32."""


@pytest.fixture(scope="module")
def report() -> dict[str, Any]:
    """What every case gives."""
    return interpreted("tests.row_kernel_cases")


@pytest.mark.parametrize("name", NAMES)
def test_kernels_equal_float64(report: dict[str, Any], name: str) -> None:
    assert len(report[name]) >= 2
    assert {tensor: error for tensor, error in report[name].items() if not error <= LIMIT} == {}


@pytest.mark.parametrize(
    ("family", "classes"),
    [
        ("llama", {"LlamaRMSNorm", "LlamaMLP"}),
        ("qwen2", {"Qwen2RMSNorm", "Qwen2MLP"}),
        ("qwen3", {"Qwen3RMSNorm", "Qwen3MLP"}),
        ("granitemoehybrid", {"GraniteMoeHybridRMSNorm", "GraniteMoeHybridRMSNormGated"}),
        ("qwen3_5", {"Qwen3_5RMSNorm", "Qwen3_5RMSNormGated", "Qwen3_5MLP"}),
    ],
)
def test_modules_that_run_fused_equal_their_own_forward(
    monkeypatch: pytest.MonkeyPatch, family: str, classes: set[str]
) -> None:
    monkeypatch.setattr("trainer_service.models.fused._runs_fused", lambda *_: True)
    errors = fused_errors(tiny_model(family))
    assert set(errors) == classes
    assert max(errors.values()) <= 1e-6


def test_what_does_not_fit_is_refused() -> None:
    x = torch.randn(3, 8)
    with pytest.raises(ValueError, match="weight"):
        rms_norm(x, torch.ones(7), eps=1e-6)
    with pytest.raises(ValueError, match="gate"):
        rms_norm(x, torch.ones(8), x[:2], eps=1e-6)
    with pytest.raises(ValueError, match="frozen"):
        rms_norm(x, torch.ones(8, requires_grad=True), eps=1e-6)
    with pytest.raises(ValueError, match="one shape and type"):
        swiglu(x, x[:2])
