"""Dr. GRPO (arXiv 2503.20783): minus the group's mean, its own reward included."""

from __future__ import annotations

import torch

from trainer_service.advantages.base import group_sizes, group_sums


def advantages(rewards: torch.Tensor, groups: torch.Tensor) -> torch.Tensor:
    """They sum to 0 in every group."""
    return rewards - group_sums(rewards, groups) / group_sizes(groups)
