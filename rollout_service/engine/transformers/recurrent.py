"""Causal convolution and gated linear recurrences from a given state, in plain torch.

The gated delta rule (Qwen3.5) and the SSD scan (Mamba-2) are one recurrence,
`S_t = exp(g_t) S_{t-1} + k_t u_t^T`, `o_t = S_t^T q_t`; the delta rule writes
`u_t = beta_t (v_t - (exp(g_t) S_{t-1})^T k_t)`, SSD writes `u_t = v_t`.
Nothing here updates its arguments: a parent's state stays what it was.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from rollout_service.engine.transformers.precision import widened

CHUNK_TOKENS = 64
"""Tokens solved at once by `scan`; the value of the published kernels."""


def causal_conv(
    inputs: Tensor, weight: Tensor, bias: Tensor | None, state: Tensor, lengths: Tensor
) -> tuple[Tensor, Tensor]:
    """Depthwise causal convolution over rows of unequal length, with SiLU.

    Args:
        inputs: `[N, L, C]`, rows padded at their end.
        weight: `[C, W]`.
        bias: `[C]` or None.
        state: The W-1 inputs before each row, `[N, W-1, C]`.
        lengths: Valid tokens of each row, `[N]`.

    Returns:
        Outputs `[N, L, C]`, widened, and each row's last W-1 valid inputs `[N, W-1, C]`.
    """
    width, length = weight.shape[-1], inputs.shape[1]
    window = torch.cat([state, inputs], dim=1)
    wide = torch.promote_types(inputs.dtype, torch.float32)
    summands, taps = window.to(wide), weight.to(wide).t()
    # Oldest first, as the trainer adds: then both have the same bits.
    mixed = summands[:, :length] * taps[0]
    for tap in range(1, width):
        mixed = mixed + summands[:, tap : tap + length] * taps[tap]
    if bias is not None:
        mixed = mixed + bias.to(wide)
    outputs = F.silu(widened(mixed.to(inputs.dtype)))
    if length == 1:
        return outputs, window[:, 1:]
    last = lengths[:, None] + torch.arange(width - 1, device=inputs.device)
    return outputs, window.gather(1, last[..., None].expand(-1, -1, window.shape[2]))


def l2_normalised(values: Tensor) -> Tensor:
    """`values` over their length in the last axis, with the published epsilon of 1e-6."""
    return values * torch.rsqrt((values * values).sum(-1, keepdim=True) + 1e-6)


def scan(
    query: Tensor, key: Tensor, value: Tensor, gate: Tensor, beta: Tensor | None, state: Tensor
) -> tuple[Tensor, Tensor]:
    """Run the recurrence over rows of tokens.

    Padding must come with `gate` 0 and, by `beta` 0 or `value` 0, nothing to write.

    Args:
        query: `[N, L, H, K]`, scaled; fp32 or wider, like all the rest.
        key: `[N, L, H, K]`.
        value: `[N, L, H, V]`.
        gate: Log decay, at most 0, `[N, L, H]`.
        beta: Write strength of the delta rule, `[N, L, H]`; None runs SSD.
        state: `[N, H, K, V]`.

    Returns:
        Outputs `[N, L, H, V]` and the state after the last token.
    """
    if query.shape[1] == 1:
        output, state = _step(
            query[:, 0],
            key[:, 0],
            value[:, 0],
            gate[:, 0],
            None if beta is None else beta[:, 0],
            state,
        )
        return output.unsqueeze(1), state
    outputs = []
    for begin in range(0, query.shape[1], CHUNK_TOKENS):
        rows = slice(begin, begin + CHUNK_TOKENS)
        output, state = _chunk(
            query[:, rows].transpose(1, 2),
            key[:, rows].transpose(1, 2),
            value[:, rows].transpose(1, 2),
            gate[:, rows].transpose(1, 2),
            None if beta is None else beta[:, rows].transpose(1, 2),
            state,
        )
        outputs.append(output.transpose(1, 2))
    return torch.cat(outputs, dim=1), state


def _step(
    query: Tensor, key: Tensor, value: Tensor, gate: Tensor, beta: Tensor | None, state: Tensor
) -> tuple[Tensor, Tensor]:
    """One token of each row: `[N, H, K]`, `[N, H, V]`, `[N, H]`."""
    state = state * gate.exp()[..., None, None]
    if beta is not None:
        known = (key.unsqueeze(-2) @ state).squeeze(-2)
        value = (value - known) * beta.unsqueeze(-1)
    state.addcmul_(key.unsqueeze(-1), value.unsqueeze(-2))
    return (query.unsqueeze(-2) @ state).squeeze(-2), state


def _chunk(
    query: Tensor, key: Tensor, value: Tensor, gate: Tensor, beta: Tensor | None, state: Tensor
) -> tuple[Tensor, Tensor]:
    """Up to CHUNK_TOKENS tokens of each row: `[N, H, C, K]`, `[N, H, C, V]`, `[N, H, C]`."""
    # float64: at a running sum of -300, float32 leaves neighbours' differences 3e-5 off.
    total = gate.double().cumsum(-1)
    later = torch.ones(gate.shape[-1], gate.shape[-1], dtype=torch.bool, device=gate.device)
    decay = (total.unsqueeze(-1) - total.unsqueeze(-2)).to(gate.dtype)
    decay = decay.masked_fill(later.triu(1), float("-inf")).exp()
    since_start = total.exp().to(gate.dtype).unsqueeze(-1)
    if beta is not None:
        # u_i + beta_i sum_{j<i} decay_ij (k_i . k_j) u_j = beta_i (v_i - exp(total_i) S^T k_i)
        scaled = key * beta.unsqueeze(-1)
        system = (scaled @ key.transpose(-1, -2)) * decay
        target = value * beta.unsqueeze(-1) - (scaled * since_start) @ state
        value = torch.linalg.solve_triangular(system, target, upper=False, unitriangular=True)
    within = (query @ key.transpose(-1, -2)) * decay
    output = (query * since_start) @ state + within @ value
    until_end = (total[..., -1:] - total).exp().to(gate.dtype).unsqueeze(-1)
    state = state * since_start[..., -1:, :] + (key * until_end).transpose(-1, -2) @ value
    return output, state
