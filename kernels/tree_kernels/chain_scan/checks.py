"""Checks of the arguments that both recurrences take for a piece of a tree."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from tree_kernels.layout import TreeLayout


def check_states(
    initial_states: torch.Tensor | None,
    end_nodes: Sequence[int],
    key: torch.Tensor,
    value: torch.Tensor,
    layout: TreeLayout,
) -> None:
    """Refuse states and nodes that are not those of `layout` and of these heads.

    Raises:
        ValueError: Names what does not fit.
    """
    wanted = (int((layout.parents < 0).sum()), value.shape[1], key.shape[2], value.shape[2])
    if initial_states is not None and initial_states.shape != wanted:
        raise ValueError(f"initial_states {tuple(initial_states.shape)}; allowed: {wanted}")
    known = range(layout.num_nodes)
    if len(set(end_nodes)) < len(end_nodes) or any(node not in known for node in end_nodes):
        raise ValueError(
            f"end_nodes {list(end_nodes)}; allowed: distinct, from 0 to {layout.num_nodes - 1}"
        )
