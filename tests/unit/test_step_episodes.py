"""What a step takes: episodes of its model and types, records that make sense, whole."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from harness_sdk.errors import ConfigError, ProtocolError
from harness_sdk.record import EpisodeRecord, record_to_bytes
from tests.random_records import random_record
from tests.records import small_record
from tests.tiny_models import save_tiny_model
from trainer_service.config import TrainerConfig
from trainer_service.feed import Batch
from trainer_service.groups import Group, Scored
from trainer_service.optim import Optimizer
from trainer_service.origin import Origin
from trainer_service.parsing import parse_record
from trainer_service.policy import LoraOptions, Policy
from trainer_service.run_state import probe_tokens
from trainer_service.share import split_episodes
from trainer_service.step import train_step
from tree_kernels.logprob import action_logprobs


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("model"), "qwen3_5")


def _step(policy: Policy, *records: EpisodeRecord, objective: str = "sft") -> None:
    """Imitate `records`, or what `objective` says."""
    config = TrainerConfig.model_validate({"model": {"path": "m"}, "objective": objective})
    optimizer = Optimizer(policy.trainable_parameters(), config.optim_options)
    groups = tuple(
        Group(group_id="", episodes=(Scored.of(record.episode_id, record),)) for record in records
    )
    train_step(policy, optimizer, Batch(groups=groups), config, version=0)


def test_episodes_of_another_model_are_refused_with_both_hashes(model: Path) -> None:
    policy = Policy.load(model, lora=LoraOptions(rank=2))
    with pytest.raises(ConfigError, match=rf"episode b .*feed.*{policy.model_hash}"):
        _step(policy, small_record("a"), small_record("b", model_hash="feed"))


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        ({"dtype": "float16"}, "b was sampled from weights .*got float16 on .* bfloat16, which"),
        ({"head_dtype": "float32"}, "b was sampled from logits .*got float32 on .* bfloat16, w"),
    ],
)
def test_episodes_of_another_type_are_refused_with_both(
    model: Path, wrong: dict[str, str], told: str
) -> None:
    policy = Policy.load(model, lora=LoraOptions(rank=2), dtype="bfloat16", head_dtype="model")
    right: dict[str, Any] = {"dtype": "bfloat16", "head_dtype": "bfloat16"}
    records = replace(small_record("a"), **right), replace(small_record("b"), **(right | wrong))
    with pytest.raises(ConfigError, match=told):
        _step(policy, *records, objective="dag_grpo")


def test_another_type_does_not_matter_to_imitation(model: Path) -> None:
    policy = Policy.load(model, lora=LoraOptions(rank=2))
    before = [parameter.clone() for parameter in policy.trainable_parameters()]
    _step(policy, replace(small_record("a"), dtype="float16", head_dtype="float16"))
    after = policy.trainable_parameters()
    assert not all(torch.equal(a, b) for a, b in zip(after, before, strict=True))


@pytest.mark.parametrize(
    ("dtype", "head_dtype", "resolved"),
    [
        ("bfloat16", "float32", "float32"),
        ("bfloat16", "model", "bfloat16"),
        ("float16", "float32", "float32"),
        ("float16", "model", "float16"),
        ("float32", "model", "float32"),
        ("float64", "float32", "float64"),
    ],
)
def test_head_is_float32_at_least_or_the_model_s(
    model: Path, monkeypatch: pytest.MonkeyPatch, dtype: str, head_dtype: str, resolved: str
) -> None:
    used = []

    def spied(*args: Any, **options: Any) -> tuple[torch.Tensor, torch.Tensor]:
        used.append(options["head_dtype"])
        return action_logprobs(*args, **options)

    monkeypatch.setattr("trainer_service.policy.action_logprobs", spied)
    policy = Policy.load(model, lora=None, dtype=dtype, head_dtype=head_dtype)
    policy.token_logprobs((1, 2, 3))
    assert policy.head_dtype == resolved
    assert used == [getattr(torch, resolved)]


def test_unknown_head_dtype_is_refused(model: Path) -> None:
    with pytest.raises(ConfigError, match="unknown head_dtype; got half; allowed: float32, model"):
        Policy.load(model, lora=None, head_dtype="half")


def test_episodes_of_another_vocabulary_are_refused(model: Path) -> None:
    policy = Policy.load(model, lora=LoraOptions(rank=2))
    with pytest.raises(ConfigError, match="got 300; allowed: below 300"):
        _step(policy, small_record("a", token_ids=(5, 6, 300)))


@pytest.mark.parametrize(
    ("sizes", "strips"),
    [
        ([60, 30, 20, 150, 10], [[0, 1], [2], [3], [4]]),
        ([100], [[0]]),
        ([1, 1, 1], [[0, 1, 2]]),
        ([200, 200], [[0], [1]]),
    ],
)
def test_episodes_are_never_cut_and_strips_stay_below_the_bound(
    sizes: list[int], strips: list[list[int]]
) -> None:
    assert split_episodes(sizes, 100) == strips


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"stop_reason": "tired"}, "tired"),
        ({"reward": 1.5}, r"1\.5"),
        ({"reward": float("nan")}, "nan"),
        ({"nodes": (replace(small_record("a").nodes[0], parent=7),)}, "parent"),
        ({"nodes": (replace(small_record("a").nodes[0], sampled=(True,)),)}, "add up"),
        ({"nodes": small_record("a", token_ids=(1, 2, -3, 4)).nodes}, "token -3"),
        ({"nodes": small_record("a", logprob=float("nan")).nodes}, "not finite"),
        ({"nodes": (replace(small_record("a").nodes[0], temperature=-1.0),)}, "temperature"),
        (
            {"nodes": (replace(small_record("a").nodes[0], temperature=1e-30),)},
            "0, or 0.001 to 100",
        ),
        ({"nodes": (replace(small_record("a").nodes[0], temperature=1e9),)}, "0, or 0.001 to 100"),
        ({"nodes": small_record("a", policy_version=2**63).nodes}, "policy version"),
    ],
)
def test_record_that_makes_no_sense_is_refused(change: dict[str, Any], said: str) -> None:
    record: EpisodeRecord = replace(small_record("a"), **change)
    with pytest.raises(ValueError, match=said):
        parse_record(record_to_bytes(record), Origin())


def test_record_is_parsed_whole_and_bytes_that_are_none_are_refused() -> None:
    record = small_record("a")
    coldest = replace(record, nodes=(replace(record.nodes[0], temperature=1e-3),))
    assert parse_record(record_to_bytes(coldest), Origin()).nodes[0].temperature >= 1e-3
    assert parse_record(record_to_bytes(record), Origin()) == record
    with pytest.raises(ProtocolError):
        parse_record(b"\xff", Origin())


def test_probe_follows_the_first_path() -> None:
    record = random_record(np.random.default_rng(3), 300, num_events=8)
    probe = probe_tokens(record, 6)
    assert probe[: len(record.nodes[0].token_ids)] == record.nodes[0].token_ids[:6]
    assert probe_tokens(small_record("a", token_ids=(9,), num_prompt=0), 6) == (9, 9)
