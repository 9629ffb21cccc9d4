"""Per-architecture hooks by Hugging Face model type (Octopus Table 8)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from harness_sdk.errors import ConfigError
from trainer_service.models.gated_delta_net import qwen3_5_forward, qwen3_next_forward
from trainer_service.models.mamba import granite_forward
from trainer_service.models.tree_forward import MixerForward

_ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
_DENSE = (*_ATTENTION, "gate_proj", "up_proj", "down_proj")
_DELTA_NET = ("in_proj_qkv", "in_proj_z", "out_proj")
_ATTENTION_KINDS = ("full_attention", "attention")
_RECURRENT_KINDS = ("linear_attention", "mamba")


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelHooks:
    """How one architecture computes a packed tree and where its LoRA sits."""

    lora_targets: tuple[str, ...]
    """Names of the linear layers that get an adapter."""
    mixers: Mapping[str, MixerForward] = field(default_factory=dict)
    """Forward of each recurrent mixer, by class name; empty for pure attention."""
    row_modules: tuple[str, ...] = ()
    """Classes of the dense feed-forward parts, `[1, T, D]` to `[1, T, D]`, each row alone."""
    logits_divisor: str = ""
    """Name of the config value that divides the logits; empty where none does."""

    def logit_scale(self, config: Any) -> float:
        """Factor of the logits."""
        return 1.0 / getattr(config, self.logits_divisor) if self.logits_divisor else 1.0


_MODELS: dict[str, ModelHooks] = {
    "llama": ModelHooks(lora_targets=_DENSE, row_modules=("LlamaMLP",)),
    "qwen2": ModelHooks(lora_targets=_DENSE, row_modules=("Qwen2MLP",)),
    "qwen3": ModelHooks(lora_targets=_DENSE, row_modules=("Qwen3MLP",)),
    # Mixtures of experts: attention (and DeltaNet) alone, the router stays as it is.
    "qwen3_moe": ModelHooks(lora_targets=_ATTENTION),
    "qwen3_5_text": ModelHooks(
        lora_targets=(*_DENSE, *_DELTA_NET),
        mixers={"Qwen3_5GatedDeltaNet": qwen3_5_forward},
        row_modules=("Qwen3_5MLP",),
    ),
    "qwen3_5_moe_text": ModelHooks(
        lora_targets=(*_ATTENTION, *_DELTA_NET),
        mixers={"Qwen3_5MoeGatedDeltaNet": qwen3_5_forward},
    ),
    "qwen3_next": ModelHooks(
        lora_targets=(*_ATTENTION, "in_proj_qkvz", "out_proj"),
        mixers={"Qwen3NextGatedDeltaNet": qwen3_next_forward},
    ),
    "granitemoehybrid": ModelHooks(
        lora_targets=(*_ATTENTION, "out_proj"),
        mixers={"GraniteMoeHybridMambaLayer": granite_forward},
        row_modules=("GraniteMoeHybridMLP",),
        logits_divisor="logits_scaling",
    ),
}


def model_hooks(config: Any) -> ModelHooks:
    """Hooks of the architecture that `config` describes.

    Args:
        config: Hugging Face config of the causal language model.

    Raises:
        ConfigError: No hooks for this architecture, or an attention kind that trees cannot use.
    """
    hooks = _MODELS.get(config.model_type)
    if hooks is None:
        raise ConfigError(
            "no packed-tree hooks for this architecture",
            value=config.model_type,
            limit=", ".join(sorted(_MODELS)),
            remedy="add an entry to trainer_service/models/registry.py",
        )
    for kind in _layer_kinds(config):
        if kind not in (*_ATTENTION_KINDS, *_RECURRENT_KINDS):
            raise ConfigError(
                "packed trees have no such layer",
                value=kind,
                limit=", ".join((*_ATTENTION_KINDS, *_RECURRENT_KINDS)),
                remedy="use a model without sliding or chunked attention",
            )
    return hooks


def default_mount_layers(config: Any) -> tuple[int, ...]:
    """Every full-attention layer of a hybrid; a middle quarter of a pure-attention model."""
    kinds = _layer_kinds(config)
    attention = tuple(layer for layer, kind in enumerate(kinds) if kind in _ATTENTION_KINDS)
    if len(attention) < len(kinds):
        return attention
    first = 3 * len(kinds) // 8
    return tuple(range(first, first + max(len(kinds) // 4, 1)))


def _layer_kinds(config: Any) -> list[str]:
    kinds = getattr(config, "layer_types", None)
    return list(kinds) if kinds else ["full_attention"] * config.num_hidden_layers
