"""The clipped policy-gradient term of each action, which the objectives weigh differently."""

from __future__ import annotations

import torch

from trainer_service.objectives.base import ObjectiveOptions, ObjectiveOutput, PackedLogprobs
from trainer_service.strip import Strip


def weighted_surrogate(
    logprobs: PackedLogprobs,
    strip: Strip,
    advantages: torch.Tensor,
    options: ObjectiveOptions,
    weights: torch.Tensor,
) -> ObjectiveOutput:
    """Mean over episodes of minus the weighted sum of the actions' terms.

    Args:
        weights: Weight of each action, `[A]`; demonstrations get none.
        logprobs, strip, advantages, options: As every objective takes them.
    """
    taken = ~strip.is_demonstration
    policy = logprobs.policy_logprobs
    old = _old_logprobs(policy, strip, options)
    ratio = (policy - old).exp()
    advantage = advantages.to(policy)[strip.action_episode]
    clipped = ratio.clamp(1 - options.clip_low, 1 + options.clip_high)
    terms = torch.minimum(ratio * advantage, clipped * advantage)
    weight = weights.to(policy) * taken
    if options.max_importance is not None:
        importance = (old - strip.sampled_logprobs.to(old)).exp()
        weight = weight * importance.clamp(max=options.max_importance)
    loss = -(weight * terms).sum() / (options.num_episodes or strip.num_episodes)
    return ObjectiveOutput(loss=loss, metrics=_metrics(ratio, advantage, logprobs, taken, options))


def _old_logprobs(policy: torch.Tensor, strip: Strip, options: ObjectiveOptions) -> torch.Tensor:
    if options.old_logprobs is not None:
        return options.old_logprobs.to(policy)
    if options.max_importance is not None:
        return policy.detach()
    return strip.sampled_logprobs.to(policy)


def _metrics(
    ratio: torch.Tensor,
    advantage: torch.Tensor,
    logprobs: PackedLogprobs,
    taken: torch.Tensor,
    options: ObjectiveOptions,
) -> dict[str, float]:
    with torch.no_grad():
        count = taken.sum().clamp(min=1)
        too_high = (ratio > 1 + options.clip_high) & (advantage > 0)
        too_low = (ratio < 1 - options.clip_low) & (advantage < 0)
        values = {
            "objective/ratio_mean": (ratio * taken).sum() / count,
            "objective/clip_fraction": ((too_high | too_low) & taken).sum() / count,
            "objective/entropy": (logprobs.entropy * taken).sum() / count,
        }
        numbers = torch.stack([value.double() for value in values.values()]).tolist()
    return dict(zip(values, numbers, strict=True))
