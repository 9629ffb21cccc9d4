"""Small random models of every family, of head sizes that GPUs serve, and adapters for them."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.vllm_engine.shapes import LORA_TARGETS

VOCAB = 512

_COMMON: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 512,
    "intermediate_size": 512,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 8,
    "max_position_embeddings": 16_384,
}
_DENSE: dict[str, Any] = _COMMON | {"head_dim": 128}
_GATED_DELTA: dict[str, Any] = _COMMON | {
    "head_dim": 256,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "partial_rotary_factor": 0.25},
}
_EXPERTS: dict[str, Any] = {
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 256,
}
_SHARED: dict[str, Any] = _EXPERTS | {"shared_expert_intermediate_size": 256}
EXPERT_FAMILIES = ("dense_moe", "hybrid_moe", "next")
_EXPERT_TARGETS = ("gate_proj", "up_proj", "down_proj")


def save_model(folder: Path, family: str) -> Path:
    """Write a model of `family` in bfloat16."""
    import torch

    torch.manual_seed(0)
    model = _NEW[family]()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0, 0.04)
        for layer in model.model.layers:
            attention = getattr(layer, "self_attn", None)
            if attention is not None:
                _sharpen(attention)
            if family in EXPERT_FAMILIES:
                _calm(layer.mlp)
    model.to(torch.bfloat16).save_pretrained(str(folder))
    return folder


def save_adapter(folder: Path, model: Path) -> Path:
    """Write a random adapter of rank 8 on the targets that the model's family has."""
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    base = AutoModelForCausalLM.from_pretrained(str(model))
    names = {name.rpartition(".")[2] for name, _ in base.named_modules()}
    unserved = _EXPERT_TARGETS if hasattr(base.config, "num_experts_per_tok") else ()
    targets = [target for target in LORA_TARGETS if target in names and target not in unserved]
    adapted = get_peft_model(
        base, LoraConfig(r=8, lora_alpha=16, target_modules=targets, init_lora_weights=False)
    )
    adapted.save_pretrained(str(folder))
    return folder


def _sharpen(attention: Any) -> None:
    """Attention that matters: a mount must show."""
    for name in ("q_norm", "k_norm"):
        if hasattr(attention, name):
            getattr(attention, name).weight.fill_(0.8)
    attention.o_proj.weight.normal_(0, 0.2)
    attention.v_proj.weight.normal_(0, 0.1)


def _calm(mlp: Any) -> None:
    """Experts that agree in the most and a router that is sure, as those of trained models.

    Between independent experts, each near-tie of the router that bfloat16 tips the other way
    changes all that follows: flat runs are then 0.4 to 0.5 nats off float32.
    """
    import torch

    mlp.gate.weight.mul_(4)
    for own in (mlp.experts.gate_up_proj, mlp.experts.down_proj):
        shared = torch.empty_like(own[0]).normal_(0, 0.04)
        own.mul_(0.25).add_(shared, alpha=math.sqrt(1 - 0.25**2))


def _dense() -> Any:
    import transformers as hf

    return hf.Qwen3ForCausalLM(hf.Qwen3Config(**_DENSE))


def _llama() -> Any:
    import transformers as hf

    return hf.LlamaForCausalLM(hf.LlamaConfig(**_DENSE))


def _granite() -> Any:
    import transformers as hf

    config = hf.GraniteMoeHybridConfig(
        **_COMMON,
        layer_types=["mamba", "mamba", "mamba", "attention"] * 2,
        num_local_experts=0,
        num_experts_per_tok=0,
        shared_intermediate_size=512,
        mamba_n_heads=16,
        mamba_d_head=64,
        mamba_d_state=128,
        mamba_n_groups=1,
        mamba_expand=2,
        position_embedding_type=None,
    )
    return hf.GraniteMoeHybridForCausalLM(config)


def _dense_moe() -> Any:
    import transformers as hf

    return hf.Qwen3MoeForCausalLM(hf.Qwen3MoeConfig(**_DENSE, **_EXPERTS))


def _hybrid() -> Any:
    import transformers as hf

    config = hf.Qwen3_5TextConfig(**_GATED_DELTA, tie_word_embeddings=True)
    return hf.Qwen3_5ForCausalLM(config)


def _hybrid_moe() -> Any:
    import transformers as hf

    return hf.Qwen3_5MoeForCausalLM(hf.Qwen3_5MoeTextConfig(**_GATED_DELTA, **_SHARED))


def _next() -> Any:
    import transformers as hf

    return hf.Qwen3NextForCausalLM(hf.Qwen3NextConfig(**_GATED_DELTA, **_SHARED))


_NEW: dict[str, Callable[[], Any]] = {
    "dense": _dense,
    "llama": _llama,
    "granite": _granite,
    "dense_moe": _dense_moe,
    "hybrid": _hybrid,
    "hybrid_moe": _hybrid_moe,
    "next": _next,
}
