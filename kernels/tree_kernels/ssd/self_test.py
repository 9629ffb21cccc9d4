"""Whether this device's Triton kernels compute what `naive.py` does, tried once for each shape."""

from __future__ import annotations

import functools

import torch

from tree_kernels.chain_scan.self_test import Normal, scan_works
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

    def inputs(rows: int, normal: Normal) -> dict[str, torch.Tensor]:
        return {
            "x": normal(rows, heads, head_dim),
            "dt": normal(rows, heads).sigmoid() * 0.2,
            "a": -normal(heads).abs() - 0.1,
            "b": normal(rows, groups, state_dim),
            "c": normal(rows, groups, state_dim),
            "d": normal(heads),
        }

    return scan_works(
        "Mamba-2 recurrence",
        device,
        dtype,
        (heads, state_dim, head_dim),
        inputs,
        chain_ssd,
        naive_tree_ssd,
    )
