"""Every objective and option against paths walked one token at a time, gradients too, in float64.

The reference knows the record alone: no strip, no leaf counts, no packed sums.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch

from harness_sdk.record import EpisodeRecord, NodeKind
from tests.path_reference import leaves, path_to
from tests.random_records import random_record
from trainer_service.dag import pack_episodes
from trainer_service.objectives import OBJECTIVES, ObjectiveOptions, PackedLogprobs
from trainer_service.strip import Strip

Token = tuple[int, int, int]
"""(episode, record node, offset)."""

ADVANTAGES = torch.tensor([0.7, -1.3, 0.4], dtype=torch.float64)
OPTIONS: dict[str, dict[str, Any]] = {
    "clipped": {"clip_low": 0.1, "clip_high": 0.3},
    "token truncated": {"max_importance": 1.1},
    "token masked": {"max_importance": 1.3, "min_importance": 0.8, "masks_importance": True},
    "sequence truncated": {"max_importance": 2.0, "importance_level": "sequence"},
    "sequence masked": {
        "max_importance": 9.0, "min_importance": 0.5, "masks_importance": True,
        "importance_level": "sequence",
    },
    "geometric truncated": {"max_importance": 1.02, "importance_level": "geometric"},
    "geometric masked": {
        "max_importance": 1.05, "min_importance": 0.95, "masks_importance": True,
        "importance_level": "geometric",
    },
    "reference": {"kl_coef": 0.3},
    "entropy": {"entropy_coef": 0.2},
    "all at once": {"max_importance": 1.2, "kl_coef": 0.1, "entropy_coef": 0.05},
}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """Records, and the values of each sampled token by its name."""

    records: list[EpisodeRecord]
    strip: Strip
    names: list[Token]
    policy: torch.Tensor
    entropy: torch.Tensor
    reference: torch.Tensor

    def value(self, values: torch.Tensor, token: Token) -> torch.Tensor:
        return values[self.names.index(token)]


def _case(seed: int) -> Case:
    rng = np.random.default_rng(seed)
    records = [random_record(rng, 50, num_events=10, with_demonstrations=True) for _ in range(3)]
    strip = pack_episodes(records)
    rows: list[Token] = []
    for node in strip.nodes:
        lengths = {each.node_id: len(each.token_ids) for each in records[node.episode].nodes}
        for part in node.record_nodes:
            rows += [(node.episode, part, offset) for offset in range(lengths[part])]
    generator = torch.Generator().manual_seed(seed)

    def near(size: float) -> torch.Tensor:
        noise = torch.randn(strip.action_row.shape, generator=generator, dtype=torch.float64)
        return strip.sampled_logprobs.double() + size * noise

    return Case(
        records=records,
        strip=strip,
        names=[rows[row] for row in strip.action_row.tolist()],
        policy=near(0.3).requires_grad_(),
        entropy=near(0.5).abs().requires_grad_(),
        reference=near(0.4),
    )


def _paths(record: EpisodeRecord) -> list[list[tuple[tuple[int, int], float, bool]]]:
    """Sampled tokens of each path: node and offset, recorded log-probability, whether shown."""
    found = []
    for leaf in leaves(record):
        tokens: list[tuple[tuple[int, int], float, bool]] = []
        first = True
        for node in path_to(record, leaf):
            recorded = iter(node.sampled_logprobs)
            for offset, flag in enumerate(node.sampled):
                value = next(recorded) if flag else 0.0
                if flag and not first:
                    shown = node.kind == NodeKind.DEMONSTRATION
                    tokens.append(((node.node_id, offset), value, shown))
                first = False
        found.append(tokens)
    return found


def _float32(value: float) -> float:
    return float(np.float32(value))


def _importance(
    own: torch.Tensor, whole: torch.Tensor, count: int, options: ObjectiveOptions
) -> torch.Tensor:
    """Weight of a token: its own log-ratio, its episode's sum of them and their number."""
    assert options.max_importance is not None
    log_ratio = {"token": own, "sequence": whole, "geometric": whole / count}
    weight = log_ratio[options.importance_level].detach().exp()
    if options.masks_importance:
        inside = options.min_importance <= float(weight) <= options.max_importance
        return weight if inside else torch.zeros_like(weight)
    return weight.clamp(max=options.max_importance)


