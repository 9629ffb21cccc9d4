"""Figures of a batch: rewards, staleness, and how large its trees and sequences are."""

from __future__ import annotations

from collections.abc import Sequence

from harness_sdk.measures import path_lengths
from harness_sdk.record import EpisodeRecord, NodeKind
from trainer_service.feed import Batch
from trainer_service.figures import StripFigures


def batch_figures(batch: Batch, version: int, *, compared: bool) -> dict[str, float]:
    """Of everything that came, computed or not.

    Args:
        batch: Of the step.
        version: Policy version that the step starts from.
        compared: Whether the objective compares the episodes of a group.
    """
    episodes = batch.episodes
    rewards = [episode.reward for episode in episodes]
    uniform = [len({episode.reward for episode in group.episodes}) == 1 for group in batch.groups]
    return {
        "reward/mean": sum(rewards) / len(rewards),
        "reward/min": min(rewards),
        "reward/max": max(rewards),
        "batch/episodes": float(len(episodes)),
        "batch/groups": float(len(batch.groups)),
        "batch/tasks": float(len({episode.record.task_id for episode in episodes})),
        "batch/replicas": float(len({episode.record.replica_id for episode in episodes})),
        "batch/uniform_groups": float(sum(uniform)) if compared else 0.0,
        **_lag_figures(batch, version),
        **_tree_figures([episode.record for episode in episodes]),
    }


def token_figures(batch: Batch, computed: StripFigures) -> dict[str, float]:
    """Of what was computed; `tokens/skipped` is what was not, for it taught nothing."""
    packed, flat = computed.num_tokens, computed.num_flat
    return {
        "tokens/packed": float(packed),
        "tokens/flat": float(flat),
        "tokens/packed_over_flat": packed / flat,
        "tokens/actions": float(computed.num_actions),
        "tokens/skipped": float(sum(e.record.num_tokens for e in batch.episodes) - packed),
    }


def _lag_figures(batch: Batch, version: int) -> dict[str, float]:
    """Versions between sampling and this step, by sampled token."""
    lags = [
        (version - node.policy_version, len(node.sampled_logprobs))
        for episode in batch.episodes
        for node in episode.record.nodes
        if node.kind != NodeKind.DEMONSTRATION and node.sampled_logprobs
    ]
    num_sampled = sum(count for _, count in lags)
    return {
        "policy/lag_mean": sum(lag * count for lag, count in lags) / max(num_sampled, 1),
        "policy/lag_max": float(max((lag for lag, _ in lags), default=0)),
    }


def _tree_figures(records: Sequence[EpisodeRecord]) -> dict[str, float]:
    """Mean and largest of each over the episodes; sequences are the root-to-leaf paths."""
    paths = [path_lengths(record) for record in records]
    values = {
        "tree/tokens": [record.num_tokens for record in records],
        "tree/sampled": [record.num_sampled for record in records],
        "tree/threads": [len(record.threads) for record in records],
        "tree/depth": [max((t.depth for t in record.threads), default=0) for record in records],
        "tree/paths": [len(own) for own in paths],
        "sequence/tokens": [length for own in paths for length in own],
    }
    found = {}
    for name, each in values.items():
        found[f"{name}_mean"] = sum(each) / max(len(each), 1)
        found[f"{name}_max"] = float(max(each, default=0))
    return found
