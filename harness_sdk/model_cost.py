"""What a token costs a model in floating-point operations, from its config.json alone."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from harness_sdk.errors import ConfigError

_GATED = ("qwen3_5", "qwen3_next")
"""Families whose query projection also yields the attention's output gate."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelCost:
    """A decoder's cost; one multiply-add counts as two operations.

    A token costs `2 * weights` (every linear layer and convolution that it passes, the active
    experts of a mixture alone), `recurrent` (the states of its recurrent layers), for each
    full-attention layer `4 * attention_width` a visible token (scores, then the weighted sum),
    and `2 * head_weights` where a token is sampled. Norms, activations and softmax are left out.
    """

    weights: int
    """Parameters of linear layers and convolutions that a token passes, the head left out."""
    head_weights: int
    """Hidden size times vocabulary."""
    attention_layers: int
    """Layers with full attention."""
    attention_width: int
    """Query heads times head size."""
    recurrent: int = 0
    """Operations a token in the states of all recurrent layers."""

    def node_flops(
        self,
        *,
        num_tokens: int,
        num_sampled: int,
        num_before: int,
        num_mounted: int,
        num_mount_layers: int,
    ) -> float:
        """Operations of a run of tokens, computed once after its prefix.

        Args:
            num_tokens: Length of the run; each token sees those before it and itself.
            num_sampled: How many of them were sampled.
            num_before: Tokens on the path before it, in all attention layers.
            num_mounted: Tokens mounted beside the path, in the mount layers alone.
            num_mount_layers: How many layers see them.
        """
        on_path = num_tokens * num_before + num_tokens * (num_tokens + 1) // 2
        pairs = self.attention_layers * on_path + num_mount_layers * num_tokens * num_mounted
        return float(
            num_tokens * (2 * self.weights + self.recurrent)
            + num_sampled * 2 * self.head_weights
            + 4 * self.attention_width * pairs
        )


def read_model_cost(path: Path) -> ModelCost:
    """The cost of the model that a config.json, or the folder around it, describes.

    Raises:
        ConfigError: There is no such file, or it describes another kind of model.
    """
    file = path / "config.json" if path.is_dir() else path
    try:
        config = cast("dict[str, Any]", json.loads(file.read_text("utf-8")))
    except (OSError, ValueError) as error:
        raise ConfigError(
            "no model configuration there", value=path, limit="a config.json, or a folder with one"
        ) from error
    try:
        return model_cost(config)
    except KeyError as error:
        raise ConfigError(
            "the configuration tells no cost",
            value=f"{config.get('model_type')} without {error}",
            limit="llama, qwen2, qwen3, qwen3_5, qwen3_next, granitemoehybrid and their mixtures",
        ) from error


def model_cost(config: Mapping[str, Any]) -> ModelCost:
    """The cost of the model that `config` describes.

    Args:
        config: Contents of a config.json.

    Raises:
        KeyError: A size that the formula needs is not there.
    """
    config = config.get("text_config", config)
    layers = _layer_types(config)
    recurrent = _ssd if "mamba_n_heads" in config else _delta_rule
    mixers = {"full_attention": _attention, "linear_attention": recurrent, "mamba": _ssd}
    mixed = [mixers[kind](config) for kind in layers]
    feeds = [_feed_forward(config, index) for index in range(len(layers))]
    return ModelCost(
        weights=sum(weights for weights, _ in mixed) + sum(feeds),
        head_weights=config["hidden_size"] * config["vocab_size"],
        attention_layers=layers.count("full_attention"),
        attention_width=config["num_attention_heads"] * _head_size(config),
        recurrent=sum(recurrent for _, recurrent in mixed),
    )


def _layer_types(config: Mapping[str, Any]) -> list[str]:
    given = config.get("layer_types") or config.get("layers_block_type")
    if given is None:
        return ["full_attention"] * config["num_hidden_layers"]
    return ["full_attention" if kind == "attention" else str(kind) for kind in given]


def _head_size(config: Mapping[str, Any]) -> int:
    return config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]


def _attention(config: Mapping[str, Any]) -> tuple[int, int]:
    """Weights of q, k, v and o; no recurrent state."""
    gates = str(config["model_type"]).startswith(_GATED)
    query = config["num_attention_heads"] * _head_size(config)
    shared = config["num_key_value_heads"] * _head_size(config)
    return config["hidden_size"] * ((3 if gates else 2) * query + 2 * shared), 0


def _delta_rule(config: Mapping[str, Any]) -> tuple[int, int]:
    """Weights of a gated delta rule layer; its state is read, corrected and read again."""
    heads, key_size = config["linear_num_value_heads"], config["linear_key_head_dim"]
    value_size = config["linear_value_head_dim"]
    key, value = config["linear_num_key_heads"] * key_size, heads * value_size
    mixed = 2 * key + value
    projected = mixed + value + 2 * heads
    weights = config["hidden_size"] * (projected + value) + mixed * config["linear_conv_kernel_dim"]
    return weights, 6 * heads * key_size * value_size


def _ssd(config: Mapping[str, Any]) -> tuple[int, int]:
    """Weights of a Mamba-2 layer; its state is written and read."""
    inner = config["mamba_expand"] * config["hidden_size"]
    state, heads = config["mamba_d_state"], config["mamba_n_heads"]
    mixed = inner + 2 * config["mamba_n_groups"] * state
    projected = inner + mixed + heads
    weights = config["hidden_size"] * (projected + inner) + mixed * config["mamba_d_conv"]
    return weights, 4 * inner * state


def _feed_forward(config: Mapping[str, Any], layer: int) -> int:
    """Weights of one layer's gated MLP, or of its router, active and shared experts."""
    hidden = config["hidden_size"]
    experts = config.get("num_experts") or config.get("num_local_experts") or 0
    shared = config.get("shared_expert_intermediate_size") or 0
    if str(config["model_type"]).startswith("granitemoe"):
        shared = config["shared_intermediate_size"]
        routed = config["intermediate_size"]
    elif experts and _is_sparse(config, layer):
        routed = config["moe_intermediate_size"]
    else:
        return 3 * hidden * config["intermediate_size"]
    router = hidden * experts
    # The shared expert of the Qwen families has a gate of one output.
    gate = hidden if config.get("shared_expert_intermediate_size") else 0
    active = (config.get("num_experts_per_tok") or 0) if experts else 0
    return router + gate + 3 * hidden * (active * routed + shared)


def _is_sparse(config: Mapping[str, Any], layer: int) -> bool:
    dense = layer in config.get("mlp_only_layers", ())
    return not dense and (layer + 1) % config.get("decoder_sparse_step", 1) == 0
