"""Forward passes of the recurrent mixers over a strip, by Hugging Face class name.

They replace the mixers' own forwards per instance, so that every segment starts from its run's
state. A new architecture adds one function and its lines in `MIXERS`.
"""

from __future__ import annotations

import types
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rollout_service.engine.transformers.precision import widened, widened_dtype
from rollout_service.engine.transformers.recurrent import causal_conv, l2_normalised, scan
from rollout_service.engine.transformers.strip import State, Strip


@dataclass(frozen=True, slots=True)
class Mixer:
    """How one class of recurrent mixer is computed."""

    forward: Callable[..., Tensor]
    """Bound to the instance; takes `hidden_states` `[1, T, hidden]` and `strip`."""
    state_shape: Callable[[Any], tuple[int, int, int]]
    """Heads, key and value dimension of the recurrent state."""


def install_mixer(module: nn.Module, dtype: torch.dtype) -> State:
    """Make `module` compute over strips; returns its state before the first token."""
    mixer = MIXERS[type(module).__name__]
    module.forward = types.MethodType(mixer.forward, module)
    weight = module.get_parameter("conv1d.weight")
    conv = torch.zeros(weight.shape[-1] - 1, weight.shape[0], dtype=dtype, device=weight.device)
    wide = _state_dtype(dtype, weight.device)
    return conv, torch.zeros(mixer.state_shape(module), dtype=wide, device=weight.device)


def qwen3_5_forward(
    self: Any, hidden_states: Tensor, *args: Any, strip: Strip, **kwargs: Any
) -> Tensor:
    """Qwen3.5's gated delta net: a projection each for q|k|v, z, b and a."""
    hidden = hidden_states[0]
    return _gated_delta_net(
        self,
        self.in_proj_qkv(hidden),
        self.in_proj_z(hidden),
        self.in_proj_b(hidden),
        self.in_proj_a(hidden),
        strip,
    )


def qwen3_next_forward(
    self: Any, hidden_states: Tensor, *args: Any, strip: Strip, **kwargs: Any
) -> Tensor:
    """Qwen3-Next's: two projections whose columns are interleaved by key head."""
    hidden = hidden_states[0]
    group = self.num_v_heads // self.num_k_heads
    widths = [self.head_k_dim, self.head_k_dim, group * self.head_v_dim, group * self.head_v_dim]
    by_head = self.in_proj_qkvz(hidden).unflatten(-1, (self.num_k_heads, -1))
    *mixed, z = (part.flatten(1) for part in by_head.split(widths, -1))
    by_head = self.in_proj_ba(hidden).unflatten(-1, (self.num_k_heads, -1))
    beta, step = (part.flatten(1) for part in by_head.split(group, -1))
    return _gated_delta_net(self, torch.cat(mixed, -1), z, beta, step, strip)


def _gated_delta_net(
    self: Any, mixed: Tensor, z: Tensor, beta: Tensor, step: Tensor, strip: Strip
) -> Tensor:
    """Convolution, delta rule, gated norm and output projection, `[1, T, hidden]`."""
    wide = _state_dtype(mixed.dtype, mixed.device)
    beta = beta.to(wide).sigmoid()
    gate = -self.A_log.to(wide).exp() * F.softplus(step.to(wide) + self.dt_bias)
    output = mixed.new_zeros(mixed.shape[0], self.num_v_heads, self.head_v_dim)
    for group in strip.groups:
        conv, state = group.states(self.layer_idx)
        inputs, conv = causal_conv(
            group.pack(mixed),
            self.conv1d.weight.squeeze(1),
            self.conv1d.bias,
            conv,
            group.lengths,
        )
        query, key, value = inputs.to(wide).split([self.key_dim, self.key_dim, self.value_dim], -1)
        query = l2_normalised(query.unflatten(-1, (-1, self.head_k_dim))) * self.head_k_dim**-0.5
        key = l2_normalised(key.unflatten(-1, (-1, self.head_k_dim)))
        value = value.unflatten(-1, (-1, self.head_v_dim))
        mixed_values, state = scan(
            _expand_heads(query, self.num_v_heads),
            _expand_heads(key, self.num_v_heads),
            value,
            group.masked(group.pack(gate)),
            group.masked(group.pack(beta)),
            state,
        )
        group.unpack(mixed_values, output)
        group.set_states(self.layer_idx, conv, state)
    normed = self.norm(output.flatten(0, 1), z.reshape(-1, self.head_v_dim))
    return self.out_proj(normed.view(1, mixed.shape[0], -1))


def mamba2_forward(
    self: Any, hidden_states: Tensor, *args: Any, strip: Strip, **kwargs: Any
) -> Tensor:
    """Granite's Mamba-2 layer."""
    hidden = hidden_states[0]
    z, mixed, steps = self.in_proj(hidden).split(
        [self.intermediate_size, self.conv_dim, self.num_heads], dim=-1
    )
    wide = _state_dtype(hidden.dtype, hidden.device)
    steps = F.softplus(widened(steps) + self.dt_bias).clamp(*self.time_step_limit).to(wide)
    decay = -self.A_log.to(wide).exp()
    rounded = torch.promote_types(hidden.dtype, torch.float32)
    output = hidden.new_zeros(hidden.shape[0], self.num_heads, self.head_dim, dtype=rounded)
    width = self.n_groups * self.ssm_state_size
    for group in strip.groups:
        conv, state = group.states(self.layer_idx)
        inputs, conv = causal_conv(
            group.pack(mixed),
            self.conv1d.weight.squeeze(1),
            self.conv1d.bias,
            conv,
            group.lengths,
        )
        values, key, query = inputs.to(wide).split([self.intermediate_size, width, width], -1)
        values = values.unflatten(-1, (-1, self.head_dim))
        step = group.masked(group.pack(steps))
        scanned, state = scan(
            _expand_heads(query.unflatten(-1, (self.n_groups, -1)), self.num_heads),
            _expand_heads(key.unflatten(-1, (self.n_groups, -1)), self.num_heads),
            values * step.unsqueeze(-1),
            step * decay,
            None,
            state,
        )
        group.unpack(scanned + self.D.to(wide)[:, None] * values, output)
        group.set_states(self.layer_idx, conv, state)
    normed = self.norm(output.flatten(1), z)
    return self.out_proj(normed.to(hidden.dtype).unsqueeze(0))


def _state_dtype(dtype: torch.dtype, device: torch.device) -> torch.dtype:
    """Of the recurrence and its state in a model of `dtype`."""
    return torch.promote_types(widened_dtype(dtype, device), torch.float32)


def _expand_heads(values: Tensor, num_heads: int) -> Tensor:
    """Repeat each of `[N, L, G, K]`'s groups for its consecutive heads: `[N, L, H, K]`."""
    repeats = num_heads // values.shape[2]
    return values if repeats == 1 else values.repeat_interleave(repeats, dim=2)


def _gated_delta_shape(module: Any) -> tuple[int, int, int]:
    return module.num_v_heads, module.head_k_dim, module.head_v_dim


def _mamba2_shape(module: Any) -> tuple[int, int, int]:
    return module.num_heads, module.ssm_state_size, module.head_dim


MIXERS: dict[str, Mixer] = {
    "Qwen3_5GatedDeltaNet": Mixer(qwen3_5_forward, _gated_delta_shape),
    "Qwen3_5MoeGatedDeltaNet": Mixer(qwen3_5_forward, _gated_delta_shape),
    "Qwen3NextGatedDeltaNet": Mixer(qwen3_next_forward, _gated_delta_shape),
    "GraniteMoeHybridMambaLayer": Mixer(mamba2_forward, _mamba2_shape),
}
