"""REINFORCE++ with the group's baseline (arXiv 2501.03262): its mean taken off, then the step's
standard deviation divides."""

from __future__ import annotations

import torch

from trainer_service.advantages import group_mean
from trainer_service.advantages.base import zscore


def advantages(rewards: torch.Tensor, groups: torch.Tensor) -> torch.Tensor:
    """They sum to 0 in every group; a large difference stays larger than a small one."""
    return zscore(group_mean.advantages(rewards, groups))
