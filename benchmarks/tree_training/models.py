"""Policies of the real shape with random weights, made where they compute."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from benchmarks.vllm_engine.shapes import shape_config
from trainer_service.policy import LoraOptions, Policy

RANK = 64


def random_policy(shape: str, device: str, *, checkpointing: bool) -> Policy:
    """A policy with LoRA of rank 64 on all of the family's targets.

    Args:
        shape: Of `benchmarks.vllm_engine.shapes`.
        device: On `cuda` the weights are bfloat16, else float32.
        checkpointing: Keep one activation per layer.
    """
    return Policy.from_model(
        random_model(shape, device),
        model_path=Path("."),
        lora=LoraOptions(rank=RANK, alpha=2.0 * RANK),
        activation_checkpointing=checkpointing,
    )


def random_model(shape: str, device: str) -> Any:
    """The Hugging Face model of a shape."""
    import transformers as hf

    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    torch.manual_seed(0)
    with torch.device(device):
        return hf.AutoModelForCausalLM.from_config(shape_config(shape), dtype=dtype).eval()
