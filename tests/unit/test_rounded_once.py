"""float64 values, float32 gradients."""

from __future__ import annotations

import torch

from trainer_service.models.precision import rounded_once


def drawn(*shape: int, dtype: torch.dtype = torch.float32, grad: bool = True) -> torch.Tensor:
    generator = torch.Generator().manual_seed(len(shape))
    return torch.randn(shape, generator=generator).to(dtype).requires_grad_(grad)


def product(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    return (left @ right).exp()


def test_value_is_float64s_rounded_and_gradient_float32s() -> None:
    left, right = drawn(40, 300), drawn(300)
    found = rounded_once(product, left, right)
    assert torch.equal(found, product(left.double(), right.double()).float())
    assert not torch.equal(found, product(left, right))
    weight = torch.linspace(-1, 1, 40)
    wanted = torch.autograd.grad(product(left, right), (left, right), weight)
    for one, other in zip(torch.autograd.grad(found, (left, right), weight), wanted, strict=True):
        assert torch.equal(one, other)


def test_what_needs_no_gradient_gets_none() -> None:
    left, right = drawn(4, 3), drawn(3, grad=False)
    rounded_once(product, left, right).sum().backward()
    assert left.grad is not None and right.grad is None
    assert not rounded_once(product, left.detach(), right).requires_grad


def test_other_types_are_computed_as_they_are() -> None:
    for dtype in (torch.bfloat16, torch.float64):
        left, right = drawn(4, 3, dtype=dtype), drawn(3, dtype=dtype)
        assert torch.equal(rounded_once(product, left, right), product(left, right))
