"""Every unique sampled token weighs 1 (Tree Training, section 3.1)."""

from __future__ import annotations

import torch

from trainer_service.objectives.base import ObjectiveOptions, ObjectiveOutput, PackedLogprobs
from trainer_service.objectives.surrogate import weighted_surrogate
from trainer_service.strip import Strip


def loss(
    logprobs: PackedLogprobs, strip: Strip, advantages: torch.Tensor, options: ObjectiveOptions
) -> ObjectiveOutput:
    """Mean over episodes of the sum of the tokens' clipped terms, negated."""
    weights = torch.ones_like(strip.sampled_logprobs)
    return weighted_surrogate(logprobs, strip, advantages, options, weights)
