"""A step's episodes divided among ranks, and each rank's into strips."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from harness_sdk.measures import episode_flops
from harness_sdk.model_cost import ModelCost
from harness_sdk.record import EpisodeRecord
from trainer_service.advantages import estimate
from trainer_service.config import TrainerConfig
from trainer_service.feed import Batch


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Share:
    """What one rank computes of a step."""

    version: int
    """Policy version that the step starts from."""
    records: tuple[EpisodeRecord, ...]
    """None where there are more ranks than episodes."""
    advantages: torch.Tensor
    """Of the records, `[E]`."""
    teaches: bool
    """False: a look at how far the policy is from the one that sampled, without gradient."""
    num_episodes: int
    """Of the whole step, whatever is computed of it and wherever."""


def divide(
    batch: Batch,
    config: TrainerConfig,
    *,
    version: int,
    num_ranks: int = 1,
    cost: ModelCost | None = None,
) -> list[Share]:
    """The share of each rank: episodes whole, groups that teach nothing left out.

    Where no group teaches, the first rank looks at a strip of them: a run that has learned its
    tasks reports its divergence too.

    Args:
        batch: Of the step.
        config: Of the service.
        version: Policy version that the step starts from.
        num_ranks: How many there are.
        cost: What a token costs the model, to balance them; None counts tokens.
    """
    episodes = batch.episodes
    advantages = _advantages(batch, config)
    teaching = _teaching(batch, advantages, config)
    teaches = any(teaching)
    places = [place for place, own in enumerate(teaching) if own == teaches]
    if not teaches:
        sizes = [episodes[place].record.num_tokens for place in places]
        places = places[: len(split_episodes(sizes, config.batch.max_strip_tokens)[0])]
    costs = [_cost(episodes[place].record, cost) for place in places]
    return [
        Share(
            version=version,
            records=tuple(episodes[places[index]].record for index in chosen),
            advantages=advantages[[places[index] for index in chosen]],
            teaches=teaches,
            num_episodes=len(episodes),
        )
        for chosen in balance(costs, num_ranks)
    ]


def balance(costs: Sequence[float], num_ranks: int) -> list[list[int]]:
    """Indices of each rank, in order: the longest first, each to the rank with the least so far.

    The busiest rank gets at most 4/3 of what the best division would give it (Graham 1969).

    Example:
        `balance([1, 5, 3, 3], 2)` is `[[0, 1], [2, 3]]`.
    """
    heap = [(0.0, rank) for rank in range(num_ranks)]
    ranks: list[list[int]] = [[] for _ in range(num_ranks)]
    for index in sorted(range(len(costs)), key=lambda index: -costs[index]):
        load, rank = heapq.heappop(heap)
        ranks[rank].append(index)
        heapq.heappush(heap, (load + costs[index], rank))
    return [sorted(own) for own in ranks]


def split_episodes(num_tokens: Sequence[int], max_strip_tokens: int) -> list[list[int]]:
    """Indices of the episodes of each strip, in order, none cut.

    Example:
        `split_episodes([60, 30, 20, 150, 10], 100)` is `[[0, 1], [2], [3], [4]]`.
    """
    strips: list[list[int]] = []
    room = -1
    for index, size in enumerate(num_tokens):
        if not strips or size > room:
            strips.append([])
            room = max_strip_tokens
        strips[-1].append(index)
        room -= size
    return strips


def _cost(record: EpisodeRecord, cost: ModelCost | None) -> float:
    return float(record.num_tokens) if cost is None else episode_flops(record, cost)


def _teaching(batch: Batch, advantages: torch.Tensor, config: TrainerConfig) -> list[bool]:
    """Whether each episode's group adds to the gradient: without another term, none does whose
    advantages are all 0."""
    if not config.needs_groups or config.loss.kl_coef or config.loss.entropy_coef:
        return [True] * len(batch.episodes)
    sizes = [len(group.episodes) for group in batch.groups]
    return [bool(own.any()) for own in advantages.split(sizes) for _ in own]


def _advantages(batch: Batch, config: TrainerConfig) -> torch.Tensor:
    """Of each episode, `[E]`; zeros where the objective compares none."""
    episodes = batch.episodes
    if not config.needs_groups:
        return torch.zeros(len(episodes))
    group_ids = [group.group_id for group in batch.groups for _ in group.episodes]
    outcomes = [episode.reward for episode in episodes]
    return estimate(config.batch.advantages, outcomes, group_ids)
