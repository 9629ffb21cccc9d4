"""What a sampled token is shaded by: how unlikely it was, or how far the trainer disagrees."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from harness_sdk.record import Node

MAX_STRIPES = 72
"""Stripes in one box; longer turns show their most surprising token of each stretch."""

# Nats at which the shade is full: a token of probability 0.25 % is as surprising as it gets.
_FULL_NATS = 6.0
# k3 at which the shade is full: ten times what a bf16 rollout is allowed (design.md section 12).
_FULL_KL = 4.45e-3


def token_shades(
    node: Node, policy_logprobs: Mapping[int, Sequence[float]] | None = None
) -> list[float | None]:
    """Shade of each token of `node`, from 0 (expected) to 1; None where it was not sampled.

    Args:
        node: A node of the record.
        policy_logprobs: The trainer's log-probabilities of each node's sampled tokens, by node
            id; shades are then their KL from the rollout's (k3 estimator).
    """
    trained = policy_logprobs.get(node.node_id) if policy_logprobs is not None else None
    if policy_logprobs is not None:
        values = [
            min(k3(ours, theirs) / _FULL_KL, 1.0)
            for ours, theirs in zip(node.sampled_logprobs, trained or (), strict=False)
        ]
    else:
        values = [min(max(-logprob, 0.0) / _FULL_NATS, 1.0) for logprob in node.sampled_logprobs]
    following = iter(values)
    return [next(following, None) if sampled else None for sampled in node.sampled]


def stripes(shades: Sequence[float | None]) -> list[tuple[float, float, float]]:
    """Neighbouring tokens as `(begin, end, shade)`, in fractions of the box; only sampled ones."""
    count = min(len(shades), MAX_STRIPES)
    found: list[tuple[float, float, float]] = []
    for index in range(count):
        begin, end = index * len(shades) // count, (index + 1) * len(shades) // count
        known = [shade for shade in shades[begin:end] if shade is not None]
        if known:
            found.append((begin / len(shades), end / len(shades), max(known)))
    return found


def k3(sampled_logprob: float, policy_logprob: float) -> float:
    """The k3 estimate of KL(rollout || trainer) from one token, in nats."""
    ratio = policy_logprob - sampled_logprob
    return math.exp(ratio) - 1.0 - ratio
