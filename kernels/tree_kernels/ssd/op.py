"""Checks of the SSD arguments; the computation is `naive.py`'s."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from tree_kernels.layout import TreeLayout
from tree_kernels.ssd.naive import naive_tree_ssd


def tree_ssd(
    x: torch.Tensor,
    dt: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    c: torch.Tensor,
    d: torch.Tensor | None,
    layout: TreeLayout,
    *,
    chunk_size: int | None = None,
) -> torch.Tensor:
    """Mamba-2 recurrence; each node starts from its parent's end state.

    Args:
        x: Inputs, `[T, H, P]`.
        dt: Step sizes after softplus and clamp, `[T, H]`.
        a: Continuous decay, negative, `[H]`.
        b: Input maps, `[T, G, N]`; H is a multiple of the number of groups G.
        c: Output maps, `[T, G, N]`.
        d: Skip weights, `[H]`, or None.
        layout: The tree; T rows. Mounts play no part.
        chunk_size: Rows per chunk; None chooses by the tree's runs.

    Returns:
        `[T, H, P]` in `x`'s type; the state is float32, or float64 for float64 inputs.

    Raises:
        ValueError: Shapes that do not fit each other or the layout.
    """
    return tree_ssd_with_states(x, dt, a, b, c, d, layout, chunk_size=chunk_size)[0]


def tree_ssd_with_states(
    x: torch.Tensor,
    dt: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    c: torch.Tensor,
    d: torch.Tensor | None,
    layout: TreeLayout,
    *,
    initial_states: torch.Tensor | None = None,
    end_nodes: Sequence[int] = (),
    chunk_size: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The same for a piece of a larger tree: states come in at its roots and leave behind nodes.

    Args:
        x, dt, a, b, c, d, layout, chunk_size: As `tree_ssd`.
        initial_states: State before each root in strip order, `[roots, H, N, P]`; None is zeros.
        end_nodes: Nodes whose end states the pieces below start from, E of them.

    Returns:
        The outputs, and the states behind `end_nodes`, `[E, H, N, P]` in the state's type; all is
        differentiable.

    Raises:
        ValueError: As `tree_ssd`; initial states that are not the layout's.
    """
    rows = layout.num_tokens
    if x.ndim != 3 or x.shape[0] != rows or dt.shape != x.shape[:2]:
        raise ValueError(
            f"x {tuple(x.shape)} and dt {tuple(dt.shape)}; allowed: [{rows}, H, P] and [{rows}, H]"
        )
    if b.shape != c.shape or b.ndim != 3 or b.shape[0] != rows or x.shape[1] % b.shape[1]:
        raise ValueError(
            f"b {tuple(b.shape)} and c {tuple(c.shape)}; "
            f"allowed: equal, [{rows}, a divisor of {x.shape[1]}, N]"
        )
    if a.shape != x.shape[1:2]:
        raise ValueError(f"a {tuple(a.shape)}; allowed: [{x.shape[1]}]")
    wanted = (int((layout.parents < 0).sum()), x.shape[1], b.shape[2], x.shape[2])
    if initial_states is not None and initial_states.shape != wanted:
        raise ValueError(f"initial_states {tuple(initial_states.shape)}; allowed: {wanted}")
    return naive_tree_ssd(
        x,
        dt,
        a,
        b,
        c,
        d,
        layout,
        initial_states=initial_states,
        end_nodes=end_nodes,
        chunk_size=chunk_size,
    )
