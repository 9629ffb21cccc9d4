"""DAG-GRPO, Octopus Eq. 9: each sampled token once, normalised by the episode's own count."""

from __future__ import annotations

import torch

from trainer_service.objectives.base import ObjectiveOptions, ObjectiveOutput, PackedLogprobs
from trainer_service.objectives.surrogate import weighted_surrogate
from trainer_service.strip import Strip


def loss(
    logprobs: PackedLogprobs, strip: Strip, advantages: torch.Tensor, options: ObjectiveOptions
) -> ObjectiveOutput:
    """`-1/G sum_i 1/Z_i sum_t min(r A_i, clip(r) A_i)`; the strip is the owner mask of Eq. 6."""
    weights = 1.0 / strip.num_actions.clamp(min=1)[strip.action_episode]
    return weighted_surrogate(logprobs, strip, advantages, options, weights)
