"""Heavy-first depth-first order of a forest's nodes."""

from __future__ import annotations

from collections.abc import Sequence


def heavy_first_order(parents: Sequence[int], lengths: Sequence[int]) -> list[int]:
    """Order nodes so that the child with most leaves follows its parent at once.

    Ties go to the child with the longer path below it, then to the first one. The chain of a
    node, its heavy child and so on is then one interval of the strip, and the number of light
    edges on any path is at most log2 of the number of leaves.

    Args:
        parents: Parent of each node, -1 at a root; a parent precedes its children, `[N]`.
        lengths: Tokens of each node, `[N]`.

    Returns:
        Node ids in strip order, `[N]`.

    Raises:
        ValueError: The lists differ in length, or a parent does not precede its child.
    """
    if len(parents) != len(lengths):
        raise ValueError(f"{len(parents)} parents but {len(lengths)} lengths")
    children = _children(parents)
    num_leaves, below = _weights(children, lengths)
    order: list[int] = []
    stack = [node for node, parent in enumerate(parents) if parent < 0][::-1]
    while stack:
        node = stack.pop()
        order.append(node)
        heavy = max(children[node], key=lambda child: (num_leaves[child], below[child]), default=-1)
        stack.extend(child for child in reversed(children[node]) if child != heavy)
        if heavy >= 0:
            stack.append(heavy)
    return order


def _children(parents: Sequence[int]) -> list[list[int]]:
    children: list[list[int]] = [[] for _ in parents]
    for node, parent in enumerate(parents):
        if parent >= node:
            raise ValueError(f"parent {parent} of node {node} does not precede it")
        if parent >= 0:
            children[parent].append(node)
    return children


def _weights(children: list[list[int]], lengths: Sequence[int]) -> tuple[list[int], list[int]]:
    num_leaves = [0] * len(children)
    below = [0] * len(children)
    for node in reversed(range(len(children))):
        num_leaves[node] = sum(num_leaves[child] for child in children[node]) or 1
        below[node] = lengths[node] + max((below[child] for child in children[node]), default=0)
    return num_leaves, below
