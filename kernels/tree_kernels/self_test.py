"""Whether kernels compute on this device what PyTorch does, tried before they are used."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence

import torch
from torch.autograd.graph import saved_tensors_hooks

logger = logging.getLogger(__name__)

LIMITS = {torch.float32: 2e-5, torch.bfloat16: 2e-2, torch.float16: 2e-2}
"""Relative RMS error of outputs and gradients."""

Computed = Mapping[str, torch.Tensor]
"""Outputs and gradients by name."""


def kernels_agree(
    what: str,
    where: str,
    dtype: torch.dtype,
    ours: Callable[[], Computed],
    wanted: Callable[[], Computed],
) -> bool:
    """Whether `ours` runs and is as near to `wanted` as `dtype` asks; if not, a warning says why.

    Args:
        what: The operator, as the warning names it.
        where: Device, type and sizes, as the warning names them.
        dtype: Of the values; chooses the limit.
        ours: Computes by the kernels.
        wanted: Computes the same in PyTorch.
    """
    try:
        error, name = _worst_error(ours(), wanted())
    except Exception as raised:
        # Whatever a compiler or driver raises, training goes on without the kernels.
        logger.warning(
            "the %s's kernels do not run on %s, PyTorch computes it, slower: %s: %s",
            what, where, type(raised).__name__, str(raised).partition("\n")[0],
        )  # fmt: skip
        return False
    # Written so that NaN fails.
    if error <= LIMITS[dtype]:
        return True
    logger.warning(
        "the %s's kernels are wrong on %s, PyTorch computes it, slower: %s is off by %.1e; "
        "allowed: %.0e",
        what, where, name, error, LIMITS[dtype],
    )  # fmt: skip
    return False


def with_gradients(
    compute: Callable[..., torch.Tensor | Sequence[torch.Tensor]], inputs: Computed
) -> Computed:
    """What `compute(**inputs)` gives, and the gradient of each input under fixed random ones."""
    leaves = {name: each.detach().requires_grad_() for name, each in inputs.items()}
    generator = torch.Generator().manual_seed(1)
    # The first call may be inside a checkpointed layer, which counts what is saved for backward:
    # what the test saves is not the layer's.
    with torch.enable_grad(), saved_tensors_hooks(_same, _same):
        out = compute(**leaves)
        outs = (out,) if isinstance(out, torch.Tensor) else tuple(out)
        upstream = [torch.randn(each.shape, generator=generator).to(each) for each in outs]
        grads = torch.autograd.grad(outs, list(leaves.values()), upstream)
    found = {f"output {place}": each.detach() for place, each in enumerate(outs)}
    return {**found, **{f"d_{name}": grad for name, grad in zip(leaves, grads, strict=True)}}


def _same(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


def _worst_error(ours: Computed, wanted: Computed) -> tuple[float, str]:
    """Largest relative RMS error, and of what."""
    errors = {
        name: ((ours[name].float() - each).norm() / each.norm()).item()
        for name, each in wanted.items()
    }
    # NaN is above everything.
    worst = max(errors, key=lambda name: (errors[name] != errors[name], errors[name]))
    return errors[worst], worst