def _reference(name: str, case: Case, options: ObjectiveOptions) -> torch.Tensor:
    """The loss, path by path and token by token."""
    total = torch.zeros((), dtype=torch.float64)
    for episode, record in enumerate(case.records):
        paths = _paths(record)
        unique = {token: value for path in paths for token, value, shown in path if not shown}
        ratios = {
            token: case.value(case.policy, (episode, *token)) - _float32(value)
            for token, value in unique.items()
        }
        whole = torch.stack(list(ratios.values())).sum()
        seen: set[tuple[int, int]] = set()
        for path in paths:
            for token, _, shown in path:
                if shown:
                    continue
                place = (episode, *token)
                advantage = ADVANTAGES[episode]
                ratio = ratios[token].exp()
                if options.max_importance is not None:
                    ratio = (ratios[token] - ratios[token].detach()).exp()
                cut = ratio.clamp(1 - options.clip_low, 1 + options.clip_high)
                term = torch.minimum(ratio * advantage, cut * advantage)
                if options.max_importance is not None:
                    term = term * _importance(ratios[token], whole, len(unique), options)
                if options.kl_coef:
                    gap = case.value(case.reference, place) - case.value(case.policy, place)
                    term = term - options.kl_coef * (gap.exp() - 1 - gap)
                if options.entropy_coef:
                    term = term + options.entropy_coef * case.value(case.entropy, place)
                weight = 1 / len(paths) if name == "path_average" else float(token not in seen)
                if name == "dag_grpo":
                    weight /= options.constant_length or len(unique)
                seen.add(token)
                total = total - weight * term / len(case.records)
    return total


def _check(name: str, case: Case, options: ObjectiveOptions) -> bool:
    """Whether anything had a gradient at all."""
    logprobs = PackedLogprobs(policy_logprobs=case.policy, entropy=case.entropy)
    options = replace(options, ref_logprobs=case.reference if options.kl_coef else None)
    found = OBJECTIVES[name](logprobs, case.strip, ADVANTAGES, options).loss
    wanted = _reference(name, case, options)
    assert float(found.detach()) == pytest.approx(float(wanted.detach()), rel=1e-10)
    inputs = (case.policy, case.entropy)
    gradients = torch.autograd.grad(found, inputs, allow_unused=True)
    expected = torch.autograd.grad(wanted, inputs, allow_unused=True)
    for one, other in zip(gradients, expected, strict=True):
        if other is None:
            assert one is None or not bool(one.any())
            continue
        assert one is not None
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-14)
    assert expected[0] is not None
    return bool(expected[0].any())


@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize("name", ["dag_grpo", "path_average", "token_unique"])
def test_objective_and_its_gradient_equal_the_walk_over_paths(name: str, option: str) -> None:
    taught = [_check(name, _case(seed), ObjectiveOptions(**OPTIONS[option])) for seed in range(2)]
    assert any(taught)


def test_constant_length_takes_the_place_of_the_episode_s_own() -> None:
    assert _check("dag_grpo", _case(5), ObjectiveOptions(constant_length=64.0))


def test_sft_s_gradient_is_the_same_for_every_token() -> None:
    case = _case(3)
    logprobs = PackedLogprobs(policy_logprobs=case.policy, entropy=case.entropy)
    out = OBJECTIVES["sft"](logprobs, case.strip, ADVANTAGES, ObjectiveOptions())
    (gradient,) = torch.autograd.grad(out.loss, case.policy)
    unique = {(e, *token) for e, r in enumerate(case.records) for p in _paths(r) for token, *_ in p}
    assert len(unique) == len(case.names)
    torch.testing.assert_close(gradient, torch.full_like(gradient, -1 / len(unique)))


def test_ratios_past_the_cap_are_counted() -> None:
    case = _case(4)
    taken = ~case.strip.is_demonstration
    ratio = (case.policy.detach() - case.strip.sampled_logprobs.double()).exp()[taken]
    logprobs = PackedLogprobs(policy_logprobs=case.policy, entropy=case.entropy)
    for masks, cut in ((False, ratio >= 1.2), (True, (ratio > 1.2) | (ratio < 0.9))):
        options = ObjectiveOptions(
            max_importance=1.2, min_importance=0.9 if masks else 0.0, masks_importance=masks
        )
        found = OBJECTIVES["token_unique"](logprobs, case.strip, ADVANTAGES, options).metrics
        wanted = float(cut.double().mean())
        assert found["objective/importance_cut_fraction"] == pytest.approx(wanted)
        assert 0 < wanted < 1


def test_a_weight_beyond_every_number_is_cut_like_any_other() -> None:
    case = _case(6)
    far = (case.strip.sampled_logprobs.double() + 2000.0).requires_grad_()
    logprobs = PackedLogprobs(policy_logprobs=far, entropy=case.entropy)
    for masks in (False, True):
        options = ObjectiveOptions(
            max_importance=2.0, masks_importance=masks, importance_level="sequence"
        )
        loss = OBJECTIVES["dag_grpo"](logprobs, case.strip, ADVANTAGES, options).loss
        (gradient,) = torch.autograd.grad(loss, far)
        assert bool(gradient.isfinite().all())
        assert bool(gradient.any()) != masks


def test_a_penalty_without_its_reference_is_refused() -> None:
    case = _case(0)
    logprobs = PackedLogprobs(policy_logprobs=case.policy, entropy=case.entropy)
    with pytest.raises(ValueError, match="ref_logprobs"):
        OBJECTIVES["dag_grpo"](logprobs, case.strip, ADVANTAGES, ObjectiveOptions(kl_coef=0.1))
