"""Imitation: the mean negative log-probability of demonstrated and sampled tokens alike."""

from __future__ import annotations

import torch

from trainer_service.objectives.base import ObjectiveOptions, ObjectiveOutput, PackedLogprobs
from trainer_service.strip import Strip


def loss(
    logprobs: PackedLogprobs, strip: Strip, advantages: torch.Tensor, options: ObjectiveOptions
) -> ObjectiveOutput:
    """Advantages play no part."""
    del advantages
    count = options.num_actions or max(strip.action_source.shape[0], 1)
    value = -logprobs.policy_logprobs.sum() / count
    return ObjectiveOutput(loss=value, metrics={"objective/nll": float(value.detach())})
