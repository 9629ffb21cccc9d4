"""LoRA versions on the vLLM engine: side by side, checked, read back from what serves."""

from __future__ import annotations

import asyncio
import hashlib
import random
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from harness_sdk.errors import AdapterError
from tests.engine_cases import Play, save_adapter, span
from tests.reference import Reference
from tests.vllm.conftest import Served
from tests.vllm.models import servable_model

pytestmark = [
    pytest.mark.asyncio(loop_scope="session"),
    pytest.mark.slow,
    # PEFT 0.21 reads a property that transformers has renamed.
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated"),
]

# Random adapters this large amplify rounding; bfloat16 hybrids differ by their flat runs' noise.
TOLERANCES = {"float32": 1e-4, "bfloat16": 0.5}


async def test_versions_serve_side_by_side(adaptable: Served, tmp_path: Path) -> None:
    engine, family = adaptable.engine, adaptable.family
    tolerance = TOLERANCES["bfloat16" if family == "qwen3_5" else "float32"]
    layers = engine.info.mount_layers
    base = Play(
        engine=engine,
        reference=Reference(servable_model(family), layers),
        rng=random.Random(4),
    )
    root = await base.extend(None, 30)
    peer = await base.extend(root, 40)
    running = asyncio.create_task(base.turn(peer, 60, seed=1))
    plays: dict[int, Play] = {}
    for version in (1, 2):
        folder = tmp_path / str(version)
        model = save_adapter(folder, adaptable.folder, family, seed=version)
        await engine.load_adapter(version, str(folder))
        oracle = Reference(model.base_model.model.float(), layers)
        plays[version] = Play(engine=engine, reference=oracle, rng=base.rng, version=version)
    reader = await base.extend(root, 4, span(peer, 1, 38))
    turns = await asyncio.gather(*(p.turn(reader, 9, seed=1) for p in plays.values()))
    for version, turn in zip(plays, turns, strict=True):
        plays[version].check(turn, tolerance=tolerance)
    base.check(reader, await running, tolerance=tolerance)
    assert turns[0].sampled_logprobs != turns[1].sampled_logprobs
    # The running turn was never aborted, and each version computed its own root, peer and reader.
    refreshed = engine.stats().tokens_recomputed["refresh"]
    # The root is computed to its end before what mounts, so the peer starts behind it.
    assert refreshed == 2 * ((30 - 1) + (40 - 1) + (4 - 1))
    old = await plays[1].extend(reader, 5)
    plays[1].check(old, tolerance=tolerance)

    with pytest.raises(AdapterError, match="no room for another policy version"):
        await engine.load_adapter(3, str(tmp_path / "1"))
    await engine.unload_adapter(1)
    with pytest.raises(AdapterError, match="not loaded; got 1"):
        await plays[1].extend(reader, 3)
    plays[2].check(await plays[2].turn(reader, 3, seed=2), tolerance=tolerance)
    await engine.unload_adapter(2)
    await engine.forget_all()
    assert engine.stats().tokens_resident == 0


async def test_checksums_are_read_back_from_the_serving_buffers(
    adaptable: Served, tmp_path: Path
) -> None:
    engine = adaptable.engine
    save_adapter(tmp_path, adaptable.folder, adaptable.family)
    file = tmp_path / "adapter_model.safetensors"
    expected = {
        name: hashlib.sha256(tensor.float().numpy().astype("<f4").tobytes()).hexdigest()
        for name, tensor in load_file(file).items()
    }
    await engine.load_adapter(3, str(tmp_path))
    assert await engine.adapter_checksums(3) == expected
    assert await engine.adapter_checksums(0) == {}
    with pytest.raises(AdapterError, match="loaded already; got 3"):
        await engine.load_adapter(3, str(tmp_path))
    await engine.unload_adapter(3)


async def test_faulty_adapter_is_refused_and_the_old_one_serves(
    adaptable: Served, tmp_path: Path
) -> None:
    engine, family = adaptable.engine, adaptable.family
    save_adapter(tmp_path, adaptable.folder, family)
    await engine.load_adapter(1, str(tmp_path))
    served = await engine.adapter_checksums(1)
    file = tmp_path / "adapter_model.safetensors"
    good = load_file(file)
    name = next(name for name in good if "q_proj.lora_A" in name)
    save_file({key: value for key, value in good.items() if key != name}, file)
    with pytest.raises(AdapterError, match=f"lacks a tensor; got {name}"):
        await engine.load_adapter(2, str(tmp_path))
    save_adapter(tmp_path / "high", adaptable.folder, family, rank=16)
    with pytest.raises(AdapterError, match="rank is higher"):
        await engine.load_adapter(2, str(tmp_path / "high"))
    assert await engine.adapter_checksums(1) == served
    with pytest.raises(AdapterError, match="not loaded"):
        await engine.adapter_checksums(2)
    await engine.unload_adapter(1)
