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
    kl_max: float
    """The estimator's largest single token."""
    mean_abs_difference: float
    """Mean of |policy_logprobs - sampled_logprobs|."""
    max_abs_difference: float
    """The largest of them."""
    num_actions: int
    """Tokens counted."""


def divergence(
    logprobs: PackedLogprobs, strip: Strip, *, policy_version: int | None = None
) -> Divergence:
    """Compare the trainer's log-probabilities with the recorded ones; demonstrations left out.

    Args:
        logprobs: The trainer's, `[A]`.
        strip: The actions.
        policy_version: Count the tokens of this version alone; None counts all.
    """
    taken = ~strip.is_demonstration
    if policy_version is not None:
        taken = taken & (strip.policy_version == policy_version)
    # float64: k3 of a difference of 1e-6 is 5e-13, far below float32's resolution at 1.
    policy = logprobs.policy_logprobs.detach()[taken].double()
    difference = policy - strip.sampled_logprobs[taken].double()
    if difference.numel() == 0:
        return Divergence(
            kl=0.0, kl_max=0.0, mean_abs_difference=0.0, max_abs_difference=0.0, num_actions=0
        )
    k3 = difference.expm1() - difference
    figures = torch.stack(
        [
            k3.mean(),
            k3.max(),
            difference.abs().mean(),
            difference.abs().max(),
        ]
    )
    kl, kl_max, mean, largest = figures.tolist()
    return Divergence(
        kl=kl,
        kl_max=kl_max,
        mean_abs_difference=mean,
        max_abs_difference=largest,
        num_actions=difference.numel(),
    )
