"""Several processes of one trainer: what they compute together is what one computes alone."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from harness_sdk import control
from harness_sdk.record import record_to_bytes
from tests.random_records import random_record
from tests.tiny_models import save_tiny_model
from tests.trainer_process import run_trainer
from tests.trainer_ranks import run_ranks
from tests.trainer_runs import run_config
from tests.valkey import embedded_valkey
from trainer_service.config import TrainerConfig
from trainer_service.metrics import read_metrics
from trainer_service.sections import RanksOptions
from trainer_service.stream import RedisLink

GROUP_SIZE, NUM_STEPS = 3, 3


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("model"), "qwen3_5")


@pytest.fixture
async def redis_url(tmp_path: Path) -> AsyncIterator[str]:
    async with embedded_valkey(tmp_path / "valkey") as url:
        link = RedisLink(url)
        for run in ("alone", "together"):
            for index in range(GROUP_SIZE * NUM_STEPS):
                record = random_record(
                    np.random.default_rng(index),
                    300,
                    episode_id=f"episode-{index}",
                    group_id=f"group-{index // GROUP_SIZE}",
                    num_events=3 + index,
                    mount_layers=(2, 5),
                    reward=float(index % GROUP_SIZE == 0),
                )
                fields: dict[Any, Any] = {control.RECORD_FIELD: record_to_bytes(record)}
                await link.client.xadd(control.episodes_key(run), fields)
        await link.close()
        yield url


def _config(folder: Path, model: Path, run: str, url: str) -> TrainerConfig:
    return run_config(
        folder, model, run,
        # Adam divides by the gradient's size: rounding of what is nearly 0 would be a whole step.
        model={"path": model, "dtype": "float64"},
        redis={"url": url},
        optim={"lr": 1e-3, "schedule": "cosine", "warmup_steps": 1, "decay_steps": NUM_STEPS},
        loss={"kl_coef": 0.01},
        max_steps=NUM_STEPS,
        batch={
            "groups_per_step": 1, "group_size": GROUP_SIZE, "max_policy_lag": 9,
            "max_strip_tokens": 60,
        },
    )  # fmt: skip


def _adapter(config: TrainerConfig) -> dict[str, torch.Tensor]:
    return load_file(config.folder / "adapters" / str(NUM_STEPS) / control.ADAPTER_FILE)


@pytest.mark.slow
async def test_two_processes_equal_one_through_a_death_and_other_numbers_and_shards(
    tmp_path: Path, model: Path, redis_url: str
) -> None:
    alone = _config(tmp_path, model, "alone", redis_url)
    for step in range(1, NUM_STEPS + 1):
        # Started anew as often: checkpoints hold adapters in float32.
        assert await run_trainer(alone.model_copy(update={"max_steps": step})) == 0
    together = _config(tmp_path, model, "together", redis_url)
    sharded = together.model_copy(update={"ranks": RanksOptions(sharding="fsdp")})
    code, output = await run_ranks(sharded, 2, dies=(1, 2))
    assert code != 0
    assert "another process of this trainer is gone; got process 1 of 2" in output
    assert [path.name for path in (together.folder / "adapters").iterdir()] == ["1"]
    # Resumed by one process, and from there by two again, whose weights are whole.
    assert await run_trainer(together.model_copy(update={"max_steps": 2})) == 0
    code, output = await run_ranks(together, 2)
    assert code == 0, output
    one, two = (read_metrics(c.folder / "metrics.jsonl") for c in (alone, together))
    assert [line["ranks/size"] for line in two] == [2.0, 1.0, 2.0]
    assert [line["policy/version"] for line in two] == [1.0, 2.0, 3.0]
    for a, b in zip(one, two, strict=True):
        for name in (
            "loss/total", "optim/grad_norm", "tokens/packed", "tokens/flat", "tokens/actions",
            "divergence/kl_mean", "divergence/kl_max", "objective/reference_kl",
        ):  # fmt: skip
            assert b[name] == pytest.approx(a[name], rel=1e-8, abs=1e-15), name
    wanted, found = _adapter(alone), _adapter(together)
    assert wanted.keys() == found.keys()
    for name, tensor in wanted.items():
        assert float((found[name] - tensor).abs().max()) <= 1e-6
    link = RedisLink(redis_url)
    for run in ("alone", "together"):
        pending = await link.client.xpending(control.episodes_key(run), "trainer")
        assert pending["pending"] == 0
    await link.close()


async def test_a_process_with_other_settings_is_refused_with_what_differs(
    tmp_path: Path, model: Path
) -> None:
    config = _config(tmp_path, model, "r", "redis://127.0.0.1:1")
    own = ("--model.dtype", "float16", "--loss.clip-high", "0.5", "--model.activation-tile-tokens")
    code, output = await run_ranks(config, 2, followers_own=(*own, "16384"))
    assert code != 0
    told = (
        "process 1 of the trainer has other settings than the one that leads; got model.dtype"
        " float16, loss.clip_high 0.5; allowed: model.dtype float64, loss.clip_high 0.28;"
    )
    # Both say it: whose log is read first is the reader's choice.
    assert output.count(f"octopus trainer: {told}") == 2
