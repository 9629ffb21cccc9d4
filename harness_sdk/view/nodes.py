"""A node of an episode as the pages read it: its facts, and its tokens, whole or a part of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from harness_sdk.record import Node
from harness_sdk.view.shading import token_shades
from harness_sdk.view.svg import KIND_NAMES

Detokenize = Callable[[Sequence[int]], str]


def node_facts(node: Node) -> dict[str, Any]:
    """Everything of `node` but its tokens."""
    return {
        "id": node.node_id,
        "parent": node.parent,
        "thread": node.thread_id,
        "step": node.step,
        "kind": KIND_NAMES[node.kind],
        "position": node.position_start,
        "version": node.policy_version,
        "temperature": node.temperature,
        "rewound": node.rewound,
        "mounts": [[mount.node_id, mount.begin, mount.end] for mount in node.mounts],
        "count": len(node.token_ids),
    }


def node_tokens(
    node: Node,
    detokenize: Detokenize | None,
    policy_logprobs: Mapping[int, Sequence[float]] | None = None,
) -> dict[str, list[Any] | None]:
    """Four lists of one length, each token's id, text, log-probability and shade.

    Args:
        node: A node of a record.
        detokenize: Turns token ids into text; without it `text` is None.
        policy_logprobs: The trainer's, by node id; shades then show the KL.
    """
    logprobs = iter(node.sampled_logprobs)
    return {
        "ids": list(node.token_ids),
        "text": text_pieces(node.token_ids, detokenize) if detokenize is not None else None,
        "logprobs": [
            round(next(logprobs, 0.0), 5) if sampled else None for sampled in node.sampled
        ],
        "shades": [
            None if shade is None else round(shade, 3)
            for shade in token_shades(node, policy_logprobs)
        ],
    }


def text_pieces(token_ids: Sequence[int], detokenize: Detokenize) -> list[str]:
    """Text of each token; a character made of several tokens stands with the last of them."""
    pieces: list[str] = []
    pending: list[int] = []
    for token_id in token_ids:
        pending.append(token_id)
        text = detokenize(pending)
        # A character has at most four bytes: longer runs of broken ones are broken for good.
        if text.endswith("\ufffd") and len(pending) < 4:
            pieces.append("")
            continue
        pieces.append(text)
        pending = []
    if pending:
        pieces[-1] = detokenize(pending)
    return pieces
