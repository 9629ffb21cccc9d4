"""Whether this device's Triton kernels compute what `naive.py` does, tried once for each shape."""

from __future__ import annotations

import functools
from collections.abc import Callable
from functools import partial

import torch

from tree_kernels.chain_scan import default_block_t
from tree_kernels.layout import TreeLayout
from tree_kernels.self_test import kernels_agree, with_gradients
from tree_kernels.ssd.function import chain_ssd
from tree_kernels.ssd.naive import naive_tree_ssd


@functools.cache
def kernels_work(
    device: torch.device,
    dtype: torch.dtype,
    groups: int,
    heads: int,
    state_dim: int,
    head_dim: int,
) -> bool:
    """Whether forward and backward on a small tree agree with `naive`; if not, a warning says why.

    The kernels are compiled for the shape, so the first call that uses them finds them compiled.
    """
    block_t = default_block_t(dtype)
    layout = TreeLayout.build([-1, 0, 1, 0], [block_t + 1, 3, block_t, 5]).to(device)
    inputs = _inputs(layout.num_tokens, groups, heads, state_dim, head_dim)
    rounded = {name: each.to(device, dtype) for name, each in inputs.items()}
    exact = {name: each.float() for name, each in rounded.items()}
    return kernels_agree(
        "Mamba-2 recurrence",
        f"{device}, {dtype}, {heads} heads of {state_dim} by {head_dim}",
        dtype,
        lambda: with_gradients(_of(chain_ssd, layout), rounded),
        lambda: with_gradients(_of(naive_tree_ssd, layout), exact),
    )


def _inputs(
    rows: int, groups: int, heads: int, state_dim: int, head_dim: int
) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    return {
        "x": normal(rows, heads, head_dim),
        "dt": normal(rows, heads).sigmoid() * 0.2,
        "a": -normal(heads).abs() - 0.1,
        "b": normal(rows, groups, state_dim),
        "c": normal(rows, groups, state_dim),
        "d": normal(heads),
        "initial_states": normal(1, heads, state_dim, head_dim),
    }


def _of(
    compute: Callable[..., tuple[torch.Tensor, torch.Tensor]], layout: TreeLayout
) -> Callable[..., tuple[torch.Tensor, torch.Tensor]]:
    return partial(compute, layout=layout, end_nodes=(2,), chunk_size=None)
