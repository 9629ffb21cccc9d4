"""Gated DeltaNet mixers of Qwen3.5 and Qwen3-Next on a packed tree."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from transformers.activations import ACT2FN

from trainer_service.models.tree_forward import PackedTree
from tree_kernels.causal_conv import tree_causal_conv
from tree_kernels.gated_delta_rule import tree_gated_delta_rule_with_states
from tree_kernels.rowwise import delta_gates, l2_normalised


def qwen3_5_forward(
    self: Any, hidden_states: torch.Tensor, *, tree: PackedTree, **_: Any
) -> torch.Tensor:
    """`Qwen3_5GatedDeltaNet`: separate projections for q|k|v, z, b and a."""
    mixed = self.in_proj_qkv(hidden_states)[0]
    gate = self.in_proj_z(hidden_states)[0]
    beta = self.in_proj_b(hidden_states)[0]
    step = self.in_proj_a(hidden_states)[0]
    return _delta_net(self, mixed, gate, beta, step, tree)


def qwen3_next_forward(
    self: Any, hidden_states: torch.Tensor, *, tree: PackedTree, **_: Any
) -> torch.Tensor:
    """`Qwen3NextGatedDeltaNet`: two projections whose columns are interleaved by key head."""
    by_head = self.in_proj_qkvz(hidden_states)[0].unflatten(-1, (self.num_k_heads, -1))
    group = self.num_v_heads // self.num_k_heads
    values = group * self.head_v_dim
    query, key, value, gate = by_head.split(
        [self.head_k_dim, self.head_k_dim, values, values], dim=-1
    )
    step_and_beta = self.in_proj_ba(hidden_states)[0].unflatten(-1, (self.num_k_heads, -1))
    beta, step = step_and_beta.split([group, group], dim=-1)
    mixed = torch.cat([query.flatten(1), key.flatten(1), value.flatten(1)], dim=-1)
    return _delta_net(self, mixed, gate.flatten(1), beta.flatten(1), step.flatten(1), tree)


def _delta_net(
    self: Any,
    mixed: torch.Tensor,
    gate: torch.Tensor,
    beta: torch.Tensor,
    step: torch.Tensor,
    tree: PackedTree,
) -> torch.Tensor:
    """Convolution, delta rule, gated norm and output projection, `[1, T, D]`."""
    rows = mixed.shape[0]
    taps = self.conv1d.weight[:, 0]
    mixed = tree.with_context(self.layer_idx, mixed, taps.shape[1])
    mixed = tree_causal_conv(
        mixed, taps, self.conv1d.bias, tree.layout, silu=activates_in_convolution(self, mixed)
    )
    recurrence = partial(_recurrence, self, tree)
    out = tree.recur(self.layer_idx, recurrence, mixed, beta, step, self.A_log, self.dt_bias)
    normed = self.norm(out.reshape(-1, self.head_v_dim), gate.reshape(-1, self.head_v_dim))
    return self.out_proj(normed.view(1, rows, -1))


def activates_in_convolution(mixer: Any, mixed: torch.Tensor) -> bool:
    """Whether the convolution applies the mixer's activation; if not, the recurrence does.

    On the CPU the recurrence widens what it is given before the activation, as the rollout's does.
    """
    return mixer.activation == "silu" and mixed.device.type != "cpu"


def _recurrence(
    self: Any,
    tree: PackedTree,
    mixed: torch.Tensor,
    beta: torch.Tensor,
    step: torch.Tensor,
    a_log: torch.Tensor,
    dt_bias: torch.Tensor,
    initial: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Delta rule of the convolved q|k|v, `[T, HV, V]`, and the states to leave."""
    if not activates_in_convolution(self, mixed):
        mixed = ACT2FN[self.activation](mixed)
    query, key, value = mixed.split([self.key_dim, self.key_dim, self.value_dim], dim=-1)
    log_decay, strength = delta_gates(step, beta, a_log, dt_bias)
    return tree_gated_delta_rule_with_states(
        l2_normalised(query.unflatten(-1, (self.num_k_heads, self.head_k_dim))),
        l2_normalised(key.unflatten(-1, (self.num_k_heads, self.head_k_dim))),
        value.unflatten(-1, (self.num_v_heads, self.head_v_dim)),
        log_decay,
        strength,
        tree.recurrent_layout,
        initial_states=initial,
        end_nodes=tree.end_nodes,
    )
