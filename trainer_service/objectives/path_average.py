"""The mean over root-to-leaf paths on unique tokens, Tree Training Eq. 4.

Every leaf counts, rewound and orphaned ones too; mounts do not make a token lie on more paths.
"""

from __future__ import annotations

import torch

from trainer_service.objectives.base import ObjectiveOptions, ObjectiveOutput, PackedLogprobs
from trainer_service.objectives.surrogate import weighted_surrogate
from trainer_service.strip import Strip


def loss(
    logprobs: PackedLogprobs, strip: Strip, advantages: torch.Tensor, options: ObjectiveOptions
) -> ObjectiveOutput:
    """A token weighs g_t/K, or the sum of `path_weights` over the paths through it."""
    return weighted_surrogate(logprobs, strip, advantages, options, _weights(strip, options))


def _weights(strip: Strip, options: ObjectiveOptions) -> torch.Tensor:
    if options.path_weights is None:
        return strip.leaf_counts.double() / strip.num_paths[strip.action_episode]
    if options.path_weights.shape != strip.path_episode.shape:
        raise ValueError(
            f"path_weights {tuple(options.path_weights.shape)}; "
            f"allowed: {tuple(strip.path_episode.shape)}"
        )
    # Paths through a token are neighbours, so a difference of running sums adds them up.
    weights = options.path_weights.to(strip.leaf_begin.device, torch.float64)
    sums = torch.cat([weights.new_zeros(1), weights.cumsum(0)])
    return sums[strip.leaf_begin + strip.leaf_counts] - sums[strip.leaf_begin]
