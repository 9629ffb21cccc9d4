"""One optimiser step on a batch: shares, strips, losses, gradients, and their figures.

Synchronous; the loop runs it on a thread. A tree never crosses a step. Groups whose advantages are
all 0 teach nothing where every term of the objective is multiplied by the advantage: they count in
every mean and are not computed. Every rank computes strips of its own share; their gradients are
added, and each rank makes the same step. Where base weights are sharded, all ranks go through the
model equally often, some of them without an episode.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from harness_sdk.errors import ConfigError, EngineError
from harness_sdk.model_cost import ModelCost
from trainer_service.batch_figures import batch_figures, token_figures
from trainer_service.config import TrainerConfig
from trainer_service.dag import flat_episode, pack_episodes
from trainer_service.feed import Batch
from trainer_service.figures import StripFigures
from trainer_service.groups import Scored
from trainer_service.number_types import NumberTypes, unequal_types
from trainer_service.objectives import OBJECTIVES, ObjectiveOptions
from trainer_service.optim import Optimizer, StepOutcome
from trainer_service.pieces import num_pieces
from trainer_service.policy import Policy
from trainer_service.probe import Probe
from trainer_service.ranks import Ranks
from trainer_service.share import Share, divide, split_episodes
from trainer_service.strip import Strip

log = logging.getLogger(__name__)


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Stepped:
    """One rank's view of a step."""

    outcome: StepOutcome
    loss: float
    """Of all ranks."""
    figures: StripFigures
    """Of this one."""


def train_step(
    policy: Policy,
    optimizer: Optimizer,
    batch: Batch,
    config: TrainerConfig,
    *,
    version: int,
    ranks: Ranks | None = None,
    cost: ModelCost | None = None,
) -> StepResult:
    """Step from policy `version`; its gradients do not depend on how the strips are cut.

    Args:
        policy, optimizer: Of the leading rank.
        batch: Of the step.
        config: Of the service.
        version: Policy version that the step starts from.
        ranks: Whose followers are in `follow_steps`; None computes alone.
        cost: What a token costs the model, to balance them; None counts tokens.

    Raises:
        ConfigError: An episode was sampled from another base model, or one of another dtype.
        EngineError: Another rank ended, or steps otherwise.
    """
    ranks = ranks or Ranks()
    check_model(batch.episodes, policy.model_hash, policy.vocab_size)
    own = NumberTypes(dtype=policy.dtype, head_dtype=policy.head_dtype)
    check_types(batch.episodes, own, config)
    begin, scale = time.monotonic(), optimizer.loss_scale
    shares = divide(batch, config, version=version, num_ranks=ranks.size, cost=cost)
    stepped = take_share(policy, optimizer, ranks.scatter(shares), config, ranks)
    figures, balance = _gathered(stepped, ranks)
    outcome, seconds = stepped.outcome, time.monotonic() - begin
    if outcome.skipped:
        log.warning(
            "step skipped, nothing learned: loss %g, gradient norm %g%s",
            stepped.loss,
            outcome.grad_norm,
            f"; the loss scale began at {scale:g} and is {optimizer.loss_scale:g} now"
            if optimizer.loss_scale != scale
            else "",
            extra={"policy_version": version},
        )
    metrics = {
        "loss/total": stepped.loss,
        "optim/grad_norm": outcome.grad_norm,
        "optim/lr": outcome.lr,
        "optim/skipped": float(optimizer.num_skipped),
        "optim/loss_scale": optimizer.loss_scale,
        "seconds/pack": figures.pack_seconds,
        "seconds/compute": seconds - figures.pack_seconds,
        "tokens/per_s": figures.num_tokens / max(seconds, 1e-9),
        **balance,
        **batch_figures(batch, version, compared=config.needs_groups),
        **token_figures(batch, figures),
        **figures.metrics(),
    }
    return StepResult(skipped=outcome.skipped, metrics=metrics)


def follow_steps(policy: Policy, optimizer: Optimizer, config: TrainerConfig, ranks: Ranks) -> None:
    """Compute this rank's shares until the leader has no more.

    Raises:
        EngineError: Another rank ended.
    """
    while (share := ranks.scatter(None)) is not None:
        if isinstance(share, Probe):
            with ranks.told():
                policy.token_logprobs(share.token_ids)
            continue
        stepped = take_share(policy, optimizer, share, config, ranks)
        _gathered(stepped, ranks)


def dismiss(ranks: Ranks) -> None:
    """Let the followers return from `follow_steps`."""
    if ranks.size > 1:
        ranks.scatter([None] * ranks.size)


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


def check_types(episodes: Sequence[Scored], own: NumberTypes, config: TrainerConfig) -> None:
    """Refuse episodes that `unequal_types` finds; records that name no type pass.

    Raises:
        ConfigError: With both types.
    """
    for episode in episodes:
        record = episode.record
        sampled = NumberTypes(dtype=record.dtype, head_dtype=record.head_dtype)
        for unequal in unequal_types(config, own, sampled):
            raise ConfigError(
                f"episode {record.episode_id} was sampled from {unequal.what} of another type",
                value=f"{unequal.sampled} on replica {record.replica_id}",
                limit=f"{unequal.own}, which the trainer computes",
                remedy=f"set the same {unequal.setting} on rollout and trainer, and a new run name"
                " where episodes of another wait in the stream",
                episode_id=record.episode_id,
            )


