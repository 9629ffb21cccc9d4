"""Episode records to the packed strip: runs ordered heavy-first, mounts and actions resolved."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from harness_sdk.errors import ConfigError, InvalidRequest
from harness_sdk.record import EpisodeRecord, MountSpan, Node, NodeKind
from trainer_service.runs import TokenRun, append_runs
from trainer_service.strip import Strip, StripNode
from tree_kernels.layout import TreeLayout, heavy_first_order


def pack_episodes(records: Sequence[EpisodeRecord]) -> Strip:
    """Pack episodes into one strip, each token once.

    Args:
        records: Episodes; their order numbers the strip's episodes.

    Returns:
        The strip, on the CPU.

    Raises:
        InvalidRequest: No record, one without tokens, or one whose nodes or mounts do not add up.
        ConfigError: The records' mount layers differ.
    """
    if not records:
        raise InvalidRequest("nothing to pack", value="0 episodes", limit="1 and more")
    runs: list[TokenRun] = []
    for episode, record in enumerate(records):
        append_runs(record, episode, runs)
    return _pack_runs(runs, len(records), _mount_layers(records))


def flat_episode(token_ids: Sequence[int]) -> Strip:
    """One path without mounts, every token but the first an action.

    Raises:
        InvalidRequest: Fewer than two tokens.
    """
    count = len(token_ids) - 1
    if count < 1:
        raise InvalidRequest(
            "nothing to predict", value=f"{len(token_ids)} tokens", limit="2 and more"
        )
    node = Node(
        node_id=0,
        parent=-1,
        thread_id="",
        step=0,
        kind=NodeKind.TURN,
        token_ids=tuple(token_ids),
        sampled=(False,) + (True,) * count,
        sampled_logprobs=(0.0,) * count,
        policy_version=0,
        position_start=0,
    )
    return _pack_runs([TokenRun(episode=0, parent=-1, mounts=(), parts=[node])], 1, None)


def _mount_layers(records: Sequence[EpisodeRecord]) -> tuple[int, ...] | None:
    """The layers that records with mounts agree on; None without mounts."""
    found = {record.mount_layers for record in records if any(node.mounts for node in record.nodes)}
    if len(found) > 1:
        raise ConfigError(
            "episodes with different mount layers in one strip",
            value=sorted(found),
            limit="one set of layers",
            remedy="give all replicas the same mount layers",
        )
    return found.pop() if found else None


def _pack_runs(
    runs: Sequence[TokenRun], num_episodes: int, mount_layers: tuple[int, ...] | None
) -> Strip:
    order = heavy_first_order([run.parent for run in runs], [run.num_tokens for run in runs])
    ordered = [runs[index] for index in order]
    nodes = _strip_nodes(ordered, {run: index for index, run in enumerate(order)})
    mounts = _mounted_rows(ordered, nodes)
    layout = TreeLayout.build(
        [node.parent for node in nodes], [node.length for node in nodes], mounts
    )
    rows = _rows(ordered)
    leaf_begin, leaf_end = _leaf_ranges(layout)
    is_leaf = ~np.isin(np.arange(len(nodes)), layout.parents)
    episodes = np.array([node.episode for node in nodes])
    path_episode = episodes[is_leaf]
    lengths = np.diff(layout.cu_seqlens)
    return Strip(
        token_ids=torch.from_numpy(rows.token_ids),
        position_ids=torch.from_numpy(rows.position_ids),
        nodes=nodes,
        layout=layout,
        mount_layers=mount_layers,
        path_episode=torch.from_numpy(path_episode),
        num_paths=torch.from_numpy(np.bincount(path_episode, minlength=num_episodes)),
        tokens_flat=int((lengths * (leaf_end - leaf_begin)).sum()),
        **_actions(rows, layout, episodes, leaf_begin, leaf_end, num_episodes),
    )


def _strip_nodes(ordered: Sequence[TokenRun], place: dict[int, int]) -> tuple[StripNode, ...]:
    nodes = []
    start = 0
    for run in ordered:
        nodes.append(
            StripNode(
                episode=run.episode,
                parent=place[run.parent] if run.parent >= 0 else -1,
                start=start,
                length=run.num_tokens,
                record_nodes=tuple(part.node_id for part in run.parts),
            )
        )
        start += run.num_tokens
    return tuple(nodes)


def _mounted_rows(
    ordered: Sequence[TokenRun], nodes: Sequence[StripNode]
) -> list[list[tuple[int, int]]]:
    """Key rows of each node's mounts."""
    first_row: dict[tuple[int, int], int] = {}
    for run, node in zip(ordered, nodes, strict=True):
        row = node.start
        for part in run.parts:
            first_row[run.episode, part.node_id] = row
            row += len(part.token_ids)

    def resolve(run: TokenRun, span: MountSpan) -> tuple[int, int]:
        row = first_row[run.episode, span.node_id]
        return row + span.begin, row + span.end

    return [[resolve(run, span) for span in run.mounts] for run in ordered]


