"""Maximal token runs: a record's nodes checked, and merged where nothing separates them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

from harness_sdk.errors import InvalidRequest
from harness_sdk.record import EpisodeRecord, MountSpan, Node


@dataclass(slots=True, kw_only=True, eq=False)
class TokenRun:
    """Record nodes with one parent and one mount set, one after the other."""

    episode: int
    parent: int
    """Index of the parent run, -1 at a root."""
    mounts: tuple[MountSpan, ...]
    """Sorted, without overlap or adjacent pieces."""
    parts: list[Node] = field(default_factory=list)

    @property
    def num_tokens(self) -> int:
        """Tokens of all parts."""
        return sum(len(part.token_ids) for part in self.parts)


def append_runs(record: EpisodeRecord, episode: int, runs: list[TokenRun]) -> None:
    """Append the record's runs to `runs`, parents first.

    A node joins its parent's run if it is the only child and sees the same mounts. A node
    without tokens stands for its parent.

    Raises:
        InvalidRequest: The record holds no token, or a node or mount that does not add up.
    """
    stands_for = _check_nodes(record)
    with_tokens = [node for node in record.nodes if node.token_ids]
    num_children = Counter(stands_for[node.parent] for node in with_tokens)
    run_of = {-1: -1}
    for node in with_tokens:
        parent = stands_for[node.parent]
        above = run_of[parent]
        mounts = _canonical(record, node, run_of)
        if above >= 0 and num_children[parent] == 1 and runs[above].mounts == mounts:
            runs[above].parts.append(node)
            run_of[node.node_id] = above
        else:
            run_of[node.node_id] = len(runs)
            runs.append(TokenRun(episode=episode, parent=above, mounts=mounts, parts=[node]))
    if not with_tokens:
        raise InvalidRequest(
            "episode record without tokens",
            value=f"{len(record.nodes)} nodes",
            limit="1 token and more",
            episode_id=record.episode_id,
        )


def _check_nodes(record: EpisodeRecord) -> dict[int, int]:
    """For each node id (and -1) the nearest node with tokens on its path, itself included."""
    stands_for = {-1: -1}
    for node in record.nodes:
        if node.node_id in stands_for or node.parent not in stands_for:
            raise InvalidRequest(
                f"node {node.node_id} of an episode record repeats or precedes its parent",
                value=f"parent {node.parent}",
                limit="-1 or an earlier node",
                episode_id=record.episode_id,
            )
        num_sampled = sum(node.sampled)
        if len(node.sampled) != len(node.token_ids) or num_sampled != len(node.sampled_logprobs):
            raise InvalidRequest(
                f"node {node.node_id} of an episode record does not add up",
                value=f"{len(node.token_ids)} tokens, {len(node.sampled)} flags, {num_sampled} "
                f"sampled, {len(node.sampled_logprobs)} log-probabilities",
                limit="a flag per token, a log-probability per sampled token",
                episode_id=record.episode_id,
            )
        stands_for[node.node_id] = node.node_id if node.token_ids else stands_for[node.parent]
    return stands_for


def _canonical(
    record: EpisodeRecord, node: Node, run_of: Mapping[int, int]
) -> tuple[MountSpan, ...]:
    merged: list[MountSpan] = []
    spans = [span for span in node.mounts if span.begin != span.end]
    if not spans:
        return ()
    lengths = {each.node_id: len(each.token_ids) for each in record.nodes}
    for span in sorted(spans, key=lambda span: (span.node_id, span.begin)):
        if span.node_id not in run_of or not 0 <= span.begin < span.end <= lengths[span.node_id]:
            raise InvalidRequest(
                f"node {node.node_id} of an episode record mounts what does not precede it",
                value=f"tokens [{span.begin}, {span.end}) of node {span.node_id}",
                limit=f"[0, {lengths.get(span.node_id, 0)}) of an earlier node",
                episode_id=record.episode_id,
            )
        if merged and merged[-1].node_id == span.node_id and merged[-1].end >= span.begin:
            last = merged.pop()
            span = MountSpan(node_id=last.node_id, begin=last.begin, end=max(last.end, span.end))
        merged.append(span)
    return tuple(merged)
