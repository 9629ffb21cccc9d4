"""Packed trees on a GPU in float32 against float64 on the CPU, and how long they take."""

from __future__ import annotations

import time
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.packed import exact_arithmetic, load_policy, records_for, relative
from tests.random_records import random_record
from tests.scan_cases import OPERATORS
from tests.tiny_models import FAMILIES, KERNEL_HEADS, save_tiny_model
from tests.tiny_moe_models import MOE_FAMILIES, save_tiny_moe_model
from trainer_service.dag import pack_episodes
from trainer_service.policy import LoraOptions, Policy

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("family", FAMILIES + MOE_FAMILIES)
def test_gpu_float32_equals_cpu_float64(tmp_path: Path, family: str) -> None:
    save = save_tiny_moe_model if family in MOE_FAMILIES else save_tiny_model
    _assert_equal_on_the_gpu(save(tmp_path / "model", family), tmp_path)


@pytest.mark.parametrize(
    ("family", "operator", "heads"),
    [
        ("qwen3_5", "gated_delta_rule", (2, 4, 128, 128)),
        ("granitemoehybrid", "ssd", (2, 6, 128, 64)),
    ],
)
def test_gpu_float32_with_kernels_for_recurrences_equals_cpu_float64(
    tmp_path: Path, family: str, operator: str, heads: tuple[int, ...]
) -> None:
    model_path = save_tiny_model(tmp_path / "model", family, **KERNEL_HEADS[family])
    _assert_equal_on_the_gpu(model_path, tmp_path)
    # Where the self-test fails, PyTorch computes.
    assert OPERATORS[operator].works(torch.device("cuda", 0), torch.float32, *heads)


def _assert_equal_on_the_gpu(model_path: Path, tmp_path: Path) -> None:
    exact = load_policy(model_path, dtype="float64")
    exact.save_adapter(tmp_path / "lora")
    policy = Policy.load(
        model_path,
        lora=LoraOptions(rank=4, alpha=8),
        adapter_path=tmp_path / "lora",
        device="cuda",
    )
    strip = pack_episodes(records_for(exact, 0))
    weights = torch.randn(len(strip.action_row), generator=torch.Generator().manual_seed(1))
    with exact_arithmetic("float64", ""):
        wanted = exact.logprobs(strip).policy_logprobs
    (wanted * weights).sum().backward()
    found = policy.logprobs(strip).policy_logprobs
    (found * weights.cuda()).sum().backward()
    assert float((found.cpu() - wanted).detach().abs().max()) <= 5e-5
    references = exact.named_trainable_parameters()
    for name, parameter in policy.named_trainable_parameters().items():
        reference = references[name].grad
        assert parameter.grad is not None and reference is not None
        assert relative(parameter.grad.cpu(), reference) <= 1e-4, name


def test_a_forest_takes_a_fraction_of_a_second(tmp_path: Path) -> None:
    policy = Policy.load(
        save_tiny_model(tmp_path, "qwen3_5"), lora=LoraOptions(rank=8), device="cuda"
    )
    rng = np.random.default_rng(0)
    records = [
        random_record(rng, 300, num_events=7, max_run=50, mount_layers=policy.mount_layers)
        for _ in range(32)
    ]
    strip = pack_episodes(records).to("cuda")
    seconds = 0.0
    for _ in range(3):
        torch.cuda.synchronize()
        begin = time.monotonic()
        policy.logprobs(strip).policy_logprobs.sum().backward()
        torch.cuda.synchronize()
        seconds = time.monotonic() - begin
    assert strip.num_tokens > 10_000
    assert seconds < 1.0
