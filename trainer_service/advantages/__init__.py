"""Advantages of episodes from their outcomes; each file holds one estimator.

To add one, write a file like `leave_one_out.py`, name it in `ESTIMATORS`, and in `ADVANTAGE_NAMES`
of `trainer_service/config.py`.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import torch

from trainer_service.advantages import (
    group_mean,
    group_zscore,
    leave_one_out,
    reinforce_plus_plus,
    reinforce_plus_plus_baseline,
)
from trainer_service.advantages.base import Estimator

ESTIMATORS: dict[str, Estimator] = {
    "leave_one_out": leave_one_out.advantages,
    "group_mean": group_mean.advantages,
    "group_zscore": group_zscore.advantages,
    "reinforce_plus_plus": reinforce_plus_plus.advantages,
    "reinforce_plus_plus_baseline": reinforce_plus_plus_baseline.advantages,
}

_NOTHING = 1e-9
"""Rewards are of order 1: what a float64 sum leaves of equal ones is far below this."""

__all__ = ["ESTIMATORS", "Estimator", "estimate"]


def estimate(name: str, outcomes: Sequence[float], group_ids: Sequence[Hashable]) -> torch.Tensor:
    """Advantage of each episode by the estimator `name`, from the rewards `R = 2y - 1`.

    Args:
        name: Of `ESTIMATORS`.
        outcomes: y of each episode, in [0, 1], `[E]`.
        group_ids: Group of each episode, `[E]`.

    Returns:
        `[E]` float32; exactly 0 where the estimator finds no difference.

    Raises:
        ValueError: An outcome outside [0, 1], or not one group id for each.
    """
    if len(outcomes) != len(group_ids):
        raise ValueError(f"{len(outcomes)} outcomes but {len(group_ids)} group ids")
    for outcome in outcomes:
        if not 0 <= outcome <= 1:
            raise ValueError(f"outcome {outcome}; allowed: [0, 1]")
    index = {group: number for number, group in enumerate(dict.fromkeys(group_ids))}
    groups = torch.tensor([index[group] for group in group_ids], dtype=torch.int64)
    rewards = 2 * torch.tensor(outcomes, dtype=torch.float64) - 1
    found = ESTIMATORS[name](rewards, groups)
    return torch.where(found.abs() < _NOTHING, 0.0, found).float()
