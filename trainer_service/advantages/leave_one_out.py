"""RLOO, Octopus Eq. 5: minus the mean of the group's other rewards, no standard deviation."""

from __future__ import annotations

import torch

from trainer_service.advantages.base import group_sizes, group_sums


def advantages(rewards: torch.Tensor, groups: torch.Tensor) -> torch.Tensor:
    """0 for an episode that is alone in its group."""
    sizes = group_sizes(groups)
    baseline = (group_sums(rewards, groups) - rewards) / (sizes - 1).clamp(min=1)
    return torch.where(sizes > 1, rewards - baseline, 0.0)
