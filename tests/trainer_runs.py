"""A trainer's runs over a small stream, and what they leave: the same whatever was killed."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from harness_sdk import control
from harness_sdk.record import EpisodeRecord, record_to_bytes
from tests.random_records import random_record
from trainer_service.config import TrainerConfig
from trainer_service.stream import RedisLink

NUM_GROUPS, GROUP_SIZE, MAX_STEPS = 4, 2, 4


def episodes() -> list[EpisodeRecord]:
    """Groups whose episodes arrive interleaved, with a failed episode and a duplicate between."""
    records = []
    for index in range(NUM_GROUPS * GROUP_SIZE):
        record = random_record(
            np.random.default_rng(index),
            300,
            episode_id=f"episode-{index}",
            group_id=f"group-{index % NUM_GROUPS}",
            num_events=4,
            mount_layers=(2, 5),
            reward=float(index < NUM_GROUPS),
        )
        records.append(record)
    failed = replace(
        records[0], episode_id="failed", group_id="group-3", stop_reason="engine_error"
    )
    return [*records[:5], failed, records[2], *records[5:]]


def run_config(folder: Path, model_path: Path, run: str, **fields: Any) -> TrainerConfig:
    """A run of few steps that publishes nothing."""
    return TrainerConfig.model_validate(
        {
            "run": run,
            "run_folder": folder,
            "max_steps": MAX_STEPS,
            "model": {"path": model_path},
            "lora": {"rank": 2, "alpha": 4.0},
            "optim": {"lr": 1e-2, "schedule": "cosine", "warmup_steps": 1},
            "publish": {"enabled": False},
            **fields,
        }
    )


def stream_config(folder: Path, model: Path, run: str, url: str, **fields: Any) -> TrainerConfig:
    """One group a step from the stream."""
    return run_config(
        folder,
        model,
        run,
        redis={"url": url},
        # Group 3 is complete with one finished and one failed episode, and dropped: the step
        # that would need it never comes.
        max_steps=3,
        batch={
            "groups_per_step": 1,
            "group_size": GROUP_SIZE,
            "max_policy_lag": 10,
            "max_strip_tokens": 100,
        },
        **fields,
    )


async def fill(link: RedisLink, run: str) -> None:
    """Write all `episodes` to the stream."""
    for record in episodes():
        fields = {control.RECORD_FIELD: record_to_bytes(record)}
        await link.client.xadd(control.episodes_key(run), fields)


def final(config: TrainerConfig) -> tuple[bytes, dict[str, Any], dict[str, Any]]:
    """Adapter, optimiser and random state, and the counters of the newest checkpoint."""
    folder = max((config.folder / "checkpoints").iterdir())
    adapter = (folder / "adapter" / control.ADAPTER_FILE).read_bytes()
    tensors = torch.load(folder / "optimizer.pt", weights_only=True)
    return adapter, tensors, json.loads((folder / "state.json").read_text())


def assert_equal(one: Any, other: Any) -> None:
    """Bit for bit, through dicts and lists."""
    if isinstance(one, torch.Tensor):
        assert torch.equal(one, other)
    elif isinstance(one, dict):
        assert one.keys() == other.keys()
        for key in one:
            assert_equal(one[key], other[key])
    elif isinstance(one, list | tuple):
        assert len(one) == len(other)
        for a, b in zip(one, other, strict=True):
            assert_equal(a, b)
    else:
        assert one == other
