"""Merges rendered runs of one task into prefix trees (Tree Training, section 3.1).

Two paths share a token where everything before it is shared and their ids and loss flags agree.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from harness_sdk.trajectories.render import Flag, RenderedPath


@dataclass(slots=True, kw_only=True)
class TreeNode:
    """A run of tokens that the same paths go through."""

    token_ids: tuple[int, ...]
    flags: tuple[Flag, ...]
    """CONTEXT or SAMPLED, one for each token."""
    sampled_logprobs: tuple[float, ...]
    """Nats, one for each SAMPLED token."""
    step: int
    """Model turn of the path that brought the node."""
    path: int
    """Index, in the tree's paths, of the path that brought the node."""
    children: dict[tuple[int, Flag], TreeNode] = field(
        default_factory=dict[tuple[int, Flag], "TreeNode"]
    )
    """By first token and its flag."""
    ends: list[int] = field(default_factory=list[int])
    """Indices of the paths that end with this node."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefixTree:
    """Runs of one task from their common first token on."""

    task_id: str
    root: TreeNode
    paths: tuple[RenderedPath, ...]
    """Those that run through `root`, in the order in which they were merged."""

    def nodes(self) -> Iterator[tuple[TreeNode, TreeNode | None]]:
        """Each node with its parent, parents first."""
        stack: list[tuple[TreeNode, TreeNode | None]] = [(self.root, None)]
        while stack:
            node, parent = stack.pop()
            yield node, parent
            stack += [(child, node) for child in reversed(node.children.values())]

    @property
    def tokens_unique(self) -> int:
        """Tokens of the tree, each once."""
        return sum(len(node.token_ids) for node, _ in self.nodes())

    @property
    def tokens_flat(self) -> int:
        """Tokens of the paths, each path whole."""
        return sum(len(path.token_ids) for path in self.paths)

    @property
    def num_leaves(self) -> int:
        """Different paths that no other path continues."""
        return sum(not node.children for node, _ in self.nodes())

    @property
    def tokens_flat_distinct(self) -> int:
        """`tokens_flat` without paths that repeat another one or its beginning."""
        return sum(
            len(self.paths[node.ends[0]].token_ids) for node, _ in self.nodes() if not node.children
        )

    @property
    def overlap(self) -> float:
        """Potential overlap ratio: the share of `tokens_flat` that is redundant."""
        return overlap_ratio(self.tokens_unique, self.tokens_flat)


def overlap_ratio(tokens_unique: int, tokens_flat: int) -> float:
    """POR = 1 - N_tree / N_flat (Tree Training, section 4.1); 0.0 for nothing."""
    return 1.0 - tokens_unique / tokens_flat if tokens_flat else 0.0


def merge(paths: Sequence[RenderedPath]) -> list[PrefixTree]:
    """One tree for each task and first token, tasks in the order in which they appear."""
    by_task: dict[str, list[RenderedPath]] = {}
    for path in paths:
        by_task.setdefault(path.run.task_id, []).append(path)
    return [tree for task, group in by_task.items() for tree in _merge_task(task, group)]


def _merge_task(task_id: str, paths: Sequence[RenderedPath]) -> list[PrefixTree]:
    # Originals first: a copied reply takes the flag of the original that it meets.
    ordered = sorted(paths, key=lambda path: Flag.COPIED in path.flags)
    groups: dict[tuple[int, bool], list[RenderedPath]] = {}
    for path in ordered:
        begins = (path.token_ids[0], path.flags[0] is Flag.SAMPLED)
        groups.setdefault(begins, []).append(path)
    trees: list[PrefixTree] = []
    for group in groups.values():
        above = TreeNode(token_ids=(), flags=(), sampled_logprobs=(), step=0, path=0)
        for index, path in enumerate(group):
            _insert(above, path, index)
        trees += [
            PrefixTree(task_id=task_id, root=root, paths=tuple(group))
            for root in above.children.values()
        ]
    return trees


def _insert(above: TreeNode, path: RenderedPath, index: int) -> None:
    node, at = above, 0
    while at < len(path.token_ids):
        child = _child(node, path, at)
        if child is None:
            node = _append_rest(node, path, at, index)
            break
        shared = _num_shared(child, path, at)
        if shared < len(child.token_ids):
            child = _split(node, child, shared)
        node, at = child, at + shared
    node.ends.append(index)


def _child(node: TreeNode, path: RenderedPath, at: int) -> TreeNode | None:
    token_id, flag = path.token_ids[at], path.flags[at]
    if flag is not Flag.COPIED:
        return node.children.get((token_id, flag))
    sampled = node.children.get((token_id, Flag.SAMPLED))
    return sampled or node.children.get((token_id, Flag.CONTEXT))


def _num_shared(node: TreeNode, path: RenderedPath, at: int) -> int:
    count = 0
    for token_id, flag, its_id, its_flag in zip(
        node.token_ids, node.flags, path.token_ids[at:], path.flags[at:], strict=False
    ):
        if token_id != its_id or (flag is not its_flag and its_flag is not Flag.COPIED):
            break
        count += 1
    return count


def _split(parent: TreeNode, node: TreeNode, at: int) -> TreeNode:
    """Cut `node` before its token `at`; returns the new upper part."""
    num_sampled = node.flags[:at].count(Flag.SAMPLED)
    upper = TreeNode(
        token_ids=node.token_ids[:at],
        flags=node.flags[:at],
        sampled_logprobs=node.sampled_logprobs[:num_sampled],
        step=node.step,
        path=node.path,
    )
    node.token_ids, node.flags = node.token_ids[at:], node.flags[at:]
    node.sampled_logprobs = node.sampled_logprobs[num_sampled:]
    parent.children[upper.token_ids[0], upper.flags[0]] = upper
    upper.children[node.token_ids[0], node.flags[0]] = node
    return upper


def _append_rest(parent: TreeNode, path: RenderedPath, at: int, index: int) -> TreeNode:
    """One node for each piece of the path from `at` on; returns the last."""
    bounds = [*path.cuts, len(path.token_ids)]
    for piece, (begin, end) in enumerate(itertools.pairwise(bounds)):
        begin = max(begin, at)
        if begin >= end:
            continue
        before = path.flags[:begin].count(Flag.SAMPLED)
        within = path.flags[begin:end].count(Flag.SAMPLED)
        node = TreeNode(
            token_ids=path.token_ids[begin:end],
            flags=tuple(
                Flag.CONTEXT if flag is Flag.COPIED else flag for flag in path.flags[begin:end]
            ),
            sampled_logprobs=path.sampled_logprobs[before : before + within],
            step=path.steps[piece],
            path=index,
        )
        parent.children[node.token_ids[0], node.flags[0]] = node
        parent = node
    return parent
