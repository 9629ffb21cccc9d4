"""The self-tests of kernels where their first call is inside a checkpointed layer."""

from __future__ import annotations

import functools

import torch
from torch.utils.checkpoint import checkpoint

from tree_kernels.self_test import kernels_agree, with_gradients


def test_a_self_test_inside_a_checkpointed_layer_leaves_the_layer_its_gradients() -> None:
    weight = torch.randn(4, 4, requires_grad=True)
    inputs = {"x": torch.randn(3, 2)}

    @functools.cache
    def works() -> bool:
        compute = functools.partial(with_gradients, lambda x: x.exp().sin(), inputs)
        return kernels_agree("layer", "cpu", torch.float32, compute, compute)

    def layer(x: torch.Tensor) -> torch.Tensor:
        hidden = torch.tanh(x @ weight)
        assert works()
        return torch.sin(hidden @ weight)

    x = torch.randn(3, 4)
    out = checkpoint(layer, x, use_reentrant=False)
    assert isinstance(out, torch.Tensor)
    (found,) = torch.autograd.grad(out.sum(), weight)
    (wanted,) = torch.autograd.grad(layer(x).sum(), weight)
    assert torch.equal(found, wanted)
