"""What gives a packed tree in float32 on the CPU the numbers of the rollout engine.

A trained model can turn the last bit of a float32 into 1e-4 nats. Linear layers, norms and
convolutions give a row the same bits in a packed tree and token by token. Attention and recurrences
add up in another order: their values are those of float64, rounded once.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


def rounded_once(compute: Callable[..., torch.Tensor], *inputs: torch.Tensor) -> torch.Tensor:
    """`compute(*inputs)`; of float32 on the CPU, computed in float64 and rounded.

    Its gradient is that of `compute` in float32, which is computed again for it.

    Args:
        compute: Differentiable in `inputs` alone.
        inputs: The first has the result's type.
    """
    return first_rounded(lambda *each: (compute(*each),), *inputs)[0]


def first_rounded(
    compute: Callable[..., tuple[torch.Tensor, ...]], *inputs: torch.Tensor
) -> tuple[torch.Tensor, ...]:
    """As `rounded_once`, of several results; all but the first stay in float64, unrounded."""
    like = inputs[0]
    if like.dtype != torch.float32 or like.device.type != "cpu":
        return compute(*inputs)
    return _FirstRounded.apply(compute, *inputs)


class _FirstRounded(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, compute: Callable[..., tuple[torch.Tensor, ...]], *inputs: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        ctx.compute = compute
        ctx.save_for_backward(*inputs)
        first, *others = compute(*(each.double() for each in inputs))
        return first.float(), *others

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        needed = ctx.needs_input_grad[1:]
        inputs = [
            each.detach().requires_grad_(is_needed)
            for each, is_needed in zip(ctx.saved_tensors, needed, strict=True)
        ]
        with torch.enable_grad():
            outputs = ctx.compute(*inputs)
        wanted = [each for each in inputs if each.requires_grad]
        given = [
            (output, grad.to(output.dtype))
            for output, grad in zip(outputs, grads, strict=True)
            if output.requires_grad
        ]
        reached, wide = zip(*given, strict=True)
        found = iter(torch.autograd.grad(reached, wanted, wide))
        return None, *(next(found) if is_needed else None for is_needed in needed)
