"""Mamba-2 mixer of Granite 4 H on a packed tree."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from transformers.activations import ACT2FN

from trainer_service.models.gated_delta_net import activates_in_convolution
from trainer_service.models.tree_forward import PackedTree
from tree_kernels.causal_conv import tree_causal_conv
from tree_kernels.ssd import tree_ssd_with_states


def granite_forward(
    self: Any, hidden_states: torch.Tensor, *, tree: PackedTree, **_: Any
) -> torch.Tensor:
    """`GraniteMoeHybridMambaLayer`; calls `out_proj` itself, so its LoRA is never skipped."""
    rows = hidden_states.shape[1]
    gate, mixed, step = self.in_proj(hidden_states)[0].split(
        [self.intermediate_size, self.conv_dim, self.num_heads], dim=-1
    )
    taps = self.conv1d.weight[:, 0]
    mixed = tree.with_context(self.layer_idx, mixed, taps.shape[1])
    mixed = tree_causal_conv(
        mixed, taps, self.conv1d.bias, tree.layout, silu=activates_in_convolution(self, mixed)
    )
    recurrence = partial(_recurrence, self, tree)
    out = tree.recur(self.layer_idx, recurrence, mixed, step, self.A_log, self.dt_bias, self.D)
    normed = self.norm(out.reshape(1, rows, -1), gate[None])
    return self.out_proj(normed.to(hidden_states.dtype))


def _recurrence(
    self: Any,
    tree: PackedTree,
    mixed: torch.Tensor,
    step: torch.Tensor,
    a_log: torch.Tensor,
    dt_bias: torch.Tensor,
    skip: torch.Tensor,
    initial: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """SSD of the convolved x|B|C, `[T, H, P]`, and the states to leave."""
    state_width = self.n_groups * self.ssm_state_size
    if not activates_in_convolution(self, mixed):
        mixed = ACT2FN[self.activation](mixed)
    x, b, c = mixed.split([self.intermediate_size, state_width, state_width], dim=-1)
    step = F.softplus(step + dt_bias.to(step.dtype))
    return tree_ssd_with_states(
        x.unflatten(-1, (self.num_heads, self.head_dim)),
        step.clamp(self.time_step_limit[0], self.time_step_limit[1]),
        -_wide(a_log).exp(),
        b.unflatten(-1, (self.n_groups, self.ssm_state_size)),
        c.unflatten(-1, (self.n_groups, self.ssm_state_size)),
        skip,
        tree.recurrent_layout,
        initial_states=initial,
        end_nodes=tree.end_nodes,
    )


def _wide(values: torch.Tensor) -> torch.Tensor:
    return values if values.dtype == torch.float64 else values.float()