@dataclass(slots=True, kw_only=True, eq=False)
class _Rows:
    """What the record says of each row, `[T]` each."""

    token_ids: np.ndarray
    position_ids: np.ndarray
    node: np.ndarray
    sampled: np.ndarray
    sampled_logprobs: np.ndarray
    temperature: np.ndarray
    policy_version: np.ndarray
    is_demonstration: np.ndarray


def _rows(ordered: Sequence[TokenRun]) -> _Rows:
    parts = [part for run in ordered for part in run.parts]
    lengths = np.array([len(part.token_ids) for part in parts])
    starts = np.cumsum(lengths) - lengths
    total = int(lengths.sum())

    def spread(values: Sequence[Any], dtype: Any) -> np.ndarray:
        return np.repeat(np.array(values, dtype=dtype), lengths)

    sampled = np.fromiter((flag for part in parts for flag in part.sampled), bool, total)
    logprobs = np.zeros(total, dtype=np.float32)
    logprobs[sampled] = [value for part in parts for value in part.sampled_logprobs]
    node = np.repeat(np.arange(len(ordered)), [len(run.parts) for run in ordered])
    return _Rows(
        token_ids=np.fromiter((token for part in parts for token in part.token_ids), int, total),
        position_ids=np.arange(total)
        + np.repeat([part.position_start for part in parts] - starts, lengths),
        node=np.repeat(node, lengths),
        sampled=sampled,
        sampled_logprobs=logprobs,
        temperature=spread([part.temperature for part in parts], np.float64),
        policy_version=spread([part.policy_version for part in parts], np.int64),
        is_demonstration=spread([part.kind == NodeKind.DEMONSTRATION for part in parts], bool),
    )


def _leaf_ranges(layout: TreeLayout) -> tuple[np.ndarray, np.ndarray]:
    """First leaf below each node and the end of its leaves, `[N]` each, in strip order."""
    is_leaf = ~np.isin(np.arange(layout.num_nodes), layout.parents)
    leaves_before = np.concatenate([[0], np.cumsum(is_leaf)])
    last_node = np.searchsorted(layout.cu_seqlens, layout.exits)
    return leaves_before[:-1], leaves_before[last_node]


def _actions(
    rows: _Rows,
    layout: TreeLayout,
    episodes: np.ndarray,
    leaf_begin: np.ndarray,
    leaf_end: np.ndarray,
    num_episodes: int,
) -> dict[str, torch.Tensor]:
    """The strip's action fields: sampled rows that have a row before them on their path."""
    source = layout.row_parents()
    actions = np.flatnonzero(rows.sampled & (source >= 0))
    node = rows.node[actions]
    by_policy = ~rows.is_demonstration[actions]
    fields = {
        "action_source": source[actions],
        "action_target": rows.token_ids[actions],
        "action_row": actions,
        "action_episode": episodes[node],
        "sampled_logprobs": rows.sampled_logprobs[actions],
        "temperature": rows.temperature[actions],
        "policy_version": rows.policy_version[actions],
        "is_demonstration": ~by_policy,
        "leaf_begin": leaf_begin[node],
        "leaf_counts": (leaf_end - leaf_begin)[node],
        "num_actions": np.bincount(episodes[node][by_policy], minlength=num_episodes),
    }
    return {name: torch.from_numpy(values) for name, values in fields.items()}
