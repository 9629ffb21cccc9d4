"""Importance weights: how much likelier the policy makes what another version sampled."""

from __future__ import annotations

import torch

from trainer_service.objectives.base import ObjectiveOptions
from trainer_service.strip import Strip


def importance_weights(old: torch.Tensor, strip: Strip, options: ObjectiveOptions) -> torch.Tensor:
    """Truncated or masked weight of each action, `[A]`, without gradient.

    An episode's likelihood ratio is the product over its tree's unique actions: on the strip each
    of them was sampled once, whatever number of paths it is on.

    Args:
        old: Log-probabilities of the policy that the ratio is of, nats, `[A]`.
        strip: The actions; demonstrations were not sampled and count in no episode's ratio.
        options: Level, cap, floor and what happens beyond them.
    """
    assert options.max_importance is not None
    # float64: an episode's sum may run over 100,000 tokens.
    difference = old.detach().double() - strip.sampled_logprobs.to(old.device).double()
    log_weight = _of_level(difference * ~strip.is_demonstration, strip, options)
    weight = log_weight.exp()
    if options.masks_importance:
        outside = (weight > options.max_importance) | (weight < options.min_importance)
        weight = torch.where(outside, 0.0, weight)
    return weight.clamp(max=options.max_importance).to(old)


def _of_level(difference: torch.Tensor, strip: Strip, options: ObjectiveOptions) -> torch.Tensor:
    if options.importance_level == "token":
        return difference
    sums = difference.new_zeros(strip.num_episodes)
    sums = sums.index_add_(0, strip.action_episode, difference)
    if options.importance_level == "geometric":
        sums = sums / strip.num_actions.clamp(min=1)
    return sums[strip.action_episode]
