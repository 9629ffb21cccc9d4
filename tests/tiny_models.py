"""Tiny random models of every supported architecture, written as Hugging Face folders."""

from __future__ import annotations

from pathlib import Path
from typing import Any

FAMILIES = ("qwen3_5", "qwen3", "qwen2", "llama", "granitemoehybrid")

LORA_TARGETS: dict[str, list[str]] = {
    "qwen3_5": [
        "q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj",
        "in_proj_qkv", "in_proj_z", "out_proj",
    ],
    "qwen3": ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"],
    "qwen2": ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"],
    "llama": ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"],
    "granitemoehybrid": ["q_proj", "k_proj", "v_proj", "o_proj", "out_proj"],
}  # fmt: skip


KERNEL_HEADS: dict[str, dict[str, int]] = {
    "qwen3_5": {"linear_key_head_dim": 128, "linear_value_head_dim": 128},
    "granitemoehybrid": {"mamba_d_state": 128, "mamba_d_head": 64, "mamba_expand": 8},
}
"""Sizes that give the recurrences heads that have kernels on a GPU."""


def tiny_model(family: str, *, vocab_size: int = 300, seed: int = 0, **sizes: int) -> Any:
    """A random fp32 model of `family` with odd sizes and several attention layers.

    `sizes` replace those of the hybrids' configuration.
    """
    import torch
    import transformers as hf

    torch.manual_seed(seed)
    if family == "qwen3_5":
        heads: dict[str, Any] = {"linear_key_head_dim": 12, "linear_value_head_dim": 16, **sizes}
        config = hf.Qwen3_5TextConfig(
            vocab_size=vocab_size,
            hidden_size=48,
            intermediate_size=80,
            num_hidden_layers=6,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=16,
            linear_num_key_heads=2,
            linear_num_value_heads=4,
            **heads,
            rope_parameters={
                "rope_type": "default",
                "rope_theta": 1e4,
                "partial_rotary_factor": 0.5,
                "mrope_section": [2, 1, 1],
            },
            layer_types=["linear_attention", "linear_attention", "full_attention"] * 2,
        )
        return hf.Qwen3_5ForCausalLM(config).float().eval()
    common: dict[str, Any] = {
        "vocab_size": vocab_size,
        "hidden_size": 48,
        "intermediate_size": 80,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    }
    if family == "qwen3":
        config = hf.Qwen3Config(**common, num_hidden_layers=8, head_dim=16)
        return hf.Qwen3ForCausalLM(config).float().eval()
    if family == "qwen2":
        model = hf.Qwen2ForCausalLM(hf.Qwen2Config(**common, num_hidden_layers=4)).float().eval()
        for name, parameter in model.named_parameters():
            if name.endswith(".bias"):
                # Hugging Face begins them at 0, where nobody would miss them.
                torch.nn.init.normal_(parameter, std=0.2)
        return model
    if family == "llama":
        config = hf.LlamaConfig(**common, num_hidden_layers=8)
        return hf.LlamaForCausalLM(config).float().eval()
    if family == "granitemoehybrid":
        heads: dict[str, Any] = {
            "mamba_d_state": 16,
            "mamba_d_head": 16,
            "mamba_expand": 2,
            **sizes,
        }
        config = hf.GraniteMoeHybridConfig(
            **common,
            **heads,
            num_hidden_layers=4,
            layer_types=["mamba", "attention", "mamba", "attention"],
            num_local_experts=0,
            num_experts_per_tok=0,
            shared_intermediate_size=80,
            mamba_n_heads=6,
            mamba_n_groups=2,
            mamba_chunk_size=16,
            embedding_multiplier=1.5,
            logits_scaling=2.0,
            residual_multiplier=0.7,
            attention_multiplier=0.2,
        )
        return hf.GraniteMoeHybridForCausalLM(config).float().eval()
    raise ValueError(f"unknown family {family!r}; known: {FAMILIES}")


def save_tiny_model(
    folder: Path, family: str, *, vocab_size: int = 300, seed: int = 0, **sizes: int
) -> Path:
    """Write `tiny_model` to `folder` in Hugging Face form."""
    tiny_model(family, vocab_size=vocab_size, seed=seed, **sizes).save_pretrained(folder)
    return folder
