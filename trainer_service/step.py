"""One optimiser step on a batch: advantages, strips, losses, gradients, and their figures.

Synchronous; the loop runs it on a thread. A tree never crosses a step. Groups whose advantages are
all 0 teach nothing where every term of the objective is multiplied by the advantage: they count in
every mean and are not computed.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from harness_sdk.errors import ConfigError
from trainer_service.advantages import estimate
from trainer_service.batch_figures import batch_figures, token_figures
from trainer_service.config import TrainerConfig
from trainer_service.dag import pack_episodes
from trainer_service.divergence import Divergence, divergence
from trainer_service.feed import Batch
from trainer_service.groups import Scored
from trainer_service.objectives import OBJECTIVES, ObjectiveOptions, PackedLogprobs
from trainer_service.optim import Optimizer
from trainer_service.policy import Policy
from trainer_service.strip import Strip


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """What a step did."""

    skipped: bool
    """Not finite: the parameters stand as before."""
    metrics: dict[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Part:
    """A strip and the advantages of its episodes, `[E]`."""

    strip: Strip
    advantages: torch.Tensor
    teaches: bool = True
    """False: a look at how far the policy is from the one that sampled, without gradient."""


def train_step(
    policy: Policy, optimizer: Optimizer, batch: Batch, config: TrainerConfig, *, version: int
) -> StepResult:
    """Step from policy `version`; its gradients do not depend on how the strips are cut.

    Raises:
        ConfigError: An episode was sampled from another base model.
    """
    check_model(batch.episodes, policy.model_hash, policy.vocab_size)
    begin = time.monotonic()
    parts = _parts(batch, config)
    packed = time.monotonic()
    options = _options(batch, parts, config)
    optimizer.zero_grad()
    figures = _Figures(version)
    loss = 0.0
    for part in parts:
        loss += _accumulate(policy, part, config, options, figures)
    if not any(part.teaches for part in parts):
        _zero_gradients(optimizer)
    outcome = optimizer.step(loss=loss)
    computed = time.monotonic()
    metrics = {
        "loss/total": loss,
        "optim/grad_norm": outcome.grad_norm,
        "optim/lr": outcome.lr,
        "optim/skipped": float(optimizer.num_skipped),
        "seconds/pack": packed - begin,
        "seconds/compute": computed - packed,
        "tokens/per_s": sum(p.strip.num_tokens for p in parts) / max(computed - packed, 1e-9),
        **batch_figures(batch, version, compared=config.needs_groups),
        **token_figures(batch, [part.strip for part in parts]),
        **figures.metrics(),
    }
    return StepResult(skipped=outcome.skipped, metrics=metrics)


def check_model(episodes: Sequence[Scored], model_hash: str, vocab_size: int) -> None:
    """Refuse episodes of another base model; imported records have no hash, but a vocabulary.

    Raises:
        ConfigError: With both hashes, or with the token and the size of the vocabulary.
    """
    for episode in episodes:
        found = episode.record.model_hash
        if found and found != model_hash:
            raise ConfigError(
                f"episode {episode.record.episode_id} was sampled from another base model",
                value=found,
                limit=model_hash,
                remedy="give rollout and trainer the same model folder, or use a new run name",
            )
        largest = max(max(node.token_ids, default=0) for node in episode.record.nodes)
        if largest >= vocab_size:
            raise ConfigError(
                f"episode {episode.record.episode_id} has tokens that the model does not know",
                value=largest,
                limit=f"below {vocab_size}",
                remedy="tokenize the records with the model's own tokenizer",
            )


def split_episodes(num_tokens: Sequence[int], max_strip_tokens: int) -> list[list[int]]:
    """Indices of the episodes of each strip, in order, none cut.

    Example:
        `split_episodes([60, 30, 20, 150, 10], 100)` is `[[0, 1], [2], [3], [4]]`.
    """
    strips: list[list[int]] = []
    room = -1
    for index, size in enumerate(num_tokens):
        if not strips or size > room:
            strips.append([])
            room = max_strip_tokens
        strips[-1].append(index)
        room -= size
    return strips


class _Figures:
    """Figures that strips contribute to, each weighted by its tokens."""

    def __init__(self, version: int) -> None:
        self._version = version
        self._objective: defaultdict[str, float] = defaultdict(float)
        self._num_actions = 0
        self._all: list[Divergence] = []
        self._current: list[Divergence] = []

    def add(self, logprobs: PackedLogprobs, strip: Strip, objective: dict[str, float]) -> None:
        """Count one strip, before the update."""
        num_actions = strip.action_source.shape[0]
        self._num_actions += num_actions
        for name, value in objective.items():
            self._objective[name] += value * num_actions
        self._all.append(divergence(logprobs, strip))
        self._current.append(divergence(logprobs, strip, policy_version=self._version))

    def metrics(self) -> dict[str, float]:
        """`objective/*`, `divergence/*`, and `divergence_current/*` of the newest version."""
        total = max(self._num_actions, 1)
        found = {name: value / total for name, value in self._objective.items()}
        found |= _divergence_metrics("divergence", self._all)
        found |= _divergence_metrics("divergence_current", self._current)
        return found


def _divergence_metrics(area: str, parts: Sequence[Divergence]) -> dict[str, float]:
    count = sum(part.num_actions for part in parts)
    over = max(count, 1)
    return {
        f"{area}/kl_mean": sum(part.kl * part.num_actions for part in parts) / over,
        f"{area}/kl_max": max(part.kl_max for part in parts),
        f"{area}/dlogp_mean": sum(p.mean_abs_difference * p.num_actions for p in parts) / over,
        f"{area}/dlogp_max": max(part.max_abs_difference for part in parts),
        f"{area}/num_tokens": float(count),
    }


def _parts(batch: Batch, config: TrainerConfig) -> list[_Part]:
    """Strips of the groups that teach; the first strip of the others where none does.

    That one is for the figures alone: a run that has learned its tasks reports its divergence too.
    """
    episodes = batch.episodes
    advantages = _advantages(batch, config)
    teaching = _teaching(batch, advantages, config)
    teaches = any(teaching)
    places = [place for place, own in enumerate(teaching) if own == teaches]
    sizes = [episodes[place].record.num_tokens for place in places]
    parts = []
    for chosen in split_episodes(sizes, config.batch.max_strip_tokens)[: None if teaches else 1]:
        own = [places[index] for index in chosen]
        strip = pack_episodes([episodes[place].record for place in own])
        parts.append(_Part(strip=strip, advantages=advantages[own], teaches=teaches))
    return parts


def _teaching(batch: Batch, advantages: torch.Tensor, config: TrainerConfig) -> list[bool]:
    """Whether each episode's group adds to the gradient: without another term, none does whose
    advantages are all 0."""
    if not config.needs_groups or config.loss.kl_coef or config.loss.entropy_coef:
        return [True] * len(batch.episodes)
    sizes = [len(group.episodes) for group in batch.groups]
    return [bool(own.any()) for own in advantages.split(sizes) for _ in own]


def _advantages(batch: Batch, config: TrainerConfig) -> torch.Tensor:
    """Of each episode, `[E]`; zeros where the objective compares none."""
    episodes = batch.episodes
    if not config.needs_groups:
        return torch.zeros(len(episodes))
    group_ids = [group.group_id for group in batch.groups for _ in group.episodes]
    outcomes = [episode.reward for episode in episodes]
    return estimate(config.batch.advantages, outcomes, group_ids)


def _options(batch: Batch, parts: Sequence[_Part], config: TrainerConfig) -> ObjectiveOptions:
    """The normalisers are those of the whole step, however it is cut and whatever is left out."""
    return ObjectiveOptions(
        clip_low=config.loss.clip_low,
        clip_high=config.loss.clip_high,
        max_importance=config.loss.importance_cap,
        min_importance=config.loss.importance_floor,
        masks_importance=config.loss.importance == "mask",
        importance_level=config.loss.importance_level,
        kl_coef=config.loss.kl_coef,
        entropy_coef=config.loss.entropy_coef,
        constant_length=config.loss.constant_length,
        num_episodes=len(batch.episodes),
        num_actions=max(sum(part.strip.action_source.shape[0] for part in parts), 1),
    )


def _accumulate(
    policy: Policy,
    part: _Part,
    config: TrainerConfig,
    options: ObjectiveOptions,
    figures: _Figures,
) -> float:
    strip = part.strip.to(policy.device)
    objective = OBJECTIVES[config.objective]
    max_piece_tokens = config.batch.max_piece_tokens
    if options.kl_coef:
        reference = policy.reference_logprobs(strip, max_piece_tokens=max_piece_tokens)
        options = replace(options, ref_logprobs=reference)
    with torch.set_grad_enabled(part.teaches):
        logprobs = policy.logprobs(strip, max_piece_tokens=max_piece_tokens)
        output = objective(logprobs, strip, part.advantages.to(policy.device), options)
    figures.add(logprobs, strip, output.metrics)
    if not part.teaches:
        return 0.0
    output.loss.backward()
    return float(output.loss.detach())


def _zero_gradients(optimizer: Optimizer) -> None:
    """What a backward would have left: momentum and decay go on as with any gradient."""
    for parameter in optimizer.parameters:
        parameter.grad = torch.zeros_like(parameter)
