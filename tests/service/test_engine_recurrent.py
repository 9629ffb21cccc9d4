"""The recurrences against a loop over tokens, in float64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from rollout_service.engine.transformers.recurrent import causal_conv, l2_normalised, scan


def by_token(
    query: Tensor, key: Tensor, value: Tensor, gate: Tensor, beta: Tensor | None, state: Tensor
) -> tuple[Tensor, Tensor]:
    """One row, `[L, H, K]`, straight from the definition."""
    outputs = torch.zeros_like(value)
    state = state.clone()
    for t in range(query.shape[0]):
        for head in range(query.shape[1]):
            state[head] *= gate[t, head].exp()
            write = value[t, head]
            if beta is not None:
                write = beta[t, head] * (write - state[head].T @ key[t, head])
            state[head] += torch.outer(key[t, head], write)
            outputs[t, head] = state[head].T @ query[t, head]
    return outputs, state


@pytest.mark.parametrize("delta", [True, False])
@pytest.mark.parametrize("lengths", [(1, 1), (5, 3), (64, 64), (150, 65), (1, 130)])
def test_scan_equals_token_loop(delta: bool, lengths: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    longest, heads, k, v = max(lengths), 3, 5, 7
    shape = (len(lengths), longest, heads)
    query, value = torch.randn(*shape, k).double(), torch.randn(*shape, v).double()
    key = l2_normalised(torch.randn(*shape, k).double())
    gate, beta = -torch.rand(shape).double() * 0.2, torch.rand(shape).double()
    state = torch.randn(len(lengths), heads, k, v).double()
    valid = torch.arange(longest) < torch.tensor(lengths)[:, None]
    gate, beta = gate * valid.unsqueeze(-1), beta * valid.unsqueeze(-1)
    if not delta:
        value = value * valid[..., None, None]
    kept = state.clone()
    outputs, final = scan(query, key, value, gate, beta if delta else None, state)
    assert torch.equal(state, kept)
    for row, length in enumerate(lengths):
        expected, end = by_token(
            query[row, :length],
            key[row, :length],
            value[row, :length],
            gate[row, :length],
            beta[row, :length] if delta else None,
            state[row],
        )
        torch.testing.assert_close(outputs[row, :length], expected, rtol=0, atol=1e-10)
        torch.testing.assert_close(final[row], end, rtol=0, atol=1e-10)


@pytest.mark.parametrize("delta", [True, False])
def test_chunk_keeps_float32_precision_through_strong_decays(delta: bool) -> None:
    torch.manual_seed(0)
    shape = (1, 64, 4)
    query, key = (l2_normalised(torch.randn(*shape, 16).double()) for _ in range(2))
    value, beta = torch.randn(*shape, 16).double(), torch.rand(shape).double()
    gate = -torch.rand(shape).double() * 0.05
    gate[:, ::4] *= 600
    inputs = (query, key, value, gate, beta if delta else None, torch.zeros(1, 4, 16, 16).double())
    expected, _ = scan(*inputs)
    q, k, v, g, b, state = (None if each is None else each.float() for each in inputs)
    assert q is not None and k is not None and v is not None and g is not None
    assert state is not None
    found, _ = scan(q, k, v, g, b, state)
    # 6e-6 where the running sums of the gates, here down to -290, are float32.
    assert (found - expected).abs().max() < 1e-6 * expected.abs().max()


@pytest.mark.parametrize("with_bias", [True, False])
@pytest.mark.parametrize("lengths", [(1, 1), (2, 1), (9, 4)])
def test_causal_conv_continues_from_its_state(with_bias: bool, lengths: tuple[int, ...]) -> None:
    torch.manual_seed(1)
    channels, width = 6, 4
    weight = torch.randn(channels, width).double()
    inputs = torch.randn(len(lengths), max(lengths), channels).double()
    bias = torch.randn(channels).double() if with_bias else None
    state = torch.randn(len(lengths), width - 1, channels).double()
    outputs, after = causal_conv(inputs, weight, bias, state, torch.tensor(lengths))
    for row, length in enumerate(lengths):
        history = torch.cat([state[row], inputs[row, :length]])
        for t in range(length):
            expected = (history[t : t + width] * weight.T).sum(0)
            expected = torch.nn.functional.silu(expected + (bias if bias is not None else 0))
            torch.testing.assert_close(outputs[row, t], expected, rtol=0, atol=1e-12)
        assert torch.equal(after[row], history[-(width - 1) :])
