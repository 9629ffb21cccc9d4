"""What is told of an adapter's tensors: the file's checksum only where the buffer holds them."""

from __future__ import annotations

import torch

from rollout_service.engine.transformers.adapters import Adapter, LoraWeights, tensor_checksum
from rollout_service.engine.vllm.lora import (
    as_served,
    expected_tensors,
    lora_specs,
    told_checksums,
)

NAME = "model.layers.0.self_attn.q_proj"
PEFT_NAMES = [f"base_model.model.{NAME}.lora_{part}.weight" for part in "AB"]
FILE_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def random_lora(scale: float, dtype: torch.dtype) -> LoraWeights:
    return LoraWeights(
        down=torch.randn(2, 12).to(dtype), up=torch.randn(16, 2).to(dtype), scale=scale
    )


def told(lora: LoraWeights, *buffers: torch.Tensor) -> dict[str, str]:
    adapter = Adapter(modules={NAME: lora})
    down, up = map(tensor_checksum, buffers)
    expected = expected_tensors(adapter, torch.bfloat16)
    return told_checksums(lora_specs(adapter), expected, {NAME: (down, up)})


def test_buffers_that_hold_the_file_s_rounding_tell_the_file_s_checksums() -> None:
    for scale in (1.0, 2.0, 0.3):
        for dtype in FILE_DTYPES:
            lora = random_lora(scale, dtype)
            files = dict(zip(PEFT_NAMES, map(tensor_checksum, (lora.down, lora.up)), strict=True))
            assert told(lora, *as_served(lora, torch.bfloat16)) == files


def test_a_buffer_that_holds_anything_else_tells_its_own_checksum() -> None:
    for scale in (1.0, 2.0):
        for dtype in FILE_DTYPES:
            lora = random_lora(scale, dtype)
            down, up = (buffer.clone() for buffer in as_served(lora, torch.bfloat16))
            up[3, 1] += 1
            found = told(lora, down, up)
            assert found[PEFT_NAMES[0]] == tensor_checksum(lora.down)
            assert found[PEFT_NAMES[1]] == tensor_checksum(up)


def test_a_module_without_buffers_is_told() -> None:
    adapter = Adapter(modules={NAME: random_lora(1.0, torch.float32)})
    expected = expected_tensors(adapter, torch.bfloat16)
    assert told_checksums(lora_specs(adapter), expected, {}) == dict.fromkeys(
        PEFT_NAMES, "not served"
    )
