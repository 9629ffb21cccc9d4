"""What an estimator takes and gives, and the sums that several need."""

from __future__ import annotations

from typing import Protocol

import torch

EPSILON = 1e-6
"""Added to a standard deviation before it divides."""


class Estimator(Protocol):
    """Advantages `[E]` float64 from rewards in [-1, 1], `[E]` float64, and groups 0.., `[E]`."""

    def __call__(self, rewards: torch.Tensor, groups: torch.Tensor) -> torch.Tensor: ...


def group_sizes(groups: torch.Tensor) -> torch.Tensor:
    """Size of each episode's group, `[E]` float64."""
    return torch.bincount(groups)[groups].double()


def group_sums(values: torch.Tensor, groups: torch.Tensor) -> torch.Tensor:
    """Sum of `values` over each episode's group, `[E]`."""
    sums = values.new_zeros(int(groups.max()) + 1 if groups.numel() else 0)
    return sums.index_add_(0, groups, values)[groups]


def zscore(values: torch.Tensor) -> torch.Tensor:
    """`values` over their own standard deviation (of the sample), their mean taken off."""
    if values.numel() < 2:
        return torch.zeros_like(values)
    return (values - values.mean()) / (values.std() + EPSILON)
