"""What is told of an adapter's tensors: the file's checksum only where the buffer holds them."""

from __future__ import annotations

import asyncio

import torch

from rollout_service.engine.transformers.adapters import Adapter, LoraWeights, tensor_checksum
from rollout_service.engine.vllm.lora import (
    LoadedAdapter,
    as_served,
    expected_tensors,
    lora_specs,
)

NAME = "model.layers.0.self_attn.q_proj"
PEFT_NAMES = [f"base_model.model.{NAME}.lora_{part}.weight" for part in "AB"]


def random_lora(scale: float, *, is_rounded: bool) -> LoraWeights:
    down, up = torch.randn(2, 12), torch.randn(16, 2)
    if is_rounded:
        down, up = down.bfloat16().float(), up.bfloat16().float()
    return LoraWeights(down=down, up=up, scale=scale)


async def told(lora: LoraWeights, *buffers: torch.Tensor) -> dict[str, str]:
    adapter = Adapter(modules={NAME: lora})
    expected: asyncio.Future = asyncio.get_running_loop().create_future()
    expected.set_result(expected_tensors(adapter, torch.bfloat16))
    loaded = LoadedAdapter(specs=lora_specs(adapter), expected=expected, request=None)
    down, up = map(tensor_checksum, buffers)
    return await loaded.checksums({NAME: (down, up)})


async def test_buffers_that_hold_the_file_s_rounding_tell_the_file_s_checksums() -> None:
    for scale in (1.0, 2.0, 0.3):
        for is_rounded in (True, False):
            lora = random_lora(scale, is_rounded=is_rounded)
            files = dict(zip(PEFT_NAMES, map(tensor_checksum, (lora.down, lora.up)), strict=True))
            assert await told(lora, *as_served(lora, torch.bfloat16)) == files


async def test_a_buffer_that_holds_anything_else_tells_its_own_checksum() -> None:
    for scale in (1.0, 2.0):
        for is_rounded in (True, False):
            lora = random_lora(scale, is_rounded=is_rounded)
            down, up = (buffer.clone() for buffer in as_served(lora, torch.bfloat16))
            up[3, 1] += 1
            found = await told(lora, down, up)
            assert found[PEFT_NAMES[0]] == tensor_checksum(lora.down)
            assert found[PEFT_NAMES[1]] == tensor_checksum(up)


async def test_a_module_without_buffers_is_told() -> None:
    adapter = Adapter(modules={NAME: random_lora(1.0, is_rounded=True)})
    expected: asyncio.Future = asyncio.get_running_loop().create_future()
    expected.set_result(expected_tensors(adapter, torch.bfloat16))
    loaded = LoadedAdapter(specs=lora_specs(adapter), expected=expected, request=None)
    assert await loaded.checksums({}) == dict.fromkeys(PEFT_NAMES, "not served")
