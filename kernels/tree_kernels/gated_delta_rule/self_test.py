"""Whether this device's Triton kernels compute what `naive.py` does, tried once for each shape."""

from __future__ import annotations

import functools

import torch
import torch.nn.functional as F

from tree_kernels.chain_scan.self_test import Normal, scan_works
from tree_kernels.gated_delta_rule.function import chain_scan
from tree_kernels.gated_delta_rule.naive import naive_tree_gated_delta_rule


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

    def inputs(rows: int, normal: Normal) -> dict[str, torch.Tensor]:
        return {
            "query": F.normalize(normal(rows, key_heads, key_dim), dim=-1),
            "key": F.normalize(normal(rows, key_heads, key_dim), dim=-1),
            "value": normal(rows, heads, value_dim),
            "log_decay": -normal(rows, heads).abs() * 0.1,
            "beta": normal(rows, heads).sigmoid(),
        }

    return scan_works(
        "gated delta rule",
        device,
        dtype,
        (heads, key_dim, value_dim),
        inputs,
        chain_scan,
        naive_tree_gated_delta_rule,
    )
