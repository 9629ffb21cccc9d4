"""One step: cut anywhere the same gradients, figures right."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.path_reference import leaves, path_to
from tests.random_records import random_record
from tests.records import small_record
from tests.tiny_models import save_tiny_model
from tests.tree_cases import relative_rms
from trainer_service.advantages import estimate
from trainer_service.config import GROUP_OBJECTIVES, OBJECTIVE_NAMES, TrainerConfig
from trainer_service.dag import pack_episodes
from trainer_service.feed import Batch
from trainer_service.groups import Group, Scored
from trainer_service.objectives import OBJECTIVES, ObjectiveOptions, PackedLogprobs
from trainer_service.optim import Optimizer, StepOutcome
from trainer_service.policy import LoraOptions, Policy
from trainer_service.run_state import new_optimizer
from trainer_service.sections import LossOptions
from trainer_service.step import train_step
from trainer_service.strip import Strip


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("model"), "qwen3_5")


def _config(model: Path, objective: str, **batch: Any) -> TrainerConfig:
    return TrainerConfig.model_validate(
        {"model": {"path": model}, "objective": objective, "batch": batch, "optim": {"lr": 1e-2}}
    )


def _batch(
    num_groups: int = 2,
    *,
    demonstrations: bool = False,
    mount_layers: tuple[int, ...] = (2, 5),
) -> Batch:
    groups = []
    for number in range(num_groups):
        records = [
            random_record(
                np.random.default_rng(10 * number + index),
                300,
                episode_id=f"episode-{number}-{index}",
                group_id=f"group-{number}",
                num_events=5,
                mount_layers=mount_layers,
                reward=float(index == 0),
                with_demonstrations=demonstrations,
                policy_version=number,
            )
            for index in range(3)
        ]
        groups.append(
            Group(
                group_id=f"group-{number}",
                episodes=tuple(Scored.of(r.episode_id, r) for r in records),
            )
        )
    return Batch(groups=tuple(groups))


def _policy(config: TrainerConfig, dtype: str = "float64") -> Policy:
    assert config.model.path is not None
    policy = Policy.load(
        config.model.path, lora=LoraOptions(rank=2, alpha=4.0, seed=1), dtype=dtype
    )
    # B starts at zero, where half of the gradients vanish.
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in policy.trainable_parameters():
            parameter.add_(torch.randn_like(parameter) * 0.05)
    return policy


def _stepped(config: TrainerConfig, batch: Batch) -> tuple[dict[str, float], list[torch.Tensor]]:
    policy = _policy(config)
    optimizer = Optimizer(policy.trainable_parameters(), config.optim_options)
    result = train_step(policy, optimizer, batch, config, version=1)
    return result.metrics, [p.detach().clone() for p in policy.trainable_parameters()]


@pytest.mark.parametrize("cut", [{"max_strip_tokens": 1}, {"max_piece_tokens": 30}])
@pytest.mark.parametrize("objective", OBJECTIVE_NAMES)
def test_step_does_not_depend_on_how_strips_are_cut(
    model: Path, objective: str, cut: dict[str, int]
) -> None:
    batch = _batch(demonstrations=objective == "sft")
    whole, one = _stepped(_config(model, objective), batch)
    pieces, other = _stepped(_config(model, objective, **cut), batch)
    assert pieces["loss/total"] == pytest.approx(whole["loss/total"], rel=1e-9, abs=1e-12)
    assert pieces["optim/grad_norm"] == pytest.approx(whole["optim/grad_norm"], rel=1e-9)
    for name in ("divergence/kl_mean", "divergence/kl_max", "tokens/packed", "tokens/flat"):
        assert pieces[name] == pytest.approx(whole[name], rel=1e-9)
    for a, b in zip(one, other, strict=True):
        assert torch.allclose(a, b, rtol=1e-7, atol=1e-10)


def test_step_computes_a_long_strip_in_pieces_twice(model: Path) -> None:
    config = _config(model, "dag_grpo", max_piece_tokens=30)
    policy = _policy(config)
    sizes: list[int] = []
    embedding = next(m for _, m in policy.modules() if isinstance(m, torch.nn.Embedding))
    embedding.register_forward_pre_hook(lambda _, args: sizes.append(args[0].numel()))
    optimizer = Optimizer(policy.trainable_parameters(), config.optim_options)
    metrics = train_step(policy, optimizer, _batch(), config, version=1).metrics
    assert max(sizes) == 30
    assert sum(sizes) == 2 * metrics["tokens/packed"]


def test_step_reports_reward_lag_sizes_and_divergence(model: Path) -> None:
    metrics, _ = _stepped(_config(model, "dag_grpo"), _batch())
    assert metrics["reward/mean"] == pytest.approx(1 / 3)
    assert metrics["policy/lag_max"] == 1.0
    assert 0.0 < metrics["policy/lag_mean"] < 1.0
    assert metrics["batch/uniform_groups"] == 0.0
    assert metrics["tokens/packed"] < metrics["tokens/flat"]
    assert metrics["divergence/kl_max"] > metrics["divergence/kl_mean"] > 0.0
    assert metrics["divergence/dlogp_max"] > metrics["divergence/dlogp_mean"] > 0.0
    assert 0 < metrics["divergence_current/num_tokens"] < metrics["divergence/num_tokens"]
    for name in (
        "loss/total", "optim/grad_norm", "optim/lr", "objective/clip_fraction",
        "objective/entropy", "tokens/per_s", "seconds/compute", "ranks/busy",
    ):  # fmt: skip
        assert np.isfinite(metrics[name]), name


def _mixed(rewards: Sequence[Sequence[float]]) -> Batch:
    """The groups of `_batch` with these rewards."""
    groups = []
    for group, own in zip(_batch(len(rewards)).groups, rewards, strict=True):
        records = [
            replace(episode.record, reward=reward)
            for episode, reward in zip(group.episodes, own, strict=True)
        ]
        groups.append(replace(group, episodes=tuple(Scored.of(r.episode_id, r) for r in records)))
    return Batch(groups=tuple(groups))


class _Gradients(Optimizer):
    """Keeps what it was given."""

    def step(self, *, loss: float) -> StepOutcome:
        self.found = [p.grad.clone() for p in self.parameters if p.grad is not None]
        return super().step(loss=loss)


def _gradients(policy: Policy, config: TrainerConfig, batch: Batch) -> list[torch.Tensor]:
    """Those of every episode, computed in one strip."""
    strip = pack_episodes([episode.record for episode in batch.episodes])
    advantages = estimate(
        config.batch.advantages,
        [episode.reward for episode in batch.episodes],
        [group.group_id for group in batch.groups for _ in group.episodes],
    )
    options = ObjectiveOptions(
        clip_low=config.loss.clip_low,
        clip_high=config.loss.clip_high,
        max_importance=config.loss.importance_cap,
    )
    OBJECTIVES[config.objective](policy.logprobs(strip), strip, advantages, options).loss.backward()
    found = [p.grad.clone() for p in policy.trainable_parameters() if p.grad is not None]
    for parameter in policy.trainable_parameters():
        parameter.grad = None
    return found


@pytest.mark.parametrize("cap", [None, 2.0])
@pytest.mark.parametrize("advantages", ["leave_one_out", "group_mean"])
@pytest.mark.parametrize("objective", GROUP_OBJECTIVES)
def test_groups_without_a_difference_are_left_out_and_change_no_gradient(
    model: Path, objective: str, advantages: str, cap: float | None
) -> None:
    config = _config(model, objective, advantages=advantages, max_strip_tokens=100)
    config = config.model_copy(update={"loss": LossOptions(importance_cap=cap)})
    batch = _mixed([(0.3, 0.3, 0.3), (1.0, 0.0, 0.25), (1.0, 1.0, 1.0), (0.0, 1.0, 1.0)])
    policy = _policy(config)
    wanted = _gradients(policy, config, batch)
    computed = _counted(policy)
    optimizer = _Gradients(policy.trainable_parameters(), config.optim_options)
    metrics = train_step(policy, optimizer, batch, config, version=1).metrics
    assert len(optimizer.found) == len(wanted) == len(optimizer.parameters)
    assert any(float(gradient.abs().max()) > 1e-6 for gradient in wanted)
    for found, gradient in zip(optimizer.found, wanted, strict=True):
        assert float((found - gradient).norm()) <= 1e-9 * float(gradient.norm())
    sizes = [sum(e.record.num_tokens for e in group.episodes) for group in batch.groups]
    assert sum(computed) == metrics["tokens/packed"] == sizes[1] + sizes[3]
    assert metrics["tokens/skipped"] == sizes[0] + sizes[2]
    assert metrics["batch/uniform_groups"] == 2.0
    assert (metrics["batch/groups"], metrics["batch/episodes"]) == (4.0, 12.0)
    assert metrics["reward/mean"] == pytest.approx((0.9 + 1.25 + 3.0 + 2.0) / 12)
    sampled = [[e.record.num_sampled for e in group.episodes] for group in batch.groups]
    assert metrics["divergence/num_tokens"] == sum(sampled[1]) + sum(sampled[3])
    # Staleness is a figure of everything that came.
    lags = [1 - number for number in range(4)]
    assert metrics["policy/lag_max"] == 1.0
    assert metrics["policy/lag_mean"] == pytest.approx(
        sum(lag * sum(own) for lag, own in zip(lags, sampled, strict=True)) / sum(map(sum, sampled))
    )


@pytest.mark.parametrize("cut", [{}, {"max_piece_tokens": 30}])
def test_float16_gradients_are_those_of_float32_where_the_loss_is_scaled(
    tmp_path: Path, cut: dict[str, int]
) -> None:
    config = _config(save_tiny_model(tmp_path, "granitemoehybrid"), "dag_grpo", **cut)
    exact = _policy(config, "float32")
    batch = _batch(mount_layers=exact.mount_layers)
    optimizer = _Gradients(exact.trainable_parameters(), config.optim_options)
    train_step(exact, optimizer, batch, config, version=1)
    wanted = optimizer.found
    errors = []
    for scales_loss in (True, False):
        policy = _policy(config, "float16")
        optimizer = _Gradients(
            policy.trainable_parameters(), config.optim_options, scales_loss=scales_loss
        )
        result = train_step(policy, optimizer, batch, config, version=1)
        assert not result.skipped
        scale = result.metrics["optim/loss_scale"]
        found = [gradient / scale for gradient in optimizer.found]
        assert {gradient.dtype for gradient in found} == {torch.float32}
        errors.append(relative_rms(_flat(found), _flat(wanted)))
    # Rounding alone against small gradients that vanished.
    assert errors[0] <= 5e-3
    assert errors[1] >= 5 * errors[0]


def test_step_whose_scaled_gradients_overflow_is_computed_again(model: Path) -> None:
    config = _config(model, "dag_grpo")
    batch = _batch()
    found = []
    for factor in (1.0, 2.0**12):
        policy = _policy(config, "float16")
        optimizer = new_optimizer(policy, config)
        optimizer._scaler.update(1024.0 * factor)
        metrics = train_step(policy, optimizer, batch, config, version=1).metrics
        assert metrics["optim/skipped"] == 0.0 and optimizer.num_steps == 1
        found.append((metrics, _flat([p.detach() for p in policy.trainable_parameters()])))
    (calm, one), (loud, other) = found
    assert calm["optim/loss_scale"] == 1024.0 < loud["optim/loss_scale"] < 1024.0 * 2**12
    for name in ("loss/total", "tokens/packed", "divergence/num_tokens", "divergence/kl_mean"):
        assert calm[name] == loud[name], name
    assert loud["optim/grad_norm"] == pytest.approx(calm["optim/grad_norm"], rel=1e-2)
    assert relative_rms(other, one) < 1e-2


def test_step_that_overflows_at_every_scale_is_told_and_costs_one_halving(
    model: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = _config(model, "dag_grpo")
    policy = _policy(config, "float16")
    optimizer = new_optimizer(policy, config)
    optimizer._scaler.update(2.0**40)
    before = _flat([p.detach() for p in policy.trainable_parameters()])
    result = train_step(policy, optimizer, _batch(), config, version=1)
    assert result.skipped and result.metrics["optim/skipped"] == 1.0
    assert result.metrics["optim/loss_scale"] == 2.0**39
    assert torch.equal(_flat([p.detach() for p in policy.trainable_parameters()]), before)
    (told,) = caplog.messages
    assert told.startswith("step skipped, nothing learned: loss ")
    assert told.endswith("the loss scale began at 1.09951e+12 and is 5.49756e+11 now")


def _flat(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    return torch.cat([tensor.flatten() for tensor in tensors])


def test_new_optimizers_scale_the_loss_of_float16_models_alone(model: Path) -> None:
    config = _config(model, "dag_grpo")
    for dtype, scale in (("float16", 65536.0), ("bfloat16", 1.0), ("float32", 1.0)):
        assert new_optimizer(_policy(config, dtype), config).loss_scale == scale


def test_step_without_any_difference_looks_at_one_strip_and_steps_as_with_zeros(
    model: Path,
) -> None:
    config = _config(model, "dag_grpo", max_strip_tokens=100)
    teaching, batch = _mixed([(1.0, 0.0, 0.0)]), _mixed([(1.0,) * 3, (0.0,) * 3])
    policy = _policy(config)
    optimizer = _Gradients(policy.trainable_parameters(), config.optim_options)
    train_step(policy, optimizer, teaching, config, version=1)
    before = [p.detach().clone() for p in policy.trainable_parameters()]
    moments = copy.deepcopy(optimizer.state_dict())
    computed = _counted(policy)
    result = train_step(policy, optimizer, batch, config, version=1)
    metrics, total = result.metrics, sum(e.record.num_tokens for e in batch.episodes)
    assert len(computed) == 1
    assert computed[0] == metrics["tokens/packed"] == total - metrics["tokens/skipped"] < total / 2
    assert metrics["divergence/num_tokens"] > 0
    assert metrics["divergence/kl_mean"] > 0
    assert metrics["batch/uniform_groups"] == 2.0
    assert (metrics["loss/total"], metrics["optim/grad_norm"], result.skipped) == (0, 0, False)
    assert optimizer.num_steps == 2
    # Momentum goes on, as it would with gradients that were computed to be 0.
    moved = [p.detach().clone() for p in policy.trainable_parameters()]
    assert any(not torch.equal(a, b) for a, b in zip(before, moved, strict=True))
    reference = Optimizer([torch.nn.Parameter(p) for p in before], config.optim_options)
    reference.load_state_dict(moments)
    for parameter in reference.parameters:
        parameter.grad = torch.zeros_like(parameter)
    reference.step(loss=0.0)
    for a, b in zip(reference.parameters, moved, strict=True):
        assert torch.equal(a, b)


def test_reference_is_the_base_model_and_leaves_the_adapter_as_it_was(model: Path) -> None:
    policy = _policy(_config(model, "dag_grpo"))
    strip = pack_episodes([episode.record for episode in _batch(1).episodes])
    base = Policy.load(model, lora=None, dtype="float64")
    (own := policy.logprobs(strip).policy_logprobs).sum().backward()
    gradients = [p.grad.clone() for p in policy.trainable_parameters() if p.grad is not None]
    for cut in (None, 30):
        found = policy.reference_logprobs(strip, max_piece_tokens=cut)
        torch.testing.assert_close(found, base.logprobs(strip).policy_logprobs)
        assert not found.requires_grad
    assert not torch.allclose(found, own)
    assert torch.equal(policy.logprobs(strip).policy_logprobs, own)
    assert len(policy.trainable_parameters()) == len(gradients)
    for parameter, gradient in zip(policy.trainable_parameters(), gradients, strict=True):
        assert parameter.grad is not None and torch.equal(parameter.grad, gradient)


def test_reference_and_entropy_are_terms_of_the_step_and_of_groups_without_a_difference(
    model: Path,
) -> None:
    batch = _mixed([(1.0, 0.0, 0.0), (1.0, 1.0, 1.0)])
    loss = LossOptions(kl_coef=0.5, entropy_coef=0.1, importance_cap=2.0)
    config = _config(model, "dag_grpo").model_copy(update={"loss": loss})
    policy = _policy(config)
    strip = pack_episodes([episode.record for episode in batch.episodes])
    logprobs = policy.logprobs(strip)
    wanted = OBJECTIVES["dag_grpo"](
        logprobs,
        strip,
        estimate("leave_one_out", [1.0, 0.0, 0.0, 1.0, 1.0, 1.0], list("aaabbb")),
        ObjectiveOptions(
            clip_low=loss.clip_low, clip_high=loss.clip_high, max_importance=2.0, kl_coef=0.5,
            entropy_coef=0.1, ref_logprobs=policy.reference_logprobs(strip),
        ),
    )  # fmt: skip
    for cut in ({}, {"max_strip_tokens": 60, "max_piece_tokens": 30}):
        config = _config(model, "dag_grpo", **cut).model_copy(update={"loss": loss})
        metrics, _ = _stepped(config, batch)
        assert metrics["loss/total"] == pytest.approx(float(wanted.loss.detach()), rel=1e-9)
        assert metrics["tokens/skipped"] == 0.0
        assert metrics["objective/reference_kl"] > 0.0


def test_sizes_of_trees_and_sequences_are_those_of_the_records(model: Path) -> None:
    batch = _batch()
    metrics, _ = _stepped(_config(model, "dag_grpo"), batch)
    records = [episode.record for episode in batch.episodes]
    paths = [
        sum(len(node.token_ids) for node in path_to(record, leaf))
        for record in records
        for leaf in leaves(record)
    ]
    assert metrics["tree/tokens_mean"] == pytest.approx(metrics["tokens/packed"] / len(records))
    assert metrics["sequence/tokens_max"] == max(paths)
    assert metrics["sequence/tokens_mean"] == pytest.approx(metrics["tokens/flat"] / len(paths))
    assert metrics["tree/paths_mean"] == pytest.approx(len(paths) / len(records))
    assert metrics["tree/sampled_max"] == max(record.num_sampled for record in records)
    assert (metrics["reward/min"], metrics["reward/max"]) == (0.0, 1.0)


def test_imitation_leaves_nothing_out(model: Path) -> None:
    groups = tuple(replace(g, episodes=g.episodes[:1]) for g in _batch(demonstrations=True).groups)
    metrics, _ = _stepped(_config(model, "sft"), Batch(groups=groups))
    assert metrics["tokens/skipped"] == metrics["batch/uniform_groups"] == 0.0


def _counted(policy: Policy) -> list[int]:
    """Tokens of each strip that `policy` computes from now on."""
    counts: list[int] = []
    original = policy.logprobs

    def logprobs(strip: Strip, **options: Any) -> PackedLogprobs:
        counts.append(strip.num_tokens)
        return original(strip, **options)

    policy.logprobs = logprobs
    return counts


def test_rewarded_episodes_become_likelier_and_others_less(model: Path) -> None:
    config = _config(model, "dag_grpo")
    policy = Policy.load(model, lora=LoraOptions(rank=4, alpha=8.0))
    optimizer = Optimizer(policy.trainable_parameters(), config.optim_options)
    good = [small_record(f"g{i}", token_ids=(1, 2, 3, 4)) for i in range(2)]
    bad = [small_record(f"b{i}", token_ids=(1, 2, 5, 6), reward=0.0) for i in range(2)]
    before = policy.token_logprobs((1, 2, 3, 4)), policy.token_logprobs((1, 2, 5, 6))
    for _ in range(3):
        now = [policy.token_logprobs(r.nodes[0].token_ids)[1:] for r in (good[0], bad[0])]
        episodes = tuple(
            Scored.of(
                record.episode_id,
                replace(record, nodes=(replace(record.nodes[0], sampled_logprobs=logprobs),)),
            )
            for records, logprobs in ((good, now[0]), (bad, now[1]))
            for record in records
        )
        batch = Batch(groups=(Group(group_id="g", episodes=episodes),))
        metrics = train_step(policy, optimizer, batch, config, version=0).metrics
        assert metrics["divergence/dlogp_max"] < 1e-6
    after = policy.token_logprobs((1, 2, 3, 4)), policy.token_logprobs((1, 2, 5, 6))
    assert sum(after[0][1:]) > sum(before[0][1:])
    assert sum(after[1][1:]) < sum(before[1][1:])
