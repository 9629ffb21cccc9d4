"""Whether this device's Triton kernels compute what `naive.py` does, tried once for each type."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from tree_kernels.rowwise import function, naive
from tree_kernels.self_test import kernels_agree, with_gradients

CASES: dict[str, tuple[Callable[..., Any], Callable[..., Any], dict[str, tuple[int, ...]]]] = {
    "L2 norm": (
        function.fused_l2_normalised,
        naive.naive_l2_normalised,
        {"x": (37, 3, 24)},
    ),
    "delta rule's gate": (
        function.fused_delta_gates,
        naive.naive_delta_gates,
        {"step": (600, 5), "beta": (600, 5), "a_log": (5,), "dt_bias": (5,)},
    ),
}
"""Name -> kernels, PyTorch, and the shapes of their inputs."""


@functools.cache
def kernels_work(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether forward and backward agree with `naive`; if not, a warning says why."""
    return all(_works(name, device, dtype) for name in CASES)


def _works(name: str, device: torch.device, dtype: torch.dtype) -> bool:
    ours, wanted, shapes = CASES[name]
    generator = torch.Generator().manual_seed(0)
    rounded = {
        key: torch.randn(shape, generator=generator).to(device, dtype)
        for key, shape in shapes.items()
    }
    exact = {key: each.float() for key, each in rounded.items()}
    return kernels_agree(
        name,
        f"{device}, {dtype}",
        dtype,
        lambda: with_gradients(ours, rounded),
        lambda: with_gradients(wanted, exact),
    )
