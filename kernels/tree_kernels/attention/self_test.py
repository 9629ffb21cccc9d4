"""Which libraries compute tree attention on this device, tried once for each shape."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch

from tree_kernels.attention.calls import plan_calls
from tree_kernels.attention.device import run_plan
from tree_kernels.attention.groups import grid_of
from tree_kernels.attention.libraries import Cudnn, CutCudnn, Efficient, Flash, Library
from tree_kernels.attention.naive import naive_tree_attention
from tree_kernels.layout import TreeLayout
from tree_kernels.self_test import kernels_agree, with_gradients

_LENGTHS = (300, 133, 70)
"""Rows of a trunk and two branches: odd, of more than one block."""
_PIECE_ROWS = 32
"""Short enough that there are padding and plans of exact and of rounded lengths."""


@functools.cache
def batch_library(
    device: torch.device, dtype: torch.dtype, query_heads: int, heads: int, dim: int
) -> type[Library] | None:
    """The library for many sequences a call: FlashAttention 2 for 16-bit values of up to 256 on
    Ampere and later, memory-efficient attention for others; None if neither works."""
    candidates: list[type[Library]] = [Efficient]
    if dtype != torch.float32 and dim <= 256 and torch.cuda.get_device_capability(device) >= (8, 0):
        candidates.insert(0, Flash)
    return _first_working(candidates, device, dtype, query_heads, heads, dim)


@functools.cache
def lone_library(
    device: torch.device, dtype: torch.dtype, query_heads: int, heads: int, dim: int
) -> type[Library] | None:
    """The library for one long sequence a call: cuDNN where it was measured, on Hopper, with plans
    of exact lengths where they work; or none."""
    if dtype == torch.float32 or not 64 <= dim <= 256:
        return None
    if torch.cuda.get_device_capability(device)[0] != 9:
        return None
    candidates: tuple[type[Library], ...] = (CutCudnn, Cudnn)
    return _first_working(candidates, device, dtype, query_heads, heads, dim)


def _first_working(candidates: Sequence[type[Library]], *kind: Any) -> type[Library] | None:
    return next((each for each in candidates if _works(each, *kind)), None)


def _works(
    library: type[Library],
    device: torch.device,
    dtype: torch.dtype,
    query_heads: int,
    heads: int,
    dim: int,
) -> bool:
    """Whether forward and backward on a small tree agree with `naive`; else a warning says why."""
    layout = TreeLayout.build([-1, 0, 0], _LENGTHS)
    parts = layout.parts(mounted=False, grid=grid_of(_PIECE_ROWS))
    rows = sum(_LENGTHS)
    # Every part is a lone call for a library that takes nothing else; for others, none is.
    plan = plan_calls(
        parts,
        rows,
        rows,
        device,
        width=query_heads * dim,
        lone_flops=0.0 if issubclass(library, Cudnn) else math.inf,
        piece_rows=_PIECE_ROWS if library is CutCudnn else None,
    )
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
