"""Checkpointed layers, tiles of rows and pieces on a GPU: the gradients of the plain step."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.packed import relative
from tests.random_records import random_record
from tests.tiny_models import FAMILIES, KERNEL_HEADS, save_tiny_model
from trainer_service.dag import pack_episodes
from trainer_service.policy import LoraOptions, Policy

pytestmark = pytest.mark.gpu

CASES = [(family, {}) for family in FAMILIES] + list(KERNEL_HEADS.items())
"""Families with their own sizes, and hybrids with those that Triton's kernels take."""


def _gradients(path: Path, *, dtype: str, size: int | None = None, **options: Any) -> Any:
    policy = Policy.load(path, lora=LoraOptions(rank=4), device="cuda", dtype=dtype, **options)
    for index, parameter in enumerate(policy.trainable_parameters()):
        generator = torch.Generator().manual_seed(index)
        parameter.data.copy_(torch.randn(parameter.shape, generator=generator) * 0.1)
    rng = np.random.default_rng(0)
    records = [
        random_record(rng, 300, num_events=14, mount_layers=policy.mount_layers) for _ in range(2)
    ]
    found = policy.logprobs(pack_episodes(records), max_piece_tokens=size)
    found.backward(found.policy_logprobs.sum())
    return {name: p.grad for name, p in policy.named_trainable_parameters().items()}


@pytest.mark.parametrize(("family", "sizes"), CASES)
def test_ways_to_save_memory_change_no_gradient(
    tmp_path: Path, family: str, sizes: dict[str, int]
) -> None:
    path = save_tiny_model(tmp_path, family, **sizes)
    plain = _gradients(path, dtype="float32")
    tiled = _gradients(
        path, dtype="float32", activation_checkpointing=True, activation_tile_tokens=37
    )
    pieces = _gradients(path, dtype="float32", size=61)
    for name, wanted in plain.items():
        assert relative(tiled[name], wanted) <= 1e-5, name
        assert relative(pieces[name], wanted) <= 1e-4, name


@pytest.mark.parametrize(("family", "sizes"), CASES)
def test_bfloat16_steps_learn_in_float32(
    tmp_path: Path, family: str, sizes: dict[str, int]
) -> None:
    path = save_tiny_model(tmp_path, family, **sizes)
    found = _gradients(
        path, dtype="bfloat16", activation_checkpointing=True, activation_tile_tokens=37
    )
    assert {gradient.dtype for gradient in found.values()} == {torch.float32}
    assert all(bool(gradient.isfinite().all()) for gradient in found.values())
