"""Checks of the SSD arguments, and the choice between PyTorch and Triton.

CUDA tensors run the Triton kernels where `self_test.py` finds them right; CPU tensors run
`naive.py`, and so does float64 everywhere.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from tree_kernels.chain_scan.checks import check_states
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
        chunk_size: Rows per chunk; None chooses by device and the tree's runs. The kernels know
            16, 32 and 64.

    Returns:
        `[T, H, P]` in `x`'s type; the state is float32, or float64 for float64 inputs.

    Raises:
        ValueError: Shapes that do not fit each other or the layout, or that the kernels don't know.
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
        end_nodes: Distinct nodes whose end states the pieces below start from, E of them.

    Returns:
        The outputs, and the states behind `end_nodes`, `[E, H, N, P]` in the state's type; all is
        differentiable.

    Raises:
        ValueError: As `tree_ssd`; states or nodes that are not the layout's.
    """
    _check_inputs(x, dt, a, b, c, d, layout.num_tokens)
    check_states(initial_states, end_nodes, b, x, layout)
    return _implementation(b, x)(
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


def _implementation(b: torch.Tensor, x: torch.Tensor) -> Callable[..., Any]:
    if x.device.type != "cuda" or x.dtype == torch.float64:
        return naive_tree_ssd
    # Triton does not come with PyTorch's builds for the CPU.
    from tree_kernels.ssd.function import chain_ssd
    from tree_kernels.ssd.self_test import kernels_work

    works = kernels_work(x.device, x.dtype, b.shape[1], x.shape[1], b.shape[2], x.shape[2])
    return chain_ssd if works else naive_tree_ssd


def _check_inputs(
    x: torch.Tensor,
    dt: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    c: torch.Tensor,
    d: torch.Tensor | None,
    rows: int,
) -> None:
    if x.ndim != 3 or x.shape[0] != rows or dt.shape != x.shape[:2]:
        raise ValueError(
            f"x {tuple(x.shape)} and dt {tuple(dt.shape)}; allowed: [{rows}, H, P] and [{rows}, H]"
        )
    if b.shape != c.shape or b.ndim != 3 or b.shape[0] != rows or x.shape[1] % b.shape[1]:
        raise ValueError(
            f"b {tuple(b.shape)} and c {tuple(c.shape)}; "
            f"allowed: equal, [{rows}, a divisor of {x.shape[1]}, N]"
        )
    if a.shape != x.shape[1:2] or (d is not None and d.shape != a.shape):
        raise ValueError(
            f"a {tuple(a.shape)} and d {None if d is None else tuple(d.shape)}; "
            f"allowed: [{x.shape[1]}]"
        )
