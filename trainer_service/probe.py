"""The probe of a version: what every replica that serves it must say of a few tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from trainer_service.policy import Policy
from trainer_service.ranks import Ranks


@dataclass(frozen=True, slots=True, kw_only=True)
class Probe:
    """What the leader sends followers in place of a share: a pass that all take part in."""

    token_ids: tuple[int, ...]


def probe_logprobs(policy: Policy, token_ids: Sequence[int], ranks: Ranks) -> tuple[float, ...]:
    """Log-probability of `token_ids[1:]` under the policy, at the leader.

    Args:
        policy: Where it is sharded, followers compute along.
        token_ids: At least two.
        ranks: Whose followers are in `follow_steps`.
    """
    if policy.is_sharded:
        ranks.scatter([Probe(token_ids=tuple(token_ids))] * ranks.size)
    with ranks.told():
        return policy.token_logprobs(token_ids)
