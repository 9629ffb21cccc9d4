"""Which libraries compute tree attention on this device, tried once for each shape."""

from __future__ import annotations

import functools
import math
from functools import partial

import torch

from tree_kernels.attention.calls import plan_calls
from tree_kernels.attention.device import run_plan
from tree_kernels.attention.libraries import Cudnn, Efficient, Flash, Library
from tree_kernels.attention.naive import naive_tree_attention
from tree_kernels.layout import TreeLayout
from tree_kernels.self_test import kernels_agree, with_gradients

_LENGTHS = (300, 133, 70)
"""Rows of a trunk and two branches: odd, of more than one block."""


@functools.cache
def batch_library(
    device: torch.device, dtype: torch.dtype, query_heads: int, heads: int, dim: int
) -> type[Library] | None:
    """The library for many sequences a call: FlashAttention 2 for 16-bit values of up to 256 on
    Ampere and later, memory-efficient attention for others; None if neither works."""
    candidates: list[type[Library]] = [Efficient]
    if dtype != torch.float32 and dim <= 256 and torch.cuda.get_device_capability(device) >= (8, 0):
        candidates.insert(0, Flash)
    works = (_works(each, device, dtype, query_heads, heads, dim) for each in candidates)
    return next((each for each, ok in zip(candidates, works, strict=True) if ok), None)


@functools.cache
def lone_library(
    device: torch.device, dtype: torch.dtype, query_heads: int, heads: int, dim: int
) -> type[Library] | None:
    """The library for one long sequence a call: cuDNN where it was measured, on Hopper; or none."""
    if dtype == torch.float32 or not 64 <= dim <= 256:
        return None
    if torch.cuda.get_device_capability(device)[0] != 9:
        return None
    return Cudnn if _works(Cudnn, device, dtype, query_heads, heads, dim) else None


def _works(
    library: type[Library],
    device: torch.device,
    dtype: torch.dtype,
    query_heads: int,
    heads: int,
    dim: int,
) -> bool:
    """Whether forward and backward on a small tree agree with `naive`; else a warning says why."""
    parts = TreeLayout.build([-1, 0, 0], _LENGTHS).parts(mounted=False)
    rows = sum(_LENGTHS)
    # Every part is a lone call for a library that takes nothing else; for others, none is.
    flops = 0.0 if library is Cudnn else math.inf
    plan = plan_calls(parts, rows, rows, device, width=query_heads * dim, lone_flops=flops)
    generator = torch.Generator().manual_seed(0)
    counts = {"query": query_heads, "key": heads, "value": heads}
    rounded = {
        name: torch.randn(rows, count, dim, generator=generator).to(device, dtype)
        for name, count in counts.items()
    }
    exact = {name: each.double() for name, each in rounded.items()}
    scale = dim**-0.5
    libraries = (library(), library())
    return kernels_agree(
        f"tree attention by {library.__name__}",
        f"{device}, {dtype}, {query_heads}/{heads} heads of {dim}",
        dtype,
        lambda: with_gradients(
            partial(run_plan, plan=plan, libraries=libraries, scale=scale), rounded
        ),
        lambda: with_gradients(partial(naive_tree_attention, parts=parts, scale=scale), exact),
    )
