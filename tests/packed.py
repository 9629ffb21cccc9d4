"""A policy with a large adapter, and the comparison of its packed pass with the reference."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch

from harness_sdk.record import EpisodeRecord
from tests.path_reference import (
    KeepFloat64,
    Token,
    load_reference,
    reference_logprobs,
    token_recurrences,
)
from tests.random_records import random_record
from trainer_service.dag import pack_episodes
from trainer_service.policy import LoraOptions, Policy
from trainer_service.strip import Strip

VOCAB = 300
Measured = tuple[torch.Tensor, dict[str, torch.Tensor]]
"""Log-probabilities of the actions, `[A]`, and gradients by parameter."""

HYBRIDS = ("qwen3_5", "qwen3_5_moe", "qwen3_next", "granitemoehybrid")


def load_policy(path: Path, *, dtype: str = "float32") -> Policy:
    """A policy whose adapter is far from zero, so that every gradient is."""
    policy = Policy.load(path, lora=LoraOptions(rank=4, alpha=8), dtype=dtype)
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for parameter in policy.trainable_parameters():
            # Drawn in float32: the adapter's file keeps them exactly. At 0.2 the tiny hybrid is so
            # ill-conditioned that stock float32 gradients miss float64 by 6e-4; at 0.1 by 4e-6.
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.1)
    return policy


@contextlib.contextmanager
def exact_arithmetic(dtype: str, family: str) -> Iterator[None]:
    """float64 throughout and recurrences token by token; float32 stays stock Hugging Face."""
    if dtype == "float32":
        yield
        return
    with KeepFloat64(), token_recurrences() as calls:
        yield
    assert bool(calls) == (family in HYBRIDS)


def records_for(policy: Policy, seed: int, *, with_mounts: bool = True) -> list[EpisodeRecord]:
    rng = np.random.default_rng(seed)
    return [
        random_record(
            rng,
            VOCAB,
            episode_id=f"episode-{index}",
            num_events=14,
            mount_layers=policy.mount_layers,
            temperatures=(1.0, 0.7, 0.0),
            with_mounts=with_mounts,
        )
        for index in range(2)
    ]


def tokens_of(strip: Strip, records: list[EpisodeRecord]) -> list[tuple[int, Token]]:
    """(episode, token of the record) of each row."""
    rows = []
    for node in strip.nodes:
        lengths = {each.node_id: len(each.token_ids) for each in records[node.episode].nodes}
        for part in node.record_nodes:
            rows += [(node.episode, (part, offset)) for offset in range(lengths[part])]
    return rows


def relative(found: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((found.double() - wanted.double()).norm() / wanted.double().norm())


def action_weights(strip: Strip) -> torch.Tensor:
    """A random weight in the loss of each action, `[A]`."""
    return torch.randn(len(strip.action_row), generator=torch.Generator().manual_seed(1))


def packed_pass(policy: Policy, strip: Strip) -> Measured:
    """Of the loss that weighs each action by `action_weights`."""
    logprobs = policy.logprobs(strip).policy_logprobs
    (logprobs * action_weights(strip)).sum().backward()
    return logprobs.detach(), gradients_of(policy.named_trainable_parameters())


def path_pass(
    model_path: Path, adapter_path: Path, records: list[EpisodeRecord], *, dtype: str
) -> Measured:
    """The same, each path run alone; adapters stay in float32 where the model is in less."""
    strip = pack_episodes(records)
    reference = load_reference(model_path, adapter_path, dtype=getattr(torch, dtype))
    by_token = [reference_logprobs(reference, record) for record in records]
    rows = tokens_of(strip, records)
    actions = [rows[row] for row in strip.action_row.tolist()]
    assert len(actions) == sum(len(found) for found in by_token)
    logprobs = torch.stack([by_token[episode][token] for episode, token in actions])
    (logprobs * action_weights(strip)).sum().backward()
    trained = {
        name.removeprefix("base_model.model."): parameter
        for name, parameter in reference.named_parameters()
        if parameter.requires_grad
    }
    return logprobs.detach(), gradients_of(trained)


def gradients_of(parameters: dict[str, torch.nn.Parameter]) -> dict[str, torch.Tensor]:
    """By name; every parameter has one, and it is not zero."""
    found = {}
    for name, parameter in parameters.items():
        assert parameter.grad is not None, name
        assert float(parameter.grad.norm()) > 0, name
        found[name] = parameter.grad
    return found


def assert_equal_to_paths(
    policy: Policy,
    records: list[EpisodeRecord],
    model_path: Path,
    folder: Path,
    *,
    dtype: str,
    family: str,
) -> None:
    logprob_limit, gradient_limit = (5e-5, 1e-4) if dtype == "float32" else (1e-9, 1e-9)
    policy.save_adapter(folder)
    with exact_arithmetic(dtype, family):
        logprobs, gradients = packed_pass(policy, pack_episodes(records))
        path_logprobs, path_gradients = path_pass(model_path, folder, records, dtype=dtype)
    assert float((logprobs - path_logprobs).abs().max()) <= logprob_limit
    assert gradients.keys() == path_gradients.keys()
    for name, gradient in gradients.items():
        assert relative(gradient, path_gradients[name]) <= gradient_limit, name
