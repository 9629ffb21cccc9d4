"""Tiny random mixture-of-experts models of every supported architecture."""

from __future__ import annotations

from pathlib import Path
from typing import Any

MOE_FAMILIES = ("qwen3_moe", "qwen3_5_moe", "qwen3_next")


def tiny_moe_model(family: str, *, vocab_size: int = 300, seed: int = 0) -> Any:
    """A random fp32 model of `family` with four experts, two of them active."""
    import torch
    import transformers as hf

    torch.manual_seed(seed)
    common: dict[str, Any] = {
        "vocab_size": vocab_size,
        "hidden_size": 48,
        "intermediate_size": 80,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "moe_intermediate_size": 32,
        "num_experts": 4,
        "num_experts_per_tok": 2,
    }
    if family == "qwen3_moe":
        config = hf.Qwen3MoeConfig(**common, num_hidden_layers=8)
        return hf.Qwen3MoeForCausalLM(config).float().eval()
    common |= {
        "num_hidden_layers": 4,
        "layer_types": ["linear_attention", "full_attention"] * 2,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 12,
        "linear_value_head_dim": 16,
        "shared_expert_intermediate_size": 32,
    }
    rope = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}
    if family == "qwen3_next":
        config = hf.Qwen3NextConfig(**common, rope_parameters=rope)
        return hf.Qwen3NextForCausalLM(config).float().eval()
    if family == "qwen3_5_moe":
        rope_3d = {**rope, "mrope_section": [2, 1, 1]}
        config = hf.Qwen3_5MoeTextConfig(**common, rope_parameters=rope_3d)
        return hf.Qwen3_5MoeForCausalLM(config).float().eval()
    raise ValueError(f"unknown family {family!r}; known: {MOE_FAMILIES}")


def save_tiny_moe_model(folder: Path, family: str) -> Path:
    """Write `tiny_moe_model` to `folder` in Hugging Face form."""
    tiny_moe_model(family).save_pretrained(folder)
    return folder
