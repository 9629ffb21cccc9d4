"""Whether this device's Triton kernels compute what `naive.py` does, tried once for each shape."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable

import torch
import torch.nn.functional as F

from tree_kernels.chain_scan import default_block_t
from tree_kernels.gated_delta_rule.function import chain_scan
from tree_kernels.gated_delta_rule.naive import naive_tree_gated_delta_rule
from tree_kernels.layout import TreeLayout

logger = logging.getLogger(__name__)

LIMITS = {torch.float32: 2e-5, torch.bfloat16: 2e-2, torch.float16: 2e-2}
"""Relative RMS error of the output and of each gradient."""
_NAMES = ("output", "d_query", "d_key", "d_value", "d_log_decay", "d_beta")


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
    shape = f"{device}, {dtype}, {heads} heads of {key_dim} by {value_dim}"
    try:
        worst, name = _worst_error(device, dtype, key_heads, heads, key_dim, value_dim)
    except Exception as error:
        # Whatever a compiler or driver raises, training goes on without the kernels.
        logger.warning(
            "the gated delta rule's kernels do not run on %s, PyTorch computes it, slower: %s: %s",
            shape, type(error).__name__, error,
        )  # fmt: skip
        return False
    # Written so that NaN fails.
    if worst <= LIMITS[dtype]:
        return True
    logger.warning(
        "the gated delta rule's kernels are wrong on %s, PyTorch computes it, slower: "
        "%s is off by %.1e; allowed: %.0e",
        shape, name, worst, LIMITS[dtype],
    )  # fmt: skip
    return False


def _worst_error(
    device: torch.device,
    dtype: torch.dtype,
    key_heads: int,
    heads: int,
    key_dim: int,
    value_dim: int,
) -> tuple[float, str]:
    """Largest relative RMS error, and of what."""
    block_t = default_block_t(dtype)
    layout = TreeLayout.build([-1, 0, 1, 0], [block_t + 1, 3, block_t, 5]).to(device)
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(layout.num_tokens, *shape, generator=generator)

    inputs = [
        F.normalize(normal(key_heads, key_dim), dim=-1),
        F.normalize(normal(key_heads, key_dim), dim=-1),
        normal(heads, value_dim),
        -normal(heads).abs() * 0.1,
        normal(heads).sigmoid(),
    ]
    rounded = [each.to(device, dtype) for each in inputs]
    weight = normal(heads, value_dim).to(device)
    ours = _outputs_and_gradients(chain_scan, rounded, layout, weight)
    exact = [each.float() for each in rounded]
    expected = _outputs_and_gradients(naive_tree_gated_delta_rule, exact, layout, weight)
    errors = [
        ((mine.float() - wanted).norm() / wanted.norm()).item()
        for mine, wanted in zip(ours, expected, strict=True)
    ]
    # NaN is above everything.
    worst = max(range(len(errors)), key=lambda i: (errors[i] != errors[i], errors[i]))
    return errors[worst], _NAMES[worst]


def _outputs_and_gradients(
    compute: Callable[..., tuple[torch.Tensor, torch.Tensor]],
    inputs: list[torch.Tensor],
    layout: TreeLayout,
    weight: torch.Tensor,
) -> list[torch.Tensor]:
    leaves = [each.detach().clone().requires_grad_() for each in inputs]
    with torch.enable_grad():
        out, _ = compute(*leaves, layout, initial_states=None, end_nodes=(), chunk_size=None)
        gradients = torch.autograd.grad((out.float() * weight).sum(), leaves)
    return [out.detach(), *gradients]
