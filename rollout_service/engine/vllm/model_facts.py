"""What a model folder says about its layers and limits, read without loading weights."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from harness_sdk.errors import ConfigError
from harness_sdk.fingerprints import model_hash
from rollout_service.engine.mount_layers import choose_mount_layers

_ATTENTION = ("full_attention", "attention")
_RECURRENT = ("linear_attention", "mamba")
_NUM_EXPERTS = ("num_experts", "num_local_experts")


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFacts:
    """What a checkpoint's configuration says."""

    model_hash: str
    vocab_size: int
    max_positions: int
    attention_layers: tuple[int, ...]
    num_state_groups: int
    """State blocks that a cursor takes: vLLM groups recurrent layers in sets as large as that of
    the attention layers. 0 without recurrent layers."""
    has_experts: bool
    """Whether some layers route tokens among experts."""

    def mount_layers(self, chosen: Sequence[int] | None) -> tuple[int, ...]:
        """Layers that read mounts; see `choose_mount_layers`.

        Raises:
            ConfigError: `chosen` is empty, names a layer without attention, or is a part of a
                hybrid's attention layers.
        """
        is_hybrid = self.num_state_groups > 0
        layers = choose_mount_layers(self.attention_layers, is_hybrid=is_hybrid, chosen=chosen)
        if is_hybrid and layers != self.attention_layers:
            raise ConfigError(
                "vLLM mounts into all attention layers of a hybrid",
                value=list(layers),
                limit=list(self.attention_layers),
                remedy="leave mount_layers unset, or serve with engine.name=transformers",
            )
        return layers


def read_facts(model_path: str) -> ModelFacts:
    """Read a folder's configuration.

    Raises:
        ConfigError: A layer kind that cannot be served.
    """
    from transformers import AutoConfig

    config: Any = AutoConfig.from_pretrained(model_path).get_text_config()
    kinds = getattr(config, "layer_types", None) or ["attention"] * config.num_hidden_layers
    unknown = sorted(set(kinds) - {*_ATTENTION, *_RECURRENT})
    attention = tuple(index for index, kind in enumerate(kinds) if kind in _ATTENTION)
    if unknown or not attention:
        raise ConfigError(
            "layer kinds are not served",
            value=unknown or kinds,
            limit=f"{_ATTENTION} with or without {_RECURRENT}",
        )
    return ModelFacts(
        model_hash=model_hash(model_path),
        vocab_size=int(config.vocab_size),
        max_positions=int(config.max_position_embeddings),
        attention_layers=attention,
        num_state_groups=-(-(len(kinds) - len(attention)) // len(attention)),
        has_experts=any((getattr(config, name, None) or 0) > 1 for name in _NUM_EXPERTS),
    )
