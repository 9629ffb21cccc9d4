"""The clipped policy-gradient term of each action, which the objectives weigh differently."""

from __future__ import annotations

import torch

from trainer_service.objectives.base import ObjectiveOptions, ObjectiveOutput, PackedLogprobs
from trainer_service.objectives.importance import importance_weights
from trainer_service.strip import Strip


def weighted_surrogate(
    logprobs: PackedLogprobs,
    strip: Strip,
    advantages: torch.Tensor,
    options: ObjectiveOptions,
    weights: torch.Tensor,
) -> ObjectiveOutput:
    """Mean over episodes of minus the weighted sum of the actions' terms.

    An action's term is its clipped surrogate, times its importance weight where there is one, minus
    `kl_coef` times the KL to the reference, plus `entropy_coef` times the entropy.

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
    figures = _figures(ratio, advantage, logprobs, options)
    if options.max_importance is not None:
        importance = importance_weights(old, strip, options)
        terms = terms * importance
        figures["objective/importance_mean"] = importance
        figures["objective/importance_cut_fraction"] = (
            importance == 0 if options.masks_importance else importance >= options.max_importance
        )
    if options.kl_coef:
        kl = _reference_kl(policy, taken, options)
        terms = terms - options.kl_coef * kl
        figures["objective/reference_kl"] = kl
    if options.entropy_coef:
        terms = terms + options.entropy_coef * logprobs.entropy.to(policy)
    weight = weights.to(policy) * taken
    loss = -(weight * terms).sum() / (options.num_episodes or strip.num_episodes)
    return ObjectiveOutput(loss=loss, metrics=_means(figures, taken))


def _old_logprobs(policy: torch.Tensor, strip: Strip, options: ObjectiveOptions) -> torch.Tensor:
    if options.old_logprobs is not None:
        return options.old_logprobs.to(policy)
    if options.max_importance is not None:
        return policy.detach()
    return strip.sampled_logprobs.to(policy)


def _reference_kl(
    policy: torch.Tensor, taken: torch.Tensor, options: ObjectiveOptions
) -> torch.Tensor:
    """k3 of KL(policy || reference), `[A]`: never negative, and 0 with a gradient of 0 where they
    agree and where `taken` is False: a demonstration may be unlikely beyond what float32 holds."""
    if options.ref_logprobs is None:
        raise ValueError("kl_coef needs ref_logprobs")
    difference = torch.where(taken, options.ref_logprobs.to(policy) - policy, 0.0)
    return difference.expm1() - difference


def _figures(
    ratio: torch.Tensor,
    advantage: torch.Tensor,
    logprobs: PackedLogprobs,
    options: ObjectiveOptions,
) -> dict[str, torch.Tensor]:
    too_high = (ratio > 1 + options.clip_high) & (advantage > 0)
    too_low = (ratio < 1 - options.clip_low) & (advantage < 0)
    return {
        "objective/ratio_mean": ratio,
        "objective/clip_fraction": too_high | too_low,
        "objective/entropy": logprobs.entropy,
    }


def _means(figures: dict[str, torch.Tensor], taken: torch.Tensor) -> dict[str, float]:
    """Of each figure over the actions that the policy sampled; one copy from the device."""
    with torch.no_grad():
        count = taken.sum().clamp(min=1)
        means = [(value.detach().double() * taken).sum() / count for value in figures.values()]
        return dict(zip(figures, torch.stack(means).tolist(), strict=True))
