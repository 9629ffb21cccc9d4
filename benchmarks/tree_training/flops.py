"""Floating-point operations of a training step, counted from shapes; a multiply-add is two.

Linear layers, LoRA and the head per row, attention per visible query-key pair, the delta rule per
row as its recurrence states it (7 K V a head: decay, read, rank-one write, query), convolutions per
tap. Elementwise work is left out: it is bound by memory.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import nn

from trainer_service.policy import Policy
from trainer_service.strip import Strip
from tree_kernels.layout import TreeLayout


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFlops:
    """Forward operations of a model by what they are paid for."""

    linear: float
    """Frozen weights, per row."""
    lora: float
    """Adapters, per row."""
    recurrence: float
    """Delta rule and convolution, per row."""
    attention: float
    """Per query-key pair in one layer."""
    num_attention: int
    """Attention layers."""
    num_mounted: int
    """Of them, those that read mounts."""
    head: float
    """Per action."""

    def step(self, strip: Strip, *, recomputed: bool) -> float:
        """Of one forward and backward over `strip`.

        A frozen weight costs as much again in the backward, an adapter and a recurrence twice, an
        attention pair two and a half times (five products for two), the head once: its gradient.

        Args:
            strip: What is computed.
            recomputed: Whether the backward computes each layer's forward again.
        """
        rows, actions = strip.num_tokens, strip.action_source.shape[0]
        own, mounted = visible_pairs(strip.layout)
        pairs = self.num_attention * own + self.num_mounted * mounted
        again = 1.0 if recomputed else 0.0
        return (
            rows * self.linear * (2 + again)
            + rows * (self.lora + self.recurrence) * (3 + again)
            + pairs * self.attention * (3.5 + again)
            + actions * self.head * 2
        )


def model_flops(policy: Policy) -> ModelFlops:
    """Counts of `policy`'s model, from its modules."""
    modules: dict[str, Any] = dict(policy.modules())
    config = modules[""].config.get_text_config()
    # PEFT keeps the frozen layer under `base_layer` and the adapter under `lora_A` and `lora_B`.
    linears = {
        name: 2.0 * module.in_features * module.out_features
        for name, module in modules.items()
        if isinstance(module, nn.Linear)
    }
    head = linears.pop("lm_head")
    lora = sum(flops for name, flops in linears.items() if ".lora_" in name)
    kinds = list(getattr(config, "layer_types", None) or [])
    num_attention = sum("attention" in kind and kind != "linear_attention" for kind in kinds)
    num_attention = num_attention or config.num_hidden_layers
    return ModelFlops(
        linear=sum(linears.values()) - lora,
        lora=lora,
        recurrence=kinds.count("linear_attention") * _delta_rule(config) if kinds else 0.0,
        attention=4.0 * config.num_attention_heads * config.head_dim,
        num_attention=num_attention,
        num_mounted=len(policy.mount_layers),
        head=head,
    )


def _delta_rule(config: Any) -> float:
    heads = config.linear_num_value_heads
    key, value = config.linear_key_head_dim, config.linear_value_head_dim
    channels = 2 * config.linear_num_key_heads * key + heads * value
    return 7.0 * heads * key * value + 2.0 * config.linear_conv_kernel_dim * channels


def visible_pairs(layout: TreeLayout) -> tuple[float, float]:
    """Query-key pairs over ancestors and self, and those that mounts add."""
    lengths = np.diff(layout.cu_seqlens).astype(np.float64)
    above = np.zeros(layout.num_nodes)
    for node, parent in enumerate(layout.parents.tolist()):
        if parent >= 0:
            above[node] = above[parent] + lengths[parent]
    own = float((lengths * above + lengths * (lengths + 1) / 2).sum())
    mounted = sum(
        float(m.query_end - m.query_begin) * (m.key_end - m.key_begin) for m in layout.mounts
    )
    return own, mounted
