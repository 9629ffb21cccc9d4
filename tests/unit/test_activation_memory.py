"""Checkpointed layers and tiles of rows: the same gradients, and the memory that is promised."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf

from benchmarks.tree_training import trees
from benchmarks.tree_training.memory import LiveBytes
from tests.packed import relative
from tests.tiny_models import FAMILIES, save_tiny_model
from trainer_service.dag import pack_episodes
from trainer_service.policy import LoraOptions, Policy
from trainer_service.strip import Strip


def _strip(num_tokens: int = 300) -> Strip:
    return pack_episodes([trees.fork(4, num_tokens // 2, num_tokens // 8, 9).record(())])


def _step(policy: Policy, strip: Strip) -> list[torch.Tensor]:
    """Log-probabilities and every gradient."""
    found = policy.logprobs(strip)
    (found.policy_logprobs.sum() + found.entropy.sum()).backward()
    gradients = [p.grad for p in policy.trainable_parameters() if p.grad is not None]
    assert len(gradients) == len(policy.trainable_parameters())
    return [found.policy_logprobs.detach(), *gradients]


def _policy(path: Path, **options: Any) -> Policy:
    policy = Policy.load(path, lora=LoraOptions(rank=2), **options)
    with torch.no_grad():
        for index, parameter in enumerate(policy.trainable_parameters()):
            generator = torch.Generator().manual_seed(index)
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.1)
    return policy


@pytest.mark.parametrize("family", FAMILIES)
def test_gradients_are_exactly_those_of_layers_that_keep_everything(
    tmp_path: Path, family: str
) -> None:
    path = save_tiny_model(tmp_path, family, vocab_size=4096)
    plain, checkpointed = (
        _step(_policy(path, activation_checkpointing=each), _strip()) for each in (False, True)
    )
    for wanted, found in zip(plain, checkpointed, strict=True):
        assert torch.equal(wanted, found)


@pytest.mark.parametrize("family", FAMILIES)
def test_tiles_have_the_gradients_of_all_rows_at_once(tmp_path: Path, family: str) -> None:
    path = save_tiny_model(tmp_path, family, vocab_size=4096)
    plain = _step(_policy(path, dtype="float64"), _strip())
    tiled = _policy(path, dtype="float64", activation_checkpointing=True, activation_tile_tokens=37)
    for wanted, found in zip(plain, _step(tiled, _strip()), strict=True):
        assert relative(found, wanted) <= 1e-12


def test_tiles_compute_each_row_twice(tmp_path: Path) -> None:
    policy = _policy(
        save_tiny_model(tmp_path, "llama", vocab_size=4096),
        activation_checkpointing=True,
        activation_tile_tokens=37,
    )
    counts: Counter[str] = Counter()
    for name, module in policy.modules():
        if name.endswith(("down_proj", "o_proj")):
            module.register_forward_hook(
                lambda _, args, __, name=name: counts.update({name: args[0].shape[1]})
            )
    strip = _strip()
    _step(policy, strip)
    assert len(counts) == 16
    assert set(counts.values()) == {2 * strip.num_tokens}


def _wide_policy(folder: Path, num_layers: int, **options: Any) -> Policy:
    """Narrow layers with wide feed-forward parts."""
    config = hf.LlamaConfig(
        vocab_size=4096, hidden_size=32, intermediate_size=1024, num_hidden_layers=num_layers,
        num_attention_heads=2, num_key_value_heads=1,
    )  # fmt: skip
    hf.LlamaForCausalLM(config).save_pretrained(folder)
    return _policy(folder, **options)


def _peak(policy: Policy, strip: Strip) -> int:
    with LiveBytes() as meter:
        _step(policy, strip)
    return meter.peak


def test_peak_memory_is_within_its_bound(tmp_path: Path) -> None:
    strip = _strip(512)
    row_bytes = strip.num_tokens * 32 * 4
    tile = 64
    options = {"activation_checkpointing": True, "activation_tile_tokens": tile}
    peaks = {
        count: _peak(_wide_policy(tmp_path / str(count), count, **options), strip)
        for count in (2, 4)
    }
    # One kept input a layer, and its adapters' gradients.
    assert peaks[4] - peaks[2] <= 2 * row_bytes * 1.1
    untiled = _wide_policy(tmp_path / "untiled", 2, activation_checkpointing=True)
    # Without tiles gate, up, activation, product and their gradients stand at 32 times the width.
    assert _peak(untiled, strip) - peaks[2] >= 4 * 32 * row_bytes
