"""Checks of the gated delta rule's arguments, and the choice between PyTorch and Triton.

CUDA tensors run the Triton kernels where `self_test.py` finds them right; CPU tensors run
`naive.py`, and so does float64 everywhere.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from tree_kernels.chain_scan.checks import check_states
from tree_kernels.gated_delta_rule.naive import naive_tree_gated_delta_rule
from tree_kernels.layout import TreeLayout


def tree_gated_delta_rule(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    log_decay: torch.Tensor,
    beta: torch.Tensor,
    layout: TreeLayout,
    *,
    chunk_size: int | None = None,
) -> torch.Tensor:
    """Gated DeltaNet recurrence; each node starts from its parent's end state.

    Args:
        query: Normalised queries, `[T, HK, K]`; scaled by `K**-0.5` inside.
        key: Normalised keys, `[T, HK, K]`.
        value: Values, `[T, HV, V]`; HV is a multiple of HK.
        log_decay: Log of the state's decay, at most 0, `[T, HV]`.
        beta: Write strength in [0, 1], `[T, HV]`.
        layout: The tree; T rows. Mounts play no part.
        chunk_size: Rows per chunk; None chooses by device and the tree's runs. The kernels know
            16, 32 and 64.

    Returns:
        `[T, HV, V]` in `value`'s type; the state is float32, or float64 for float64 inputs.

    Raises:
        ValueError: Shapes that do not fit each other or the layout, or that the kernels don't know.
    """
    out, _ = tree_gated_delta_rule_with_states(
        query, key, value, log_decay, beta, layout, chunk_size=chunk_size
    )
    return out


def tree_gated_delta_rule_with_states(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    log_decay: torch.Tensor,
    beta: torch.Tensor,
    layout: TreeLayout,
    *,
    initial_states: torch.Tensor | None = None,
    end_nodes: Sequence[int] = (),
    chunk_size: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The same for a piece of a larger tree: states come in at its roots and leave behind nodes.

    Args:
        initial_states: State before each root in strip order, `[roots, HV, K, V]`; None is zeros.
        end_nodes: Distinct nodes whose end states the pieces below start from, E of them.

    Returns:
        The outputs, and the states behind `end_nodes`, `[E, HV, K, V]` in the state's type. All is
        differentiable: gradients of a piece below enter by the states that it started from.

    Raises:
        ValueError: As `tree_gated_delta_rule`; states or nodes that are not the layout's.
    """
    _check_inputs(query, key, value, log_decay, beta, layout.num_tokens)
    check_states(initial_states, end_nodes, key, value, layout)
    return _implementation(key, value)(
        query,
        key,
        value,
        log_decay,
        beta,
        layout,
        initial_states=initial_states,
        end_nodes=end_nodes,
        chunk_size=chunk_size,
    )


def _implementation(key: torch.Tensor, value: torch.Tensor) -> Callable[..., Any]:
    if value.device.type != "cuda" or value.dtype == torch.float64:
        return naive_tree_gated_delta_rule
    # Triton does not come with PyTorch's builds for the CPU.
    from tree_kernels.gated_delta_rule.function import chain_scan
    from tree_kernels.gated_delta_rule.self_test import kernels_work

    shape = (key.shape[1], value.shape[1], key.shape[2], value.shape[2])
    works = kernels_work(value.device, value.dtype, *shape)
    return chain_scan if works else naive_tree_gated_delta_rule


def _check_inputs(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    log_decay: torch.Tensor,
    beta: torch.Tensor,
    rows: int,
) -> None:
    if query.ndim != 3 or query.shape != key.shape or query.shape[0] != rows:
        raise ValueError(
            f"query {tuple(query.shape)} and key {tuple(key.shape)}; allowed: [{rows}, HK, K]"
        )
    if value.ndim != 3 or value.shape[0] != rows or value.shape[1] % key.shape[1]:
        raise ValueError(
            f"value {tuple(value.shape)}; allowed: [{rows}, a multiple of {key.shape[1]}, V]"
        )
    if log_decay.shape != value.shape[:2] or beta.shape != value.shape[:2]:
        raise ValueError(
            f"log_decay {tuple(log_decay.shape)} and beta {tuple(beta.shape)}; "
            f"allowed: {tuple(value.shape[:2])}"
        )
