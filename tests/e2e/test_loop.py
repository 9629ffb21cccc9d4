"""Once round: an agent on the rollout service, episodes through Redis, steps, versions go live."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from harness_sdk import OctopusClient
from harness_sdk.errors import AdapterError
from tests.e2e.loop_world import RUN, LoopWorld, check_two_steps, loop_world, train_and_run
from tests.engine_cases import save_adapter, sharp_model
from tests.tiny_models import FAMILIES
from trainer_service.loop import train
from trainer_service.metrics import read_metrics


@contextlib.asynccontextmanager
async def _world(folder: Path, family: str, dtype: str = "float32") -> AsyncIterator[LoopWorld]:
    # Nearly uniform models would agree whatever they saw.
    (await asyncio.to_thread(sharp_model, family)).save_pretrained(folder / "model")
    async with loop_world(folder, folder / "model", dtype=dtype) as world:
        yield world


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
async def test_two_rl_steps_go_live_without_a_restart(family: str, tmp_path: Path) -> None:
    async with _world(tmp_path, family) as world:
        await check_two_steps(world, max_dlogp=5e-5)


@pytest.mark.slow
async def test_two_float16_steps_go_live_with_the_loss_scaled(tmp_path: Path) -> None:
    async with _world(tmp_path, "granitemoehybrid", "float16") as world:
        await check_two_steps(world, max_dlogp=5e-3, max_kl=1e-6)
        assert {record.dtype for record in await world.records()} == {"float16"}
    lines = read_metrics(world.config().folder / "metrics.jsonl")
    assert [line["optim/loss_scale"] for line in lines] == [65536.0, 65536.0]


@pytest.mark.slow
async def test_replica_that_keeps_old_weights_is_caught_within_one_step(tmp_path: Path) -> None:
    """It loads what it is told to, forgets it, and acknowledges all the same."""
    async with _world(tmp_path, "qwen3_5") as world:
        engine: Any = world.service.adapters._engine
        load = engine.load_adapter

        async def load_the_first(version: int, path: str) -> None:
            first = world.folder / "runs" / RUN / "adapters" / "1"
            await load(version, str(first) if version > 1 else path)

        engine.load_adapter = load_the_first
        with pytest.raises(AdapterError, match=r"replica-0, version 2.*differs") as caught:
            await train_and_run(world, world.config(max_steps=5), 5)
    assert "lora_B" in caught.value.value
    lines = read_metrics(world.config().folder / "metrics.jsonl")
    assert [line["policy/version"] for line in lines] == [1.0, 2.0]


@pytest.mark.slow
@pytest.mark.parametrize("num_steps", [5, pytest.param(20, marks=pytest.mark.soak)])
async def test_publishes_at_lr_zero_leave_divergence_and_weights_as_they_were(
    num_steps: int, tmp_path: Path
) -> None:
    async with _world(tmp_path, "qwen3_5") as world:
        start = tmp_path / "start"
        save_adapter(start, world.model, "qwen3_5")
        config = world.config(
            max_steps=num_steps,
            optim={"lr": 0.0},
            lora={"rank": 4, "alpha": 8.0, "adapter": start},
        )
        await train_and_run(world, config, num_steps, timeout_s=300.0)
        records = await world.records()
    lines = read_metrics(config.folder / "metrics.jsonl")
    # The adapter that the run starts from is version 1.
    assert [line["policy/version"] for line in lines] == [2.0 + n for n in range(num_steps)]
    sampled_by = {n.policy_version for r in records for n in r.nodes if any(n.sampled)}
    assert sampled_by == {1 + n for n in range(num_steps)}
    assert all(line["optim/grad_norm"] > 0.0 for line in lines)
    assert max(line["divergence/kl_mean"] for line in lines) < 1e-8
    assert max(line["divergence/dlogp_max"] for line in lines) <= 5e-5
    newest_folder = config.folder / "adapters" / str(1 + num_steps)
    newest = load_file(newest_folder / "adapter_model.safetensors")
    first = load_file(start / "adapter_model.safetensors")
    assert newest.keys() == first.keys()
    for name, tensor in newest.items():
        torch.testing.assert_close(tensor, first[name], rtol=0.0, atol=0.0)


@pytest.mark.slow
async def test_demonstrations_through_the_stream_teach(tmp_path: Path) -> None:
    async with _world(tmp_path, "qwen3_5") as world:
        async with OctopusClient.connect(world.service.address) as client:
            for _ in range(16):
                async with client.episode(task_id="t", primitives=()) as episode:
                    await episode.root.generate("Say it.", demonstration="forty-two")
                    await episode.root.done("forty-two")
                    await episode.close(reward=1.0)
        config = world.config(
            objective="sft", batch={"episodes_per_step": 4}, max_steps=4, optim={"lr": 3e-2}
        )
        await train(config, asyncio.Event())
        assert world.service.adapters.newest() == 4
    losses = [line["loss/total"] for line in read_metrics(config.folder / "metrics.jsonl")]
    assert losses[-1] < losses[0] - 0.5