def take_share(
    policy: Policy, optimizer: Optimizer, share: Share, config: TrainerConfig, ranks: Ranks
) -> Stepped:
    """This rank's part of a step, and the step itself; all ranks call it."""
    begin = time.monotonic()
    parts = _parts(share, config)
    pack_seconds = time.monotonic() - begin
    # sft divides by the actions of the whole step.
    (num_actions,) = ranks.sum(sum(part.strip.action_source.shape[0] for part in parts))
    options = _options(share, int(num_actions), config)
    passes = [1] * len(parts)
    if policy.is_sharded:
        # Long strips beside long ones, so that ranks wait for each other least.
        parts.sort(key=lambda part: -part.strip.num_tokens)
        passes = _num_passes(parts, config, ranks)
    while True:
        stepped = _take_parts(policy, optimizer, parts, passes, share, config, options, ranks)
        # All ranks see the same sums, and so the same outcome.
        if not stepped.outcome.overflowed:
            stepped.figures.pack_seconds = pack_seconds
            return stepped


def _take_parts(
    policy: Policy,
    optimizer: Optimizer,
    parts: Sequence[_Part],
    passes: Sequence[int],
    share: Share,
    config: TrainerConfig,
    options: ObjectiveOptions,
    ranks: Ranks,
) -> Stepped:
    """Gradients of all strips, added to those of other ranks, and the step they make."""
    begin = time.monotonic()
    figures = StripFigures(version=share.version)
    optimizer.zero_grad()
    loss = 0.0
    with ranks.told():
        for part, num_passes in zip(parts, passes, strict=False):
            loss += _accumulate(
                policy, optimizer, part, share, config, options, figures, num_passes
            )
        for num_passes in passes[len(parts) :]:
            _keep_pace(policy, share, options, num_passes)
    figures.seconds = time.monotonic() - begin
    if not share.teaches or not parts:
        _zero_gradients(optimizer)
    ranks.sum_gradients(optimizer.parameters)
    (loss,) = ranks.sum(loss)
    return Stepped(outcome=optimizer.step(loss=loss), loss=loss, figures=figures)


def _gathered(stepped: Stepped, ranks: Ranks) -> tuple[StripFigures, dict[str, float]]:
    """At the leader, figures of all ranks and how evenly they worked.

    Raises:
        EngineError: The ranks did not make the same step, so their adapters differ.
    """
    found = ranks.gather((stepped.figures, repr(stepped.outcome)))
    if not found:
        return stepped.figures, {}
    outcomes = {outcome for _, outcome in found}
    if len(outcomes) > 1:
        raise EngineError(
            "the processes of the trainer did not make the same step",
            value=" and ".join(sorted(outcomes)),
            remedy="run all of them on the same kind of machine; started again, the trainer resumes"
            " from its checkpoint",
        )
    total, *others = (figures for figures, _ in found)
    seconds = [figures.seconds for figures, _ in found]
    for other in others:
        total.merge(other)
    busy = sum(seconds) / (len(seconds) * max(*seconds, 1e-9))
    return total, {"ranks/size": float(ranks.size), "ranks/busy": busy}


def _parts(share: Share, config: TrainerConfig) -> list[_Part]:
    """Strips of the share's episodes."""
    sizes = [record.num_tokens for record in share.records]
    return [
        _Part(
            strip=pack_episodes([share.records[index] for index in chosen]),
            advantages=share.advantages[chosen],
        )
        for chosen in split_episodes(sizes, config.batch.max_strip_tokens)
    ]


def _num_passes(parts: Sequence[_Part], config: TrainerConfig, ranks: Ranks) -> list[int]:
    """Of each strip, by place: pieces of the rank whose strip there has most of them."""
    (length,) = ranks.most(len(parts))
    own = [num_pieces(part.strip.num_tokens, config.batch.max_piece_tokens) for part in parts]
    return ranks.most(*own, *[1] * (length - len(own)))


def _options(share: Share, num_actions: int, config: TrainerConfig) -> ObjectiveOptions:
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
        num_episodes=share.num_episodes,
        num_actions=max(num_actions, 1),
    )


def _accumulate(
    policy: Policy,
    optimizer: Optimizer,
    part: _Part,
    share: Share,
    config: TrainerConfig,
    options: ObjectiveOptions,
    figures: StripFigures,
    num_passes: int,
) -> float:
    """Add a strip's gradients and figures; its loss, 0 where the share teaches nothing."""
    strip = part.strip.to(policy.device)
    objective = OBJECTIVES[config.objective]
    passes = {"max_piece_tokens": config.batch.max_piece_tokens, "num_passes": num_passes}
    if options.kl_coef:
        options = replace(options, ref_logprobs=policy.reference_logprobs(strip, **passes))
    with torch.set_grad_enabled(share.teaches):
        logprobs = policy.logprobs(strip, **passes)
        output = objective(logprobs, strip, part.advantages.to(policy.device), options)
    figures.add(logprobs, strip, output.metrics)
    if not share.teaches:
        return 0.0
    logprobs.backward(optimizer.scaled(output.loss))
    return float(output.loss.detach())


def _keep_pace(policy: Policy, share: Share, options: ObjectiveOptions, num_passes: int) -> None:
    """Passes that teach nothing: others need this rank's part of the weights for theirs."""
    strip = flat_episode((0, 0))
    if options.kl_coef:
        policy.reference_logprobs(strip, num_passes=num_passes)
    with torch.set_grad_enabled(share.teaches):
        logprobs = policy.logprobs(strip, num_passes=num_passes)
    if share.teaches:
        logprobs.backward(logprobs.policy_logprobs.sum() * 0.0)


def _zero_gradients(optimizer: Optimizer) -> None:
    """What a backward would have left: momentum and decay go on as with any gradient."""
    for parameter in optimizer.parameters:
        parameter.grad = torch.zeros_like(parameter)
