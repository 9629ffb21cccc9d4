"""Logits in a wider type than the model's, on the rollout side."""

from __future__ import annotations

import pytest
import torch

from rollout_service.engine.head import head_logits


@pytest.mark.parametrize("block_rows", [1, 10, 37, 100])
def test_logits_are_those_of_the_whole_weight_widened(
    monkeypatch: pytest.MonkeyPatch, block_rows: int
) -> None:
    monkeypatch.setattr("rollout_service.engine.head._BLOCK_BYTES", block_rows * 9 * 4)
    hidden, weight = torch.randn(5, 9).bfloat16(), torch.randn(37, 9).bfloat16()
    found = head_logits(hidden, weight, torch.float32)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, hidden.float() @ weight.float().t(), rtol=1e-6, atol=1e-6)
    assert head_logits(hidden[:0], weight, torch.float32).shape == (0, 37)
