"""Bytes of the stream to records that a step can be made of."""

from __future__ import annotations

import math

from harness_sdk.record import EpisodeRecord, Node, record_from_bytes
from harness_sdk.types import StopReason
from trainer_service.dag import pack_episodes
from trainer_service.origin import Origin

_MAX_VERSION = 2**62

# The rollout service samples within them: below, logits over temperature leave float32's precision.
_TEMPERATURES = (1e-3, 100.0)


def parse_record(data: bytes, origin: Origin) -> EpisodeRecord:
    """A record that a step can be made of.

    Args:
        data: From the stream.
        origin: What the run's records are made with.

    Raises:
        RefusedRecord: It was made with another tokenizer or template.
        ProtocolError: The bytes are no record.
        ValueError: They are one that makes no sense: nodes, tokens, log-probabilities, mounts,
            rewards, stop reason.
    """
    record = record_from_bytes(data)
    StopReason(record.stop_reason)
    if record.reward is not None and not 0.0 <= record.reward <= 1.0:
        raise ValueError(f"reward {record.reward}; allowed: [0, 1]")
    for node in record.nodes:
        _check_values(node)
    # An episode that failed before its first token is data too; it is dropped by its cause.
    if record.num_tokens:
        pack_episodes([record])
    origin.check(record)
    return record


def _check_values(node: Node) -> None:
    """Refuse what would end the step, and with it every later attempt at the same entry."""
    if min(node.token_ids, default=0) < 0:
        raise ValueError(f"token {min(node.token_ids)} in node {node.node_id}; allowed: from 0")
    numbers = (*node.sampled_logprobs, node.temperature)
    if node.temperature < 0 or not all(map(math.isfinite, numbers)):
        raise ValueError(f"log-probabilities or temperature of node {node.node_id} are not finite")
    low, high = _TEMPERATURES
    if node.temperature and not low <= node.temperature <= high:
        raise ValueError(
            f"temperature {node.temperature} of node {node.node_id}; allowed: 0, or {low} to {high}"
        )
    if node.policy_version > _MAX_VERSION:
        raise ValueError(f"policy version {node.policy_version}; allowed: up to {_MAX_VERSION}")
