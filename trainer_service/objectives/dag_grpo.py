"""DAG-GRPO, Octopus Eq. 9: each sampled token once, normalised by the episode's own count."""

from __future__ import annotations

import torch

from trainer_service.objectives.base import ObjectiveOptions, ObjectiveOutput, PackedLogprobs
from trainer_service.objectives.surrogate import weighted_surrogate
from trainer_service.strip import Strip


def loss(
    logprobs: PackedLogprobs, strip: Strip, advantages: torch.Tensor, options: ObjectiveOptions
) -> ObjectiveOutput:
    """`-1/G sum_i 1/Z_i sum_t min(r A_i, clip(r) A_i)`; the strip is the owner mask of Eq. 6.

    With `constant_length` it stands for every Z_i, as in Dr. GRPO: a token of a large tree then
    weighs as much as one of a small tree.
    """
    if options.constant_length is not None:
        lengths = strip.num_actions.new_full(
            strip.num_actions.shape, options.constant_length, dtype=torch.float64
        )
    else:
        lengths = strip.num_actions.clamp(min=1).double()
    weights = lengths.reciprocal()[strip.action_episode]
    return weighted_surrogate(logprobs, strip, advantages, options, weights)
