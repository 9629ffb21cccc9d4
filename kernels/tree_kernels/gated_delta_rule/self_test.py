"""Whether this device's Triton kernels compute what `naive.py` does, tried once for each shape."""

from __future__ import annotations

import functools
from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F

from tree_kernels.chain_scan import default_block_t
from tree_kernels.gated_delta_rule.function import chain_scan
from tree_kernels.gated_delta_rule.naive import naive_tree_gated_delta_rule
from tree_kernels.layout import TreeLayout
from tree_kernels.self_test import kernels_agree, with_gradients


@functools.cache
def kernels_work(
    device: torch.device,
    dtype: torch.dtype,
    key_heads: int,
    heads: int,
    key_dim: int,
    value_dim: int,
) -> bool:
    """Whether forward and backward on a small tree agree with `naive`; if not, a warning says why.

    The kernels are compiled for the shape, so the first call that uses them finds them compiled.
    """
    block_t = default_block_t(dtype)
    layout = TreeLayout.build([-1, 0, 1, 0], [block_t + 1, 3, block_t, 5]).to(device)
    inputs = _inputs(layout.num_tokens, key_heads, heads, key_dim, value_dim)
    rounded = {name: each.to(device, dtype) for name, each in inputs.items()}
    exact = {name: each.float() for name, each in rounded.items()}
    return kernels_agree(
        "gated delta rule",
        f"{device}, {dtype}, {heads} heads of {key_dim} by {value_dim}",
        dtype,
        lambda: with_gradients(_of(chain_scan, layout), rounded),
        lambda: with_gradients(_of(naive_tree_gated_delta_rule, layout), exact),
    )


def _inputs(
    rows: int, key_heads: int, heads: int, key_dim: int, value_dim: int
) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    return {
        "query": F.normalize(normal(rows, key_heads, key_dim), dim=-1),
        "key": F.normalize(normal(rows, key_heads, key_dim), dim=-1),
        "value": normal(rows, heads, value_dim),
        "log_decay": -normal(rows, heads).abs() * 0.1,
        "beta": normal(rows, heads).sigmoid(),
        "initial_states": normal(1, heads, key_dim, value_dim),
    }


def _of(
    compute: Callable[..., tuple[torch.Tensor, torch.Tensor]], layout: TreeLayout
) -> Callable[..., tuple[torch.Tensor, torch.Tensor]]:
    return partial(compute, layout=layout, end_nodes=(2,), chunk_size=None)
