"""The kernels of row by row operations in Triton's interpreter."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers.models.granitemoehybrid.modeling_granitemoehybrid import (
    GraniteMoeHybridRMSNormGated,
)

from tests.interpreter import interpreted
from tests.rowwise_cases import CASES
from tests.tree_cases import relative_rms
from trainer_service.models import fused
from tree_kernels.rowwise import delta_gates, l2_normalised

LIMIT = 2e-6
"""Relative RMS error in float32."""


@pytest.fixture(scope="module")
def report() -> dict[str, Any]:
    return interpreted("tests.rowwise_cases")


@pytest.mark.parametrize("name", CASES)
def test_kernels_equal_naive(report: dict[str, Any], name: str) -> None:
    errors = report["errors"][name]
    assert {f"d_{key}" for key in CASES[name][2]} < set(errors)
    assert {tensor: error for tensor, error in errors.items() if not error <= LIMIT} == {}


def test_the_self_test_passes_where_the_kernels_run(report: dict[str, Any]) -> None:
    assert report["works"] is True


def test_mamba_norms_run_fused_are_the_modules(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fused, "_runs_fused", lambda *_: True)
    norm = GraniteMoeHybridRMSNormGated(24, eps=1e-5).requires_grad_(False)
    torch.nn.init.normal_(norm.weight)
    x, gate = torch.randn(1, 7, 24), torch.randn(1, 7, 24)
    wanted = norm(x, gate)
    fused.use_fused(norm)
    assert relative_rms(norm(x, gate), wanted) <= LIMIT


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda x: l2_normalised(x[0]), "x "),
        (lambda x: delta_gates(x[0], x[0, :, :2], x[0, 0], x[0, 0]), "beta"),
        (lambda x: delta_gates(x[0], x[0], x[0, 0, :2], x[0, 0]), "a_log"),
    ],
)
def test_wrong_shapes_are_refused_by_name(call: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call(torch.randn(3, 4, 5))
