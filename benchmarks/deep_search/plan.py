"""How a run is set: its length, and the settings of the services that follow from it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import SecretStr

from harness_sdk.cli.models import resolve_model, rollout_for_model
from harness_sdk.cli.stack_config import StackConfig
from harness_sdk.errors import ConfigError

RUN = "deep-search"
STOP_S = 8.0
"""What a service has to stop."""

GPU_ARGUMENTS = {
    "attention_backend": "FLASH_ATTN",
    # A pool of a fixed size: profiling breaks off where the trainer frees memory meanwhile.
    "kv_cache_memory_bytes": 12 << 30,
    # Nothing is compiled, and decoding is captured at the sizes that occur: a start of seconds.
    "compilation_config": {
        "cudagraph_capture_sizes": [1, 2, 4, 8, 16, 32, 64, 128],
    },
}
"""Of vLLM, beside a trainer on the same GPU."""

_LEAST = {
    "seconds": 1.0,
    "passes": 1,
    "questions": 0,
    "concurrency": 1,
    "warm_up": 0,
    "warm_up_lr": 0.0,
    "lr": 0.0,
    "rank": 1,
    "steps": 0,
    "temperature": 0.001,
    "group_size": 2,
    "groups_per_step": 1,
}
"""Of a plan's numbers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """How long a run is, and what it trains with."""

    model: str = "smollm2"
    """Hugging Face folder, smollm2 or demo."""
    device: str = "cpu"
    """cpu with the transformers engine, or cuda with vLLM and the trainer on one GPU."""
    seconds: float = 540.0
    """From the start to the report."""
    seed: int = 1
    """Of the adapter and the order of records."""
    passes: int = 4
    """Episodes of each held-out question, before and after."""
    questions: int = 0
    """The first so many of both kinds alone; 0 takes all."""
    concurrency: int = 128
    """Episodes at a time."""
    warm_up: int = 0
    """Steps of imitation, each of one episode for each training question with its answers given."""
    warm_up_lr: float = 5e-4
    lr: float = 3e-4
    rank: int = 16
    steps: int = 0
    """Steps of training at most; 0 trains until the clock leaves just enough for what follows."""
    temperature: float = 0.8
    """Of episodes that are trained on; scoring keeps the example's."""
    group_size: int = 8
    groups_per_step: int = 8

    def __post_init__(self) -> None:
        """Refuse numbers that a run would fail or wait for ever of, minutes after its start.

        Raises:
            ConfigError: With the field's name.
        """
        for name, least in _LEAST.items():
            value = getattr(self, name)
            if not least <= value < math.inf:
                raise ConfigError(
                    f"--{name.replace('_', '-')} cannot be used",
                    value=value,
                    limit=f"{least} or more, and finite",
                    remedy="correct it",
                )


def stack_config(plan: Plan, out: Path, token: str) -> StackConfig:
    """Services of which the trainer is started later."""
    on_gpu = plan.device == "cuda"
    model = {"device": plan.device, "dtype": "bfloat16" if on_gpu else "float32"}
    engine = {
        "name": "vllm" if on_gpu else "transformers",
        "max_num_seqs": 128,
        "vllm": {
            "max_lora_rank": plan.rank,
            "gpu_memory_fraction": 0.3,
            "arguments": GPU_ARGUMENTS if on_gpu else {},
        },
    }
    # Nothing here fills the pool.
    rollout = {"model": model, "engine": engine, "limits": {"admission_kv_use": 0.95}}
    return StackConfig(
        model=resolve_model(plan.model),
        run=RUN,
        folder=out,
        token=SecretStr(token),
        with_trainer=False,
        threads=4 if on_gpu else 1,
        start_s=plan.seconds * 0.75,
        stop_s=STOP_S,
        rollout=rollout_for_model(plan.model, rollout),
        trainer={
            "seed": plan.seed,
            "model": model,
            "lora": {"rank": plan.rank, "alpha": 2.0 * plan.rank},
            # 16 tokens in bfloat16 on both sides; its default of 0.1 would stop at one unlucky one.
            "publish": {"min_replicas": 1, **({"probe_tolerance": 3.0} if on_gpu else {})},
        },
    )


def warm_up_settings(plan: Plan, episodes_per_step: int) -> dict[str, Any]:
    """Of the trainer that imitates."""
    return {
        "objective": "sft",
        "max_steps": plan.warm_up,
        "batch": {"episodes_per_step": episodes_per_step},
        "optim": {"lr": plan.warm_up_lr},
    }


def train_settings(plan: Plan) -> dict[str, Any]:
    """Of the trainer that goes on from there with rewards."""
    return {
        "objective": "dag_grpo",
        **({"max_steps": plan.warm_up + plan.steps} if plan.steps else {}),
        "batch": {
            "groups_per_step": plan.groups_per_step,
            "group_size": plan.group_size,
            "max_policy_lag": 1,
            "group_deadline_s": 120.0,
        },
        "optim": {"lr": plan.lr, "warmup_steps": 2},
    }
