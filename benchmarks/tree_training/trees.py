"""Trees to train on: synthetic ones of a given overlap, node length or depth, and recorded ones."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from harness_sdk.record import EpisodeRecord, MountSpan, Node, NodeKind
from trainer_service.dag import pack_episodes
from trainer_service.strip import Strip

_VOCAB = 4096
_TRAJECTORIES = Path(__file__).parents[2] / "tests" / "data" / "trajectories"


@dataclass
class TreeWriter:
    """Nodes of one episode; every leaf ends in sampled tokens."""

    nodes: list[Node] = field(default_factory=list)
    rng: random.Random = field(default_factory=lambda: random.Random(0))

    def append(
        self,
        parent: int,
        length: int,
        *,
        num_sampled: int = 0,
        mounts: Sequence[tuple[int, int, int]] = (),
    ) -> int:
        """Add a node of `length` tokens, the last `num_sampled` of them sampled.

        Args:
            parent: Node id, -1 for the root.
            length: Tokens.
            num_sampled: Of them, from the end.
            mounts: (node, begin, end) that the node sees beside what its parent sees.
        """
        above = self.nodes[parent] if parent >= 0 else None
        spans = tuple(MountSpan(node_id=n, begin=b, end=e) for n, b, e in mounts)
        spans = (above.mounts if above else ()) + spans
        ends = [self.nodes[s.node_id].position_start + s.end for s in spans]
        own = above.position_start + len(above.token_ids) if above else 0
        self.nodes.append(
            Node(
                node_id=len(self.nodes),
                parent=parent,
                thread_id=str(len(self.nodes)),
                step=1,
                kind=NodeKind.TURN if num_sampled else NodeKind.CONTEXT,
                token_ids=tuple(self.rng.choices(range(_VOCAB), k=length)),
                sampled=(False,) * (length - num_sampled) + (True,) * num_sampled,
                sampled_logprobs=(-1.0,) * num_sampled,
                policy_version=0,
                position_start=max([own, *ends]),
                mounts=spans,
            )
        )
        return len(self.nodes) - 1

    def record(self, mount_layers: tuple[int, ...]) -> EpisodeRecord:
        """What was written, as one episode."""
        return EpisodeRecord(
            run="bench", episode_id="tree", group_id="", task_id="", replica_id="",
            nodes=tuple(self.nodes), threads=(), reward=1.0, answer="", stop_reason="done",
            opened_at_s=0.0, closed_at_s=0.0, mount_layers=mount_layers, model_hash="",
            tokenizer_hash="", template_hash="", engine="",
        )  # fmt: skip


def fork(num_paths: int, trunk: int, branch: int, num_sampled: int) -> TreeWriter:
    """A trunk and `num_paths` branches; `num_sampled` tokens of each are sampled."""
    writer = TreeWriter()
    root = writer.append(-1, trunk)
    for _ in range(num_paths):
        writer.append(root, branch, num_sampled=num_sampled)
    return writer


def overlapping(num_paths: int, path: int, overlap: float, num_sampled: int) -> TreeWriter:
    """`fork` of `num_paths` paths of `path` tokens each, with about this overlap ratio (POR)."""
    trunk = round(overlap * path * num_paths / (num_paths - 1))
    trunk = min(trunk, path - num_sampled - 1)
    return fork(num_paths, trunk, path - trunk, num_sampled)


def binary(node_length: int, levels: int) -> TreeWriter:
    """Every node but the leaves has two children; a tenth of a leaf is sampled."""
    writer = TreeWriter()
    level = [writer.append(-1, node_length)]
    for depth in range(1, levels):
        sampled = node_length // 10 if depth == levels - 1 else 0
        level = [
            writer.append(parent, node_length, num_sampled=sampled)
            for parent in level
            for _ in range(2)
        ]
    return writer


def comb(num_tokens: int, depth: int) -> TreeWriter:
    """A spine of `depth` nodes, from each of which one leaf forks; all nodes of equal length."""
    writer = TreeWriter()
    length = num_tokens // (2 * depth)
    above = -1
    for _ in range(depth):
        above = writer.append(above, length)
        writer.append(above, length, num_sampled=max(length // 10, 1))
    return writer


def octopus(num_tokens: int, *, branches: int = 10, mounts: int = 24) -> TreeWriter:
    """The shape of an Octopus episode: a trunk, branches of two depths, reads between branches.

    Half of the branches fork from the trunk, each of the others from the first part of one of
    them. Each branch is a chain of parts; before a part a branch may mount half of a part that a
    peer has finished. A tenth of every part is sampled.
    """
    writer = TreeWriter()
    trunk = num_tokens // 25
    parts = 1 + -(-mounts // branches)
    length = (num_tokens - trunk) // (branches * parts)
    root = writer.append(-1, trunk)
    finished: list[int] = []
    heads: list[int] = []
    for branch in range(branches):
        above = root if branch < branches // 2 else heads[branch - branches // 2]
        heads.append(writer.append(above, length, num_sampled=length // 10))
    for part in range(parts - 1):
        finished = list(heads)
        for branch in range(branches):
            peer = finished[(branch + 1) % branches]
            reads = part * branches + branch < mounts
            spans = [(peer, length // 4, 3 * length // 4)] if reads else []
            heads[branch] = writer.append(
                heads[branch], length, num_sampled=length // 10, mounts=spans
            )
    return writer


def without_mounts(record: EpisodeRecord) -> EpisodeRecord:
    """The same nodes and positions; none mounts anything."""
    return replace(record, nodes=tuple(replace(node, mounts=()) for node in record.nodes))


def paths(record: EpisodeRecord) -> list[EpisodeRecord]:
    """Every root-to-leaf path as an episode of its own, without mounts: the flattened form."""
    bare = without_mounts(record)
    inner = {node.parent for node in bare.nodes}
    found = []
    for leaf in bare.nodes:
        if leaf.node_id in inner:
            continue
        chain = [leaf]
        while chain[-1].parent >= 0:
            chain.append(bare.nodes[chain[-1].parent])
        nodes = [
            replace(node, node_id=index, parent=index - 1)
            for index, node in enumerate(reversed(chain))
        ]
        found.append(replace(bare, episode_id=f"path-{leaf.node_id}", nodes=tuple(nodes)))
    return found


def packed(records: Sequence[EpisodeRecord], max_tokens: int) -> list[Strip]:
    """Strips of at most `max_tokens` rows, a longer episode one of its own."""
    bins: list[list[EpisodeRecord]] = []
    room = -1
    for record in records:
        if not bins or record.num_tokens > room:
            bins.append([])
            room = max_tokens
        bins[-1].append(record)
        room -= record.num_tokens
    return [pack_episodes(each) for each in bins]


def recorded(max_tokens: int) -> list[tuple[str, EpisodeRecord]]:
    """The recorded runs of tests/data merged into prefix trees, each byte a token.

    Trees without a fork and trees above `max_tokens` are left out; the largest come first. None
    where the files are not at hand.
    """
    if not _TRAJECTORIES.is_dir():
        return []
    from harness_sdk.trajectories.episode_records import tree_to_record
    from harness_sdk.trajectories.formats import read_runs
    from harness_sdk.trajectories.merge import merge
    from harness_sdk.trajectories.render import render
    from harness_sdk.trajectories.tokenizers import load_tokenizer

    tokenizer = load_tokenizer(None)
    runs = read_runs([_TRAJECTORIES])
    trees = merge([path for run in runs for path in render(run, tokenizer)])
    trees = [t for t in trees if t.num_leaves > 1 and t.tokens_unique <= max_tokens]
    trees.sort(key=lambda tree: -tree.tokens_unique)
    return [(tree.task_id, tree_to_record(tree, tokenizer, run="bench")) for tree in trees]
