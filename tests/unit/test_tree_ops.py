"""Tree operators against loops over tokens: outputs and every gradient."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from tests.tree_cases import (
    TreeCase,
    path_attention,
    path_causal_conv,
    path_gated_delta_rule,
    path_ssd,
    poisoned_empty,
    random_case,
    relative_rms,
)
from tree_kernels.attention import tree_attention
from tree_kernels.causal_conv import tree_causal_conv
from tree_kernels.gated_delta_rule import tree_gated_delta_rule
from tree_kernels.logprob import action_logprobs
from tree_kernels.ssd import tree_ssd

LIMITS = {torch.float64: 1e-11, torch.float32: 2e-5, torch.bfloat16: 2e-2}
"""Relative RMS error of outputs and gradients."""

Inputs = dict[str, torch.Tensor]


@pytest.fixture(autouse=True)
def fresh_memory_is_nan() -> Iterator[None]:
    with poisoned_empty():
        yield


def case_of(shape: str, num_tokens: int) -> TreeCase:
    """A tree of `num_tokens` rows."""
    rng = np.random.default_rng(num_tokens)
    if shape == "one_node" or num_tokens < 3:
        return TreeCase([-1], [num_tokens], [[]])
    if shape == "chain":
        return TreeCase([-1, 0, 1], [num_tokens - 2, 1, 1], [[], [], []])
    if shape == "star":
        leaves = min(num_tokens - 1, 20)
        return TreeCase(
            [-1] + [0] * leaves, [num_tokens - leaves] + [1] * leaves, [[]] * (leaves + 1)
        )
    return random_case(rng, num_tokens, max(num_tokens // 12, 5))


CASES = [
    *[("random", count) for count in (7, 63, 100, 129, 1000)],
    *[(shape, 65) for shape in ("one_node", "chain", "star")],
    ("one_node", 1),
]
CASE_IDS = [f"{shape}-{count}" for shape, count in CASES]


def assert_equal(
    found: Callable[[Inputs], torch.Tensor],
    wanted: Callable[[Inputs], torch.Tensor],
    inputs: Inputs,
    dtype: torch.dtype,
) -> None:
    """Compare outputs and the gradient of each input under one random output gradient."""
    leaves = {name: value.to(dtype).requires_grad_() for name, value in inputs.items()}
    exact = {name: value.detach().double().requires_grad_() for name, value in leaves.items()}
    out, expected = found(leaves), wanted(exact)
    assert out.dtype == dtype
    assert relative_rms(out, expected) <= LIMITS[dtype]
    upstream = torch.randn(out.shape, generator=torch.Generator().manual_seed(3))
    out.backward(upstream.to(dtype))
    expected.backward(upstream.double())
    for name, leaf in leaves.items():
        reference = exact[name].grad
        assert leaf.grad is not None and reference is not None
        if float(reference.norm()) < 1e-12:
            # One visible key: softmax leaves nothing to queries and keys but rounding.
            assert float(leaf.grad.norm()) < 1e-5, name
            continue
        assert relative_rms(leaf.grad, reference) <= LIMITS[dtype], name


@pytest.mark.parametrize("dtype", LIMITS)
@pytest.mark.parametrize("mounted", [False, True])
@pytest.mark.parametrize(("shape", "count"), CASES, ids=CASE_IDS)
def test_attention_equals_the_dense_mask(
    shape: str, count: int, mounted: bool, dtype: torch.dtype
) -> None:
    case = case_of(shape, count)
    generator = torch.Generator().manual_seed(0)
    inputs = {
        "query": torch.randn(count, 6, 16, generator=generator),
        "key": torch.randn(count, 2, 16, generator=generator),
        "value": torch.randn(count, 2, 16, generator=generator),
    }
    layout = case.layout
    assert_equal(
        lambda x: tree_attention(**x, layout=layout, scale=0.3, mounted=mounted),
        lambda x: path_attention(**x, case=case, scale=0.3, mounted=mounted),
        inputs,
        dtype,
    )


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("chunk_size", [None, 64])
@pytest.mark.parametrize(("shape", "count"), CASES, ids=CASE_IDS)
def test_gated_delta_rule_equals_the_token_loop(
    shape: str, count: int, chunk_size: int | None, dtype: torch.dtype
) -> None:
    case = case_of(shape, count)
    generator = torch.Generator().manual_seed(0)
    inputs = {
        "query": F.normalize(torch.randn(count, 2, 12, generator=generator), dim=-1),
        "key": F.normalize(torch.randn(count, 2, 12, generator=generator), dim=-1),
        "value": torch.randn(count, 6, 16, generator=generator),
        # Some tokens forget everything: decays of e**-40.
        "log_decay": -torch.rand(count, 6, generator=generator).pow(4) * 40,
        "beta": torch.rand(count, 6, generator=generator),
    }
    layout = case.layout
    assert_equal(
        lambda x: tree_gated_delta_rule(**x, layout=layout, chunk_size=chunk_size),
        lambda x: path_gated_delta_rule(**x, case=case),
        inputs,
        dtype,
    )


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("chunk_size", [None, 64])
@pytest.mark.parametrize(("shape", "count"), CASES, ids=CASE_IDS)
def test_ssd_equals_the_token_loop(
    shape: str, count: int, chunk_size: int | None, dtype: torch.dtype
) -> None:
    case = case_of(shape, count)
    generator = torch.Generator().manual_seed(0)
    inputs = {
        "x": torch.randn(count, 6, 10, generator=generator),
        "dt": torch.rand(count, 6, generator=generator) * 2,
        "a": -torch.rand(6, generator=generator) * 8,
        "b": torch.randn(count, 2, 12, generator=generator),
        "c": torch.randn(count, 2, 12, generator=generator),
        "d": torch.randn(6, generator=generator),
    }
    layout = case.layout
    assert_equal(
        lambda x: tree_ssd(**x, layout=layout, chunk_size=chunk_size),
        lambda x: path_ssd(**x, case=case),
        inputs,
        dtype,
    )


@pytest.mark.parametrize("dtype", LIMITS)
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize(("shape", "count"), CASES, ids=CASE_IDS)
def test_causal_conv_equals_the_window_on_the_path(
    shape: str, count: int, with_bias: bool, dtype: torch.dtype
) -> None:
    case = case_of(shape, count)
    generator = torch.Generator().manual_seed(0)
    inputs = {
        "x": torch.randn(count, 10, generator=generator),
        "weight": torch.randn(10, 4, generator=generator),
    }
    if with_bias:
        inputs["bias"] = torch.randn(10, generator=generator)
    layout = case.layout
    assert_equal(
        lambda x: tree_causal_conv(x["x"], x["weight"], x.get("bias"), layout),
        lambda x: path_causal_conv(x["x"], x["weight"], x.get("bias"), case),
        inputs,
        dtype,
    )


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("count", [1, 63, 100, 1000])
@pytest.mark.parametrize("chunk_rows", [7, 64, 4096])
def test_action_logprobs_equal_the_full_softmax(
    count: int, chunk_rows: int, dtype: torch.dtype
) -> None:
    generator = torch.Generator().manual_seed(0)
    targets = torch.randint(0, 37, (count,), generator=generator)
    scale = torch.rand(count, generator=generator) + 0.5
    inputs = {
        "hidden": torch.randn(count, 9, generator=generator),
        "weight": torch.randn(37, 9, generator=generator),
    }

    def full(x: Inputs) -> torch.Tensor:
        every = (x["hidden"] @ x["weight"].t() * scale[:, None]).log_softmax(1)
        chosen = every.gather(1, targets[:, None])[:, 0]
        return torch.stack([chosen, -(every.exp() * every).sum(1)])

    assert_equal(
        lambda x: torch.stack(
            action_logprobs(
                **x, targets=targets, scale=scale, head_dtype=None, chunk_rows=chunk_rows
            )
        ),
        full,
        inputs,
        dtype,
    )


def test_action_logprobs_leave_a_frozen_head_without_gradient() -> None:
    hidden = torch.randn(5, 4, requires_grad=True)
    weight = torch.randn(11, 4)
    logprobs, entropy = action_logprobs(hidden, weight, torch.arange(5), torch.ones(5))
    (logprobs + entropy).sum().backward()
    assert weight.grad is None
    assert hidden.grad is not None and bool(hidden.grad.isfinite().all())


def test_no_actions_give_empty_logprobs_with_a_gradient() -> None:
    hidden = torch.randn(0, 4, requires_grad=True)
    none = torch.zeros(0, dtype=torch.int64)
    logprobs, entropy = action_logprobs(hidden, torch.randn(11, 4), none, torch.ones(0))
    assert logprobs.shape == entropy.shape == (0,)
    logprobs.sum().backward()
    assert hidden.grad is not None


def test_mounted_keys_take_part_in_mount_layers_alone() -> None:
    case = TreeCase([-1, 0, 0], [2, 3, 2], [[], [], [(2, 5)]])
    layout = case.layout
    key = torch.randn(7, 1, 4, requires_grad=True)
    query, value = torch.randn(7, 1, 4), torch.randn(7, 1, 4)
    for mounted in (False, True):
        key.grad = None
        out = tree_attention(query, key, value, layout, scale=1.0, mounted=mounted)
        out[5:].sum().backward()
        assert key.grad is not None
        assert bool(key.grad[2:5].abs().sum() > 0) is mounted


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda layout, x: tree_attention(x[:4], x, x, layout, scale=1.0, mounted=False), "query"),
        (
            lambda layout, x: tree_attention(x[:, :3], x, x, layout, scale=1.0, mounted=False),
            "multiple",
        ),
        (
            lambda layout, x: tree_attention(x, x, x[..., :2], layout, scale=1.0, mounted=False),
            "differ",
        ),
        (lambda layout, x: tree_causal_conv(x[:, 0], x[0], None, layout), "weight"),
        (lambda layout, x: tree_causal_conv(x, x[0], None, layout), "x"),
        (
            lambda layout, x: tree_gated_delta_rule(x, x[:2], x, x[..., 0], x[..., 0], layout),
            "query",
        ),
        (
            lambda layout, x: tree_gated_delta_rule(x, x, x[:, :1], x[..., 0], x[..., 0], layout),
            "value",
        ),
        (lambda layout, x: tree_gated_delta_rule(x, x, x, x[..., 0], x, layout), "beta"),
        (lambda layout, x: tree_ssd(x, x, x[0, :, 0], x, x, None, layout), "dt"),
        (lambda layout, x: tree_ssd(x, x[..., 0], x[0, 0, :2], x, x, None, layout), "a "),
        (lambda layout, x: tree_ssd(x, x[..., 0], x[0, :, 0], x, x[:, :1], None, layout), "b "),
        (lambda layout, x: action_logprobs(x[:, 0], x[:, 0, :2], x[:, 0, 0], x[:, 0, 0]), "hidden"),
        (lambda layout, x: action_logprobs(x[:, 0], x[:, 0], x[:3, 0, 0], x[:, 0, 0]), "targets"),
    ],
)
def test_wrong_shapes_are_refused_by_name(
    call: Callable[[object, torch.Tensor], object], message: str
) -> None:
    layout = TreeCase([-1, 0], [2, 3], [[], []]).layout
    with pytest.raises(ValueError, match=message):
        call(layout, torch.randn(5, 4, 6))
