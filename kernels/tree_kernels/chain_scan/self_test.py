"""Whether the scan's kernels compute on this device what a recurrence's `naive.py` does."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch

from tree_kernels.chain_scan.scan import default_block_t
from tree_kernels.layout import TreeLayout
from tree_kernels.self_test import kernels_agree, with_gradients

Normal = Callable[..., torch.Tensor]
"""Random numbers of a shape."""
Recurrence = Callable[..., tuple[torch.Tensor, torch.Tensor]]
"""Outputs and the states behind `end_nodes`."""


def scan_works(
    what: str,
    device: torch.device,
    dtype: torch.dtype,
    state: tuple[int, int, int],
    inputs: Callable[[int, Normal], dict[str, torch.Tensor]],
    ours: Recurrence,
    naive: Recurrence,
) -> bool:
    """Whether forward and backward on a small tree agree; if not, a warning says why.

    Args:
        what: The recurrence, as the warning names it.
        device: Where the kernels run.
        dtype: Of the values.
        state: Heads, and rows and columns of the state of each.
        inputs: Makes those of so many rows; the initial states are added to them.
        ours: By the kernels.
        naive: In PyTorch.
    """
    block_t = default_block_t(dtype)
    layout = TreeLayout.build([-1, 0, 1, 0], [block_t + 1, 3, block_t, 5]).to(device)
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    def computed(recurrence: Recurrence) -> Recurrence:
        return partial(recurrence, layout=layout, end_nodes=(2,), chunk_size=None)

    given = {**inputs(layout.num_tokens, normal), "initial_states": normal(1, *state)}
    rounded = {name: each.to(device, dtype) for name, each in given.items()}
    exact = {name: each.float() for name, each in rounded.items()}
    heads, rows, columns = state
    return kernels_agree(
        what,
        f"{device}, {dtype}, {heads} heads of {rows} by {columns}",
        dtype,
        lambda: with_gradients(computed(ours), rounded),
        lambda: with_gradients(computed(naive), exact),
    )
