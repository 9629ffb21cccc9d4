"""Recorded episodes as arrays over their packed tokens, padded and saved."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from benchmarks.pretrain_demo.dataset import COPIED, GUESSED, WRITTEN
from harness_sdk.record import EpisodeRecord, Node

MAX_PATHS = 4
"""Leaves of an episode."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Number:
    """A number of an episode: the ids of its digits, and whether it is invented when sampled."""

    digit_ids: tuple[int, ...]
    guessed: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Strip:
    """One episode as arrays over its T tokens; `N` nodes, `P` paths of at most L tokens."""

    token_ids: np.ndarray
    position_ids: np.ndarray
    before: np.ndarray
    """Row that predicts each token; 0 at the root."""
    role: np.ndarray
    """0, or one of COPIED, GUESSED, WRITTEN for a sampled token."""
    slot: np.ndarray
    """Which of the episode's random digits the token is; -1 for none."""
    node: np.ndarray
    """Node of each token."""
    node_sees: np.ndarray
    """Tokens visible to a whole node beside itself, `[N, T]` bool."""
    paths: tuple[np.ndarray, ...]
    """Rows of each path, root first."""


def strip_from_record(record: EpisodeRecord, numbers: Sequence[Number]) -> Strip:
    """Lay a record out.

    Raises:
        ValueError: The episode has more than `MAX_PATHS` leaves.
    """
    index = {node.node_id: i for i, node in enumerate(record.nodes)}
    sizes = [len(node.token_ids) for node in record.nodes]
    starts = np.concatenate([[0], np.cumsum(sizes)])
    token_ids = np.concatenate([np.array(n.token_ids) for n in record.nodes])
    sees = np.zeros((len(record.nodes), len(token_ids)), bool)
    before, positions, sampled = [], [], []
    for i, node in enumerate(record.nodes):
        rows = np.arange(starts[i], starts[i + 1])
        first = starts[index[node.parent] + 1] - 1 if node.parent >= 0 else 0
        before.append(np.concatenate([[first], rows[:-1]]))
        positions.append(node.position_start + np.arange(sizes[i]))
        sampled += node.sampled
        if node.parent >= 0:
            parent = index[node.parent]
            sees[i] = sees[parent]
            sees[i, starts[parent] : starts[parent + 1]] = True
        for mount in node.mounts:
            begin = starts[index[mount.node_id]]
            sees[i, begin + mount.begin : begin + mount.end] = True
    role, slot = _label(token_ids, np.array(sampled), numbers)
    return Strip(
        token_ids=token_ids,
        position_ids=np.concatenate(positions),
        before=np.concatenate(before),
        role=role,
        slot=slot,
        node=np.repeat(np.arange(len(sizes)), sizes),
        node_sees=sees,
        paths=_paths(record.nodes, index, starts),
    )


def _paths(
    nodes: Sequence[Node], index: Mapping[int, int], starts: np.ndarray
) -> tuple[np.ndarray, ...]:
    parents = {node.parent for node in nodes}
    by_id = {node.node_id: node for node in nodes}
    paths = []
    for leaf in nodes:
        if leaf.node_id in parents:
            continue
        chain = []
        node: Node | None = leaf
        while node is not None:
            i = index[node.node_id]
            chain.append(np.arange(starts[i], starts[i + 1]))
            node = by_id.get(node.parent)
        paths.append(np.concatenate(chain[::-1]))
    if len(paths) > MAX_PATHS:
        raise ValueError(f"{len(paths)} leaves, at most {MAX_PATHS}")
    return tuple(paths)


def _label(
    token_ids: np.ndarray, sampled: np.ndarray, numbers: Sequence[Number]
) -> tuple[np.ndarray, np.ndarray]:
    slot = np.full(len(token_ids), -1)
    role = np.where(sampled, WRITTEN, 0)
    base = 0
    for number in numbers:
        width = len(number.digit_ids)
        for at in range(len(token_ids) - width + 1):
            rows = slice(at, at + width)
            if tuple(token_ids[rows]) == number.digit_ids:
                slot[rows] = base + np.arange(width)
                role[rows] = np.where(sampled[rows], GUESSED if number.guessed else COPIED, 0)
        base += width
    return role, slot


def save_strips(file: Path, strips: Sequence[Strip], digit_ids: Sequence[int]) -> None:
    """Write `strips` padded to common sizes."""
    tokens = max(len(s.token_ids) for s in strips)
    tokens += -tokens % 8
    nodes = max(len(s.node_sees) for s in strips)
    length = max(len(p) for s in strips for p in s.paths)
    arrays: dict[str, np.ndarray] = {"digit_ids": np.array(digit_ids)}
    for name in ("token_ids", "position_ids", "before", "role", "slot", "node"):
        fill = -1 if name == "slot" else 0
        rows = [
            np.pad(getattr(s, name), (0, tokens - len(s.token_ids)), constant_values=fill)
            for s in strips
        ]
        arrays[name] = np.stack(rows).astype(np.int16)
    sees = np.zeros((len(strips), nodes, tokens), bool)
    paths = np.zeros((len(strips), MAX_PATHS, length), np.int16)
    path_slot = np.zeros((len(strips), tokens), np.int16)
    for i, strip in enumerate(strips):
        sees[i, : len(strip.node_sees), : strip.node_sees.shape[1]] = strip.node_sees
        for j, path in enumerate(strip.paths):
            paths[i, j, : len(path)] = path
            path_slot[i, path] = j * length + np.arange(len(path))
    arrays |= {"paths": paths, "path_slot": path_slot, "node_sees": np.packbits(sees, axis=-1)}
    # Numbers alone; older numpy takes `allow_pickle` for the name of one of them.
    np.savez_compressed(file, **arrays)  # pyright: ignore[reportArgumentType]
