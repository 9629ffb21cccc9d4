"""GRPO (arXiv 2402.03300): minus the group's mean, over its standard deviation."""

from __future__ import annotations

import torch

from trainer_service.advantages import group_mean
from trainer_service.advantages.base import EPSILON, group_sizes, group_sums


def advantages(rewards: torch.Tensor, groups: torch.Tensor) -> torch.Tensor:
    """The deviation is the sample's, over G - 1; 0 for an episode that is alone in its group."""
    centred = group_mean.advantages(rewards, groups)
    spread = group_sums(centred.square(), groups) / (group_sizes(groups) - 1).clamp(min=1)
    return centred / (spread.sqrt() + EPSILON)
