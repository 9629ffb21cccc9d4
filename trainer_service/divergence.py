"""How far the trainer's policy is from the one that sampled."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from trainer_service.objectives.base import PackedLogprobs
from trainer_service.strip import Strip


@dataclass(frozen=True, slots=True, kw_only=True)
class Divergence:
    """Figures over the tokens that the policy sampled; all 0 where there are none."""

    kl: float
    """KL(rollout || trainer) per token by the k3 estimator, in nats."""
    mean_abs_difference: float
    """Mean of |policy_logprobs - sampled_logprobs|."""
    max_abs_difference: float
    """The largest of them."""
    num_actions: int
    """Tokens counted."""


def divergence(logprobs: PackedLogprobs, strip: Strip) -> Divergence:
    """Compare the trainer's log-probabilities with the recorded ones; demonstrations left out."""
    taken = ~strip.is_demonstration
    # float64: k3 of a difference of 1e-6 is 5e-13, far below float32's resolution at 1.
    policy = logprobs.policy_logprobs.detach()[taken].double()
    difference = policy - strip.sampled_logprobs[taken].double()
    if difference.numel() == 0:
        return Divergence(kl=0.0, mean_abs_difference=0.0, max_abs_difference=0.0, num_actions=0)
    figures = torch.stack(
        [
            (difference.expm1() - difference).mean(),
            difference.abs().mean(),
            difference.abs().max(),
        ]
    )
    kl, mean, largest = figures.tolist()
    return Divergence(
        kl=kl,
        mean_abs_difference=mean,
        max_abs_difference=largest,
        num_actions=difference.numel(),
    )
