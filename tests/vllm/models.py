"""Tiny random models of sizes that vLLM's CPU kernels take, and whose answers tell tokens apart."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

VOCAB = 300
DTYPES = {
    "llama": "float32",
    "qwen3": "float32",
    "qwen3_moe": "float32",
    "granitemoehybrid": "float32",
    # vLLM-CPU computes gated delta rules in bfloat16 alone.
    "qwen3_5": "bfloat16",
    "qwen3_5_moe": "bfloat16",
    "qwen3_next": "bfloat16",
}
MOE_FAMILIES = ("qwen3_moe", "qwen3_5_moe", "qwen3_next")
HYBRIDS = ("granitemoehybrid", "qwen3_5", "qwen3_5_moe", "qwen3_next")

_COMMON: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 2048,
}
_DENSE: dict[str, Any] = _COMMON | {"head_dim": 32, "num_hidden_layers": 4}
_WIDE: dict[str, Any] = _COMMON | {"hidden_size": 128}
_GATED_DELTA: dict[str, Any] = _WIDE | {
    "head_dim": 64,
    "num_hidden_layers": 6,
    "linear_key_head_dim": 64,
    "linear_value_head_dim": 64,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "layer_types": ["linear_attention", "linear_attention", "full_attention"] * 2,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 1e4,
        "partial_rotary_factor": 0.25,
    },
}
_EXPERTS: dict[str, Any] = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
}


@cache
def servable_model(family: str) -> Any:
    """A model in float32, one per process, so never change it; what vLLM serves is its copy."""
    import torch

    torch.manual_seed(0)
    model = _new_model(family)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0, 0.08)
    if DTYPES[family] == "bfloat16":
        _sharpen_hybrid(model)
        model = model.to(torch.bfloat16).float()
    return model.eval()


def save_servable_model(folder: Path, family: str) -> Path:
    """Write the model in the dtype that vLLM serves."""
    import copy

    import torch

    model = copy.deepcopy(servable_model(family)).to(getattr(torch, DTYPES[family]))
    model.save_pretrained(str(folder))
    return folder


def _new_model(family: str) -> Any:
    import transformers as hf

    if family == "llama":
        return hf.LlamaForCausalLM(hf.LlamaConfig(**_DENSE))
    if family == "qwen3":
        return hf.Qwen3ForCausalLM(hf.Qwen3Config(**_DENSE))
    if family == "qwen3_moe":
        experts = {k: v for k, v in _EXPERTS.items() if "shared" not in k}
        return hf.Qwen3MoeForCausalLM(hf.Qwen3MoeConfig(**_DENSE, **experts))
    if family == "granitemoehybrid":
        config = hf.GraniteMoeHybridConfig(
            **_WIDE,
            num_hidden_layers=4,
            layer_types=["mamba", "attention", "mamba", "attention"],
            num_local_experts=0,
            shared_intermediate_size=96,
            mamba_n_heads=8,
            mamba_d_head=32,
            mamba_d_state=64,
            mamba_n_groups=1,
            mamba_expand=2,
            position_embedding_type=None,
        )
        return hf.GraniteMoeHybridForCausalLM(config)
    if family == "qwen3_5":
        return hf.Qwen3_5ForCausalLM(hf.Qwen3_5TextConfig(**_GATED_DELTA))
    if family == "qwen3_5_moe":
        return hf.Qwen3_5MoeForCausalLM(hf.Qwen3_5MoeTextConfig(**_GATED_DELTA, **_EXPERTS))
    assert family == "qwen3_next", family
    return hf.Qwen3NextForCausalLM(hf.Qwen3NextConfig(**_GATED_DELTA, **_EXPERTS))


def _sharpen_hybrid(model: Any) -> None:
    """Attention that matters beside recurrent layers: a mount must show."""
    import torch

    with torch.no_grad():
        for layer in model.model.layers:
            if hasattr(layer, "self_attn"):
                layer.self_attn.q_norm.weight.fill_(0.8)
                layer.self_attn.k_norm.weight.fill_(0.8)
                layer.self_attn.o_proj.weight.normal_(0, 0.4)
                layer.self_attn.v_proj.weight.normal_(0, 0.2)
