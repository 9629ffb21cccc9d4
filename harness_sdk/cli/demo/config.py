"""Configuration of `octopus demo`; import it lazily."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from harness_sdk.errors import ConfigError
from rollout_service.engine.vllm.limits import check_cpu_model

RUN = "run"
"""Name of the demo's run, and of its folder in `out`."""

FULL_STEPS = 40
"""RL steps after which the demo's targets must be met; a shorter run only has to run."""

MODEL = Path(__file__).parent / "model"
"""The base checkpoint, with its tokenizer."""


class DemoConfig(BaseModel):
    """What the demo runs, and for how long."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    seed: int = 0
    """Of tasks, scripts and adapter."""
    steps: int = Field(default=FULL_STEPS, ge=1)
    """Online RL steps."""
    warmup_steps: int = Field(default=6, ge=1)
    """Steps of tree SFT before them."""
    out: Path = Path("demo")
    """Folder that takes the report and everything that the run writes."""
    engine: Literal["transformers", "vllm"] = "transformers"
    """What the rollout service computes with."""
    group_size: int = Field(default=8, ge=2)
    """Episodes of one task that are compared."""
    groups_per_step: int = Field(default=8, ge=1)
    """Groups of one RL step."""
    demonstrations_per_step: int = Field(default=16, ge=1)
    """Scripted episodes of one warm-up step."""
    warmup_lr: float = Field(default=1e-3, gt=0)
    """Learning rate of the warm-up."""
    lr: float = Field(default=3e-3, gt=0)
    """Learning rate of RL; it falls to a tenth, for a policy that is right has little to learn."""
    rank: int = Field(default=8, ge=1)
    """Rank of the adapter; alpha is twice that."""
    concurrency: int = Field(default=64, ge=1)
    """Episodes at a time."""

    @model_validator(mode="after")
    def _check_engine(self) -> DemoConfig:
        if self.engine == "vllm":
            try:
                check_cpu_model(MODEL, "bfloat16")
            except ConfigError as error:
                raise ConfigError(
                    f"the demo's model is not one for vLLM on the CPU: {error.message}",
                    value=error.value,
                    limit=error.limit,
                    remedy="run the demo with --engine transformers",
                ) from error
        return self

    @property
    def run_folder(self) -> Path:
        """Logs, checkpoints and metrics of the run."""
        return self.out / RUN

    @property
    def is_full(self) -> bool:
        """Whether the targets must be met."""
        return self.steps >= FULL_STEPS

    def rollout_settings(self) -> dict[str, Any]:
        """Of the rollout service."""
        return {"model": {"preamble": "compact"}, "engine": {"name": self.engine}}

    def warmup_settings(self) -> dict[str, Any]:
        """Of the trainer that imitates the script."""
        return {
            "objective": "sft",
            "max_steps": self.warmup_steps,
            "batch": {"episodes_per_step": self.demonstrations_per_step},
            "optim": {"lr": self.warmup_lr},
            **self._shared_settings(),
        }

    def online_settings(self) -> dict[str, Any]:
        """Of the trainer that goes on from there with rewards.

        No lag: every token is trained on by the version that sampled it, so that the divergence
        is that of the two implementations alone.
        """
        return {
            "objective": "dag_grpo",
            "max_steps": self.warmup_steps + self.steps,
            "batch": {
                "groups_per_step": self.groups_per_step,
                "group_size": self.group_size,
                "max_policy_lag": 0,
            },
            "optim": {"lr": self.lr, "schedule": "linear", "min_lr_factor": 0.1},
            **self._shared_settings(),
        }

    def _shared_settings(self) -> dict[str, Any]:
        return {
            "seed": self.seed,
            "lora": {"rank": self.rank, "alpha": 2.0 * self.rank},
            "publish": {"min_replicas": 1},
        }
