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
from tree_kernels.logprob.head import head_logits

LIMITS = {torch.float64: 1e-11, torch.float32: 2e-6, torch.bfloat16: 1e-2}
"""Relative RMS error of the gradient."""


@pytest.fixture(autouse=True)
def fresh_memory_is_nan() -> Iterator[None]:
    with poisoned_empty():
        yield


@pytest.mark.parametrize(
    ("dtype", "head_dtype"),
    [
        (torch.float64, None),
        (torch.float32, None),
        (torch.bfloat16, None),
        (torch.bfloat16, torch.float32),
    ],
)
@pytest.mark.parametrize("of_entropy", [0.0, 0.5])
@pytest.mark.parametrize("of_logprob", [0.0, 1.0])
def test_action_logprobs_under_a_frozen_head_have_the_gradient_of_the_full_softmax(
    of_logprob: float, of_entropy: float, dtype: torch.dtype, head_dtype: torch.dtype | None
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
        found = action_logprobs(
            hidden, weight, targets, scale, head_dtype=head_dtype, chunk_rows=33
        )
        loss(*found).backward()
    if not of_logprob and not of_entropy:
        assert hidden.grad is None
        return
    assert hidden.grad is not None and exact.grad is not None
    assert relative_rms(hidden.grad, exact.grad) <= LIMITS[dtype]


@pytest.mark.parametrize("trains_head", [False, True])
def test_float32_head_gives_a_bfloat16_model_the_logprobs_of_float32(trains_head: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    targets, scale = torch.arange(100) % 37, torch.full((100,), 0.5)
    hidden = torch.randn(100, 64, generator=generator).bfloat16().requires_grad_()
    weight = torch.randn(37, 64, generator=generator).bfloat16().requires_grad_(trains_head)
    exact, exact_weight = (each.detach().float().requires_grad_() for each in (hidden, weight))
    wanted = action_logprobs(exact, exact_weight, targets, scale)
    errors = {}
    for head_dtype in (torch.float32, None):
        found = action_logprobs(hidden, weight, targets, scale, head_dtype=head_dtype)
        errors[head_dtype] = [relative_rms(f, w) for f, w in zip(found, wanted, strict=True)]
    assert max(errors[torch.float32]) <= 2e-6
    assert min(errors[None]) >= 1e-3
    (wanted[0] + 0.5 * wanted[1]).sum().backward()
    found = action_logprobs(hidden, weight, targets, scale, head_dtype=torch.float32)
    (found[0] + 0.5 * found[1]).sum().backward()
    pairs = [(hidden, exact), (weight, exact_weight)]
    for own, reference in pairs[: 1 + trains_head]:
        assert own.grad is not None and reference.grad is not None
        assert own.grad.dtype == torch.bfloat16
        assert relative_rms(own.grad, reference.grad) <= LIMITS[torch.bfloat16]


def test_wide_logits_come_a_block_of_the_weight_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tree_kernels.logprob.head._WIDE_BYTES", 10 * 9 * 4)
    hidden, weight = torch.randn(5, 9).bfloat16(), torch.randn(37, 9).bfloat16()
    wanted = hidden.double() @ weight.double().t()
    found = head_logits(hidden, weight, torch.float32)
    assert found.dtype == torch.float32
    assert relative_rms(found, wanted) <= 1e-6
    assert torch.equal(head_logits(hidden, weight, torch.bfloat16), hidden @ weight.t())


def test_head_narrower_than_the_model_is_refused() -> None:
    given = (torch.randn(5, 4), torch.randn(11, 4), torch.arange(5), torch.ones(5))
    with pytest.raises(ValueError, match="head_dtype"):
        action_logprobs(*given, head_dtype=torch.bfloat16)


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
    weight = torch.empty(248_320, 4, device="meta")
    rows = default_chunk_rows(hidden, weight, torch.float32)
    assert rows * 248_320 * 4 * 4 <= 2 << 30 < (rows + 1) * 248_320 * 4 * 4
    largest = torch.empty(1 << 30, 4, device="meta")
    assert default_chunk_rows(hidden, largest, torch.float32) == 1
