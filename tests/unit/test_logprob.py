"""Log-probabilities of actions: the gradient under a frozen head, what it costs, its memory."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tests.tree_cases import poisoned_empty, relative_rms
from tree_kernels.logprob import action_logprobs
from tree_kernels.logprob.function import default_chunk_rows

LIMITS = {torch.float64: 1e-11, torch.float32: 2e-6, torch.bfloat16: 1e-2}
"""Relative RMS error of the gradient."""


@pytest.fixture(autouse=True)
def fresh_memory_is_nan() -> Iterator[None]:
    with poisoned_empty():
        yield


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("of_entropy", [0.0, 0.5])
@pytest.mark.parametrize("of_logprob", [0.0, 1.0])
def test_action_logprobs_under_a_frozen_head_have_the_gradient_of_the_full_softmax(
    of_logprob: float, of_entropy: float, dtype: torch.dtype
) -> None:
    generator = torch.Generator().manual_seed(0)
    targets = torch.randint(0, 37, (100,), generator=generator)
    scale = torch.rand(100, generator=generator, dtype=torch.float64) + 0.5
    weight = torch.randn(37, 9, generator=generator).to(dtype)
    hidden = torch.randn(100, 9, generator=generator).to(dtype).requires_grad_()
    exact = hidden.detach().double().requires_grad_()
    by_row = torch.randn(2, 100, generator=generator)

    def loss(logprob: torch.Tensor, entropy: torch.Tensor) -> torch.Tensor:
        terms = [
            factor * (each * rows).sum()
            for each, rows, factor in zip(
                (logprob, entropy), by_row.to(logprob), (of_logprob, of_entropy), strict=True
            )
            if factor
        ]
        return sum(terms, torch.zeros((), dtype=logprob.dtype, requires_grad=True))

    every = (exact @ weight.double().t() * scale[:, None]).log_softmax(1)
    loss(every.gather(1, targets[:, None])[:, 0], -(every.exp() * every).sum(1)).backward()
    with poisoned_empty():
        loss(*action_logprobs(hidden, weight, targets, scale, chunk_rows=33)).backward()
    if not of_logprob and not of_entropy:
        assert hidden.grad is None
        return
    assert hidden.grad is not None and exact.grad is not None
    assert relative_rms(hidden.grad, exact.grad) <= LIMITS[dtype]


def test_a_frozen_head_multiplies_twice_and_four_times_for_the_entropy() -> None:
    products = []

    class Count(TorchDispatchMode):
        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            products.append(func.overloadpacket in (torch.ops.aten.mm, torch.ops.aten.addmm))
            return func(*args, **(kwargs or {}))

    for with_entropy, wanted in ((False, 2), (True, 4)):
        hidden = torch.randn(5, 4, requires_grad=True)
        products.clear()
        with Count():
            logprobs, entropy = action_logprobs(
                hidden, torch.randn(11, 4), torch.arange(5), torch.ones(5)
            )
            (logprobs + entropy if with_entropy else logprobs).sum().backward()
        assert sum(products) == wanted


def test_chunks_of_logits_and_their_copies_fit_two_gib() -> None:
    hidden = torch.empty(0, 4, device="meta")
    rows = default_chunk_rows(hidden, torch.empty(248_320, 4, device="meta"))
    assert rows * 248_320 * 4 * 4 <= 2 << 30 < (rows + 1) * 248_320 * 4 * 4
    assert default_chunk_rows(hidden, torch.empty(1 << 30, 4, device="meta")) == 1
