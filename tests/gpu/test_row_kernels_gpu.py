"""Triton kernels over rows on a GPU against float64 on the CPU."""

from __future__ import annotations

import pytest
import torch

from tests.row_kernel_cases import NAMES, errors_of, fused_errors
from tests.tiny_models import FAMILIES, tiny_model
from tests.tree_cases import relative_rms
from tree_kernels.logprob import action_logprobs

pytestmark = pytest.mark.gpu

LIMITS = {torch.float32: 5e-6, torch.bfloat16: 1e-2, torch.float16: 2.5e-3}
"""Relative RMS error of outputs and gradients."""


@pytest.mark.parametrize("dtype", LIMITS)
@pytest.mark.parametrize("name", NAMES)
def test_kernels_equal_float64(name: str, dtype: torch.dtype) -> None:
    errors = errors_of(name, "cuda", dtype)
    assert {tensor: error for tensor, error in errors.items() if not error <= LIMITS[dtype]} == {}


def test_float32_head_gives_a_bfloat16_model_the_logprobs_of_float32() -> None:
    torch.manual_seed(0)
    targets, scale = torch.arange(300, device="cuda"), torch.full((300,), 0.5, device="cuda")
    hidden = torch.randn(300, 256, device="cuda").bfloat16().requires_grad_()
    weight = torch.randn(1000, 256, device="cuda").bfloat16()
    exact = hidden.detach().double().cpu().requires_grad_()
    wanted = action_logprobs(exact, weight.double().cpu(), targets.cpu(), scale.cpu())
    found = action_logprobs(hidden, weight, targets, scale, head_dtype=torch.float32, chunk_rows=99)
    assert max(relative_rms(f.cpu(), w) for f, w in zip(found, wanted, strict=True)) <= 1e-5
    for of_entropy in (0.0, 0.5):
        losses = [(each[0] + of_entropy * each[1]).sum() for each in (found, wanted)]
        grad, reference = (
            torch.autograd.grad(loss, each, retain_graph=True)[0]
            for loss, each in zip(losses, (hidden, exact), strict=True)
        )
        assert relative_rms(grad.cpu(), reference) <= LIMITS[torch.bfloat16]


@pytest.mark.parametrize("family", FAMILIES)
def test_fused_modules_equal_their_own_forward(family: str) -> None:
    assert len(fused_errors(tiny_model(family).to("cuda"))) >= 2
    assert max(fused_errors(tiny_model(family).to("cuda")).values()) <= 1e-5
