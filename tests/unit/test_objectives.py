"""Objectives, advantages and divergence against sums over paths, one token at a time."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from harness_sdk.record import EpisodeRecord, NodeKind
from tests.path_reference import leaves, path_to
from tests.random_records import RecordWriter, random_record
from trainer_service.config import OBJECTIVE_NAMES
from trainer_service.dag import pack_episodes
from trainer_service.divergence import divergence
from trainer_service.objectives import (
    OBJECTIVES,
    ObjectiveOptions,
    PackedLogprobs,
)
from trainer_service.strip import Strip

ADVANTAGES = torch.tensor([0.7, -1.3, 0.4])
Token = tuple[int, int, int]
"""(episode, record node, offset)."""


def test_every_objective_can_be_configured() -> None:
    assert set(OBJECTIVES) == set(OBJECTIVE_NAMES)


def random_records(seed: int) -> list[EpisodeRecord]:
    rng = np.random.default_rng(seed)
    return [random_record(rng, 50, num_events=12, with_demonstrations=True) for _ in range(3)]


def near_policy(strip: Strip, seed: int) -> PackedLogprobs:
    """A policy that has moved from the sampled one, beyond the clip at many tokens."""
    generator = torch.Generator().manual_seed(seed)
    moved = strip.sampled_logprobs + torch.randn(strip.action_row.shape, generator=generator) * 0.4
    entropy = torch.rand(strip.action_row.shape, generator=generator)
    return PackedLogprobs(policy_logprobs=moved.requires_grad_(), entropy=entropy)


def values_by_token(
    strip: Strip, records: list[EpisodeRecord], values: torch.Tensor
) -> dict[Token, float]:
    rows: list[Token] = []
    for node in strip.nodes:
        lengths = {each.node_id: len(each.token_ids) for each in records[node.episode].nodes}
        for part in node.record_nodes:
            rows += [(node.episode, part, offset) for offset in range(lengths[part])]
    return {rows[row]: float(v) for row, v in zip(strip.action_row, values.detach(), strict=True)}


def paths_of(records: list[EpisodeRecord]) -> list[tuple[int, list[tuple[Token, float]]]]:
    """For each root-to-leaf path its episode and its policy-sampled tokens with log-probability."""
    found = []
    for episode, record in enumerate(records):
        for leaf in leaves(record):
            tokens: list[tuple[Token, float]] = []
            first = True
            for node in path_to(record, leaf):
                recorded = iter(node.sampled_logprobs)
                for offset, flag in enumerate(node.sampled):
                    value = next(recorded) if flag else 0.0
                    if flag and not first and node.kind != NodeKind.DEMONSTRATION:
                        tokens.append(((episode, node.node_id, offset), value))
                    first = False
            found.append((episode, tokens))
    return found


def clipped_term(policy: float, sampled: float, advantage: float, low: float, high: float) -> float:
    ratio = math.exp(policy - sampled)
    return min(ratio * advantage, min(max(ratio, 1 - low), 1 + high) * advantage)


@pytest.mark.parametrize("seed", range(4))
def test_path_average_equals_the_mean_over_paths(seed: int) -> None:
    records = random_records(seed)
    strip = pack_episodes(records)
    logprobs = near_policy(strip, seed)
    policy = values_by_token(strip, records, logprobs.policy_logprobs)
    out = OBJECTIVES["path_average"](
        logprobs, strip, ADVANTAGES, ObjectiveOptions(clip_low=0.1, clip_high=0.3)
    )
    total = 0.0
    for episode, tokens in paths_of(records):
        terms = [
            clipped_term(policy[token], sampled, float(ADVANTAGES[episode]), 0.1, 0.3)
            for token, sampled in tokens
        ]
        total -= sum(terms) / int(strip.num_paths[episode]) / len(records)
    assert float(out.loss.detach()) == pytest.approx(total, rel=1e-5)


@pytest.mark.parametrize("seed", range(4))
def test_path_average_takes_any_weight_per_path(seed: int) -> None:
    records = random_records(seed)
    strip = pack_episodes(records)
    logprobs = near_policy(strip, seed)
    policy = values_by_token(strip, records, logprobs.policy_logprobs)
    paths = paths_of(records)
    weights = torch.rand(len(paths), generator=torch.Generator().manual_seed(seed))
    # The strip numbers paths in its own order: find each by the leaf that ends it.
    order = [
        (node.episode, node.record_nodes[-1])
        for index, node in enumerate(strip.nodes)
        if index not in {each.parent for each in strip.nodes}
    ]
    by_leaf = dict(zip(order, weights.tolist(), strict=True))
    total = 0.0
    ends = [(episode, leaf) for episode, record in enumerate(records) for leaf in leaves(record)]
    for (episode, tokens), end in zip(paths, ends, strict=True):
        for token, sampled in tokens:
            term = clipped_term(policy[token], sampled, float(ADVANTAGES[episode]), 0.2, 0.28)
            total -= by_leaf[end] * term / len(records)
    out = OBJECTIVES["path_average"](
        logprobs, strip, ADVANTAGES, ObjectiveOptions(path_weights=weights)
    )
    assert float(out.loss.detach()) == pytest.approx(total, rel=1e-5)


@pytest.mark.parametrize("name", ["dag_grpo", "token_unique"])
@pytest.mark.parametrize("seed", range(4))
def test_each_sampled_token_counts_once(name: str, seed: int) -> None:
    records = random_records(seed)
    strip = pack_episodes(records)
    logprobs = near_policy(strip, seed)
    policy = values_by_token(strip, records, logprobs.policy_logprobs)
    unique = {token: sampled for _, tokens in paths_of(records) for token, sampled in tokens}
    total = 0.0
    for token, sampled in unique.items():
        owned = sum(other[0] == token[0] for other in unique) if name == "dag_grpo" else 1
        term = clipped_term(policy[token], sampled, float(ADVANTAGES[token[0]]), 0.2, 0.28)
        total -= term / owned / len(records)
    out = OBJECTIVES[name](logprobs, strip, ADVANTAGES, ObjectiveOptions())
    assert float(out.loss.detach()) == pytest.approx(total, rel=1e-5)


def test_sft_is_the_mean_over_sampled_and_demonstrated_tokens() -> None:
    strip = pack_episodes(random_records(0))
    logprobs = near_policy(strip, 0)
    out = OBJECTIVES["sft"](logprobs, strip, ADVANTAGES, ObjectiveOptions())
    assert bool(strip.is_demonstration.any()) and not bool(strip.is_demonstration.all())
    assert float(out.loss.detach()) == pytest.approx(
        -float(logprobs.policy_logprobs.detach().mean())
    )
    assert out.metrics["objective/nll"] == pytest.approx(float(out.loss.detach()))


@pytest.mark.parametrize("name", ["dag_grpo", "path_average", "token_unique"])
def test_demonstrations_get_no_policy_gradient(name: str) -> None:
    strip = pack_episodes(random_records(1))
    logprobs = near_policy(strip, 1)
    OBJECTIVES[name](logprobs, strip, ADVANTAGES, ObjectiveOptions(clip_high=9)).loss.backward()
    gradient = logprobs.policy_logprobs.grad
    assert gradient is not None and bool(strip.is_demonstration.any())
    assert bool((gradient[strip.is_demonstration] == 0).all())
    assert bool((gradient[~strip.is_demonstration] != 0).any())


def test_demonstration_far_below_the_reference_leaves_the_loss_finite() -> None:
    strip = pack_episodes(random_records(3))
    logprobs = near_policy(strip, 3)
    reference = logprobs.policy_logprobs.detach() + 100.0 * strip.is_demonstration
    options = ObjectiveOptions(kl_coef=0.1, ref_logprobs=reference)
    plain = OBJECTIVES["dag_grpo"](logprobs, strip, ADVANTAGES, ObjectiveOptions()).loss
    loss = OBJECTIVES["dag_grpo"](logprobs, strip, ADVANTAGES, options).loss
    torch.testing.assert_close(loss, plain)
    loss.backward()
    assert strip.is_demonstration.any()
    assert logprobs.policy_logprobs.grad is not None
    assert logprobs.policy_logprobs.grad.isfinite().all()


def test_clip_stops_the_gradient_on_the_side_that_gains() -> None:
    strip = pack_episodes(random_records(2))
    advantage = ADVANTAGES[strip.action_episode]
    for shift, stopped in ((1.0, advantage > 0), (-1.0, advantage < 0)):
        moved = (strip.sampled_logprobs + shift).requires_grad_()
        logprobs = PackedLogprobs(policy_logprobs=moved, entropy=torch.zeros_like(moved))
        out = OBJECTIVES["dag_grpo"](logprobs, strip, ADVANTAGES, ObjectiveOptions())
        out.loss.backward()
        taken = ~strip.is_demonstration
        assert moved.grad is not None
        assert torch.equal(moved.grad[taken] == 0, stopped[taken])
        expected = stopped[taken].double().mean()
        assert out.metrics["objective/clip_fraction"] == pytest.approx(float(expected))


def test_importance_weights_are_truncated_and_carry_no_gradient() -> None:
    strip = pack_episodes(random_records(3))
    logprobs = near_policy(strip, 3)
    policy = logprobs.policy_logprobs
    options = ObjectiveOptions(max_importance=1.1)
    out = OBJECTIVES["token_unique"](logprobs, strip, ADVANTAGES, options)
    weight = (policy.detach() - strip.sampled_logprobs).exp().clamp(max=1.1)
    wanted = -(weight * ADVANTAGES[strip.action_episode] * ~strip.is_demonstration) / 3
    (gradient,) = torch.autograd.grad(out.loss, policy)
    torch.testing.assert_close(gradient, wanted)


def test_the_ratio_is_against_given_old_logprobs() -> None:
    strip = pack_episodes(random_records(3))
    logprobs = near_policy(strip, 3)
    old = logprobs.policy_logprobs.detach()
    out = OBJECTIVES["dag_grpo"](logprobs, strip, ADVANTAGES, ObjectiveOptions(old_logprobs=old))
    assert out.metrics["objective/ratio_mean"] == pytest.approx(1.0)
    assert out.metrics["objective/clip_fraction"] == 0


def test_strips_of_one_step_add_up() -> None:
    records = random_records(4)
    whole = pack_episodes(records)
    logprobs = near_policy(whole, 4)
    options = ObjectiveOptions(num_episodes=3, num_actions=len(whole.action_row))
    for objective in OBJECTIVES.values():
        expected = objective(logprobs, whole, ADVANTAGES, ObjectiveOptions()).loss
        total = torch.zeros(())
        for episode, record in enumerate(records):
            chosen = whole.action_episode == episode
            piece = PackedLogprobs(
                policy_logprobs=logprobs.policy_logprobs[chosen], entropy=logprobs.entropy[chosen]
            )
            strip = pack_episodes([record])
            total = total + objective(piece, strip, ADVANTAGES[episode, None], options).loss
        torch.testing.assert_close(total, expected)


def test_an_episode_without_actions_gives_a_loss_of_zero() -> None:
    book = RecordWriter(rng=np.random.default_rng(0), vocab_size=50)
    book.append("root", NodeKind.CONTEXT, sampled=False)
    strip = pack_episodes([book.record()])
    none = torch.zeros(0, requires_grad=True)
    logprobs = PackedLogprobs(policy_logprobs=none, entropy=none.detach())
    for name, objective in OBJECTIVES.items():
        out = objective(logprobs, strip, torch.ones(1), ObjectiveOptions())
        assert float(out.loss.detach()) == 0, name
        out.loss.backward()


def test_path_weights_of_the_wrong_number_are_refused() -> None:
    strip = pack_episodes(random_records(0))
    options = ObjectiveOptions(path_weights=torch.ones(1))
    with pytest.raises(ValueError, match="path_weights"):
        OBJECTIVES["path_average"](near_policy(strip, 0), strip, ADVANTAGES, options)


def test_divergence_resolves_differences_far_below_float32() -> None:
    strip = pack_episodes(random_records(0))
    taken = ~strip.is_demonstration
    for size in (1e-6, 0.3):
        difference = torch.linspace(-size, size, len(strip.action_row), dtype=torch.float64)
        moved = strip.sampled_logprobs.double() + difference
        logprobs = PackedLogprobs(policy_logprobs=moved, entropy=torch.zeros_like(moved))
        found = divergence(logprobs, strip)
        d = difference[taken]
        wanted = (d.square() / 2 + d.pow(3) / 6 + d.pow(4) / 24 + d.pow(5) / 120).mean()
        assert found.kl == pytest.approx(float(wanted), rel=1e-3)
        assert found.mean_abs_difference == pytest.approx(float(d.abs().mean()), rel=1e-6)
        assert found.max_abs_difference == pytest.approx(float(d.abs().max()), rel=1e-6)
        assert found.num_actions == int(taken.sum())
