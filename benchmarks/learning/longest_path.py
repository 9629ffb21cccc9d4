"""A trainer that trains on the longest path of each tree alone: Tree Training's baseline.

`python -m benchmarks.learning.longest_path --config FILE` is `octopus trainer` with `path_average`
replaced: what lies on an episode's longest path has the weight of `dag_grpo`, the rest has none.
"""

from __future__ import annotations

import sys

import torch

from harness_sdk.cli.__main__ import main
from trainer_service.objectives import OBJECTIVES
from trainer_service.objectives.base import ObjectiveOptions, ObjectiveOutput, PackedLogprobs
from trainer_service.objectives.surrogate import weighted_surrogate
from trainer_service.strip import Strip


def loss(
    logprobs: PackedLogprobs, strip: Strip, advantages: torch.Tensor, options: ObjectiveOptions
) -> ObjectiveOutput:
    """`dag_grpo` as if the longest path were the whole episode."""
    return weighted_surrogate(logprobs, strip, advantages, options, path_weights(strip))


def path_weights(strip: Strip) -> torch.Tensor:
    """1 / Z on each episode's longest path, 0 elsewhere, `[A]` float64; Z is that path's own.

    The path with the most sampled tokens is the longest; the first of them where several are.
    """
    paths = torch.arange(len(strip.path_episode), device=strip.leaf_begin.device)
    ends = strip.leaf_begin + strip.leaf_counts
    on_path = (strip.leaf_begin[:, None] <= paths) & (paths < ends[:, None])
    weights = torch.zeros(len(strip.leaf_begin), dtype=torch.float64, device=paths.device)
    lengths = on_path.sum(0)
    for episode in range(strip.num_episodes):
        own = (strip.path_episode == episode).nonzero().flatten()
        longest = own[lengths[own].argmax()]
        weights[on_path[:, longest]] = 1.0 / lengths[longest].clamp(min=1)
    return weights


if __name__ == "__main__":
    OBJECTIVES["path_average"] = loss
    sys.exit(main(["trainer", *sys.argv[1:]]))
