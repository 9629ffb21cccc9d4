"""Advantages of episodes from their outcomes, one small function an estimator."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence

import torch


def leave_one_out(outcomes: Sequence[float], group_ids: Sequence[Hashable]) -> torch.Tensor:
    """RLOO, Octopus Eq. 5: `R = 2y - 1` minus the mean of the group's other rewards, no std.

    Args:
        outcomes: y of each episode, in [0, 1], `[E]`.
        group_ids: Group of each episode, `[E]`.

    Returns:
        `[E]` float32; 0 for an episode that is alone in its group.
    """
    rewards, others, sizes = _group_sums(outcomes, group_ids)
    baseline = others / (sizes - 1).clamp(min=1)
    return torch.where(sizes > 1, rewards - baseline, 0.0).float()


def group_mean(outcomes: Sequence[float], group_ids: Sequence[Hashable]) -> torch.Tensor:
    """`R = 2y - 1` minus the group's mean, its own reward included, `[E]` float32."""
    rewards, others, sizes = _group_sums(outcomes, group_ids)
    return (rewards - (others + rewards) / sizes).float()


ESTIMATORS: dict[str, Callable[[Sequence[float], Sequence[Hashable]], torch.Tensor]] = {
    "leave_one_out": leave_one_out,
    "group_mean": group_mean,
}


def _group_sums(
    outcomes: Sequence[float], group_ids: Sequence[Hashable]
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Reward, sum of the group's other rewards and size of the group, `[E]` float64 each."""
    if len(outcomes) != len(group_ids):
        raise ValueError(f"{len(outcomes)} outcomes but {len(group_ids)} group ids")
    for outcome in outcomes:
        if not 0 <= outcome <= 1:
            raise ValueError(f"outcome {outcome}; allowed: [0, 1]")
    index = {group: number for number, group in enumerate(dict.fromkeys(group_ids))}
    groups = torch.tensor([index[group] for group in group_ids], dtype=torch.int64)
    rewards = 2 * torch.tensor(outcomes, dtype=torch.float64) - 1
    sums = torch.zeros(len(index), dtype=torch.float64).index_add_(0, groups, rewards)
    sizes = torch.bincount(groups, minlength=len(index)).double()
    return rewards, sums[groups] - rewards, sizes[groups]
