"""Which libraries compute tree attention on this device, tried once for each shape."""

from __future__ import annotations

import functools
import logging
import math
from collections.abc import Callable
from functools import partial

import torch

from tree_kernels.attention.calls import plan_calls
from tree_kernels.attention.device import run_plan
from tree_kernels.attention.libraries import Cudnn, Efficient, Flash, Library
from tree_kernels.attention.naive import naive_tree_attention
from tree_kernels.layout import TreeLayout

logger = logging.getLogger(__name__)

LIMITS = {torch.float32: 2e-5, torch.bfloat16: 2e-2, torch.float16: 2e-2}
"""Relative RMS error of the output and of each gradient."""
_NAMES = ("output", "d_query", "d_key", "d_value")
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
    shape = f"{device}, {dtype}, {query_heads}/{heads} heads of {dim}"
    try:
        worst, name = _worst_error(library(), device, dtype, query_heads, heads, dim)
    except Exception as error:
        # Whatever a library or compiler raises, training goes on without it.
        logger.warning(
            "tree attention goes on, slower, without %s, which does not run on %s: %s: %s",
            library.__name__, shape, type(error).__name__, str(error).partition("\n")[0],
        )  # fmt: skip
        return False
    # Written so that NaN fails.
    if worst <= LIMITS[dtype]:
        return True
    logger.warning(
        "tree attention goes on, slower, without %s, which is wrong on %s: "
        "%s is off by %.1e; allowed: %.0e",
        library.__name__, shape, name, worst, LIMITS[dtype],
    )  # fmt: skip
    return False


def _worst_error(
    library: Library,
    device: torch.device,
    dtype: torch.dtype,
    query_heads: int,
    heads: int,
    dim: int,
) -> tuple[float, str]:
    """Largest relative RMS error, and of what."""
    parts = TreeLayout.build([-1, 0, 0], _LENGTHS).parts(mounted=False)
    rows = sum(_LENGTHS)
    # Every part is a lone call for a library that takes nothing else; for others, none is.
    flops = 0.0 if isinstance(library, Cudnn) else math.inf
    plan = plan_calls(parts, rows, rows, device, width=query_heads * dim, lone_flops=flops)
    generator = torch.Generator().manual_seed(0)
    inputs = [
        torch.randn(rows, count, dim, generator=generator).to(device, dtype)
        for count in (query_heads, heads, heads)
    ]
    weight = torch.randn(rows, query_heads, dim, generator=generator).to(device, dtype)
    scale = dim**-0.5
    ours = _outputs_and_gradients(
        partial(run_plan, plan=plan, libraries=(library, library), scale=scale), inputs, weight
    )
    expected = _outputs_and_gradients(
        partial(naive_tree_attention, parts=parts, scale=scale),
        [each.double() for each in inputs],
        weight.double(),
    )
    errors = [
        float((mine.double() - right).norm() / right.norm())
        for mine, right in zip(ours, expected, strict=True)
    ]
    # NaN is above everything.
    worst = max(range(len(errors)), key=lambda i: (errors[i] != errors[i], errors[i]))
    return errors[worst], _NAMES[worst]


def _outputs_and_gradients(
    attend: Callable[..., torch.Tensor], inputs: list[torch.Tensor], weight: torch.Tensor
) -> list[torch.Tensor]:
    leaves = [each.detach().requires_grad_() for each in inputs]
    with torch.enable_grad():
        out = attend(*leaves)
        return [out.detach(), *torch.autograd.grad(out, leaves, weight)]
