"""Norms and feed-forward activations that run as one kernel on a GPU.

Hugging Face writes them as chains of float32 operators, which on a GPU take as long as attention.
On the CPU, in float64 and under weights that learn, its own forward stays.
"""

from __future__ import annotations

from collections.abc import Callable
from types import MethodType
from typing import Any

import torch
from torch import nn

from tree_kernels.rms_norm import rms_norm
from tree_kernels.swiglu import swiglu


def use_fused(model: nn.Module) -> None:
    """Let the known norms and feed-forward parts of `model` run fused where they can."""
    for module in model.modules():
        forward = _FORWARDS.get(type(module).__name__)
        if forward is not None:
            module.forward = MethodType(forward, module)


def _plain_norm(self: Any, x: torch.Tensor) -> torch.Tensor:
    """Llama's, Qwen2's, Qwen3's and Granite's: `weight * norm(x)`."""
    if not _runs_fused(x, self.weight):
        return type(self).forward(self, x)
    return rms_norm(x, self.weight, eps=self.variance_epsilon)


def _zero_centred_norm(self: Any, x: torch.Tensor) -> torch.Tensor:
    """Qwen3.5's and Qwen3-Next's: `(1 + weight) * norm(x)`."""
    if not _runs_fused(x, self.weight):
        return type(self).forward(self, x)
    return rms_norm(x, 1.0 + self.weight.float(), eps=self.eps)


def _gated_norm(self: Any, hidden_states: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
    """The DeltaNet's: `weight * norm(x) * silu(gate)`."""
    if not _runs_fused(hidden_states, self.weight):
        return type(self).forward(self, hidden_states, gate)
    return rms_norm(hidden_states, self.weight, gate, eps=self.variance_epsilon)


def _norm_of_gated(self: Any, hidden_states: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
    """Mamba-2's: `weight * norm(x * silu(gate))`."""
    if not _runs_fused(hidden_states, self.weight):
        return type(self).forward(self, hidden_states, gate)
    return rms_norm(swiglu(gate, hidden_states), self.weight, eps=self.variance_epsilon)


def _feed_forward(self: Any, x: torch.Tensor) -> torch.Tensor:
    """`down(silu(gate(x)) * up(x))`."""
    if not _runs_fused(x, self.gate_proj.weight) or self.config.hidden_act != "silu":
        return type(self).forward(self, x)
    return self.down_proj(swiglu(self.gate_proj(x), self.up_proj(x)))


def _runs_fused(x: torch.Tensor, weight: torch.Tensor) -> bool:
    """A norm's kernel gives its weight no gradient; a LoRA layer's weight is the frozen one."""
    return x.is_cuda and x.dtype != torch.float64 and not weight.requires_grad


_FORWARDS: dict[str, Callable[..., torch.Tensor]] = {
    **dict.fromkeys(
        (
            "LlamaRMSNorm",
            "Qwen2RMSNorm",
            "Qwen3RMSNorm",
            "Qwen3MoeRMSNorm",
            "GraniteMoeHybridRMSNorm",
        ),
        _plain_norm,
    ),
    **dict.fromkeys(
        ("Qwen3_5RMSNorm", "Qwen3_5MoeRMSNorm", "Qwen3NextRMSNorm"), _zero_centred_norm
    ),
    **dict.fromkeys(
        ("Qwen3_5RMSNormGated", "Qwen3_5MoeRMSNormGated", "Qwen3NextRMSNormGated"), _gated_norm
    ),
    "GraniteMoeHybridRMSNormGated": _norm_of_gated,
    **dict.fromkeys(("LlamaMLP", "Qwen2MLP", "Qwen3MLP", "Qwen3_5MLP"), _feed_forward),
}
"""By the module's class."""
