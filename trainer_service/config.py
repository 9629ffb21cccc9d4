"""Configuration of the trainer service: one frozen model of `sections`, and what goes together.

Importable without torch, redis or numpy; `octopus trainer --dry-run` prints the resolved form.
"""

from __future__ import annotations

from pathlib import Path

from pydantic import Field, model_validator

from harness_sdk.errors import ConfigError
from harness_sdk.redis_client import redis_client
from trainer_service.number_types import NARROW
from trainer_service.sections import (
    BatchOptions,
    CheckpointOptions,
    LoraSettings,
    LossOptions,
    ModelOptions,
    MqttOptions,
    OptimOptions,
    Options,
    PublishOptions,
    RanksOptions,
    RedisOptions,
    ReportOptions,
)

GROUP_OBJECTIVES = ("dag_grpo", "path_average", "token_unique")
"""Objectives that compare the episodes of a group."""

OBJECTIVE_NAMES = (*GROUP_OBJECTIVES, "sft")

ADVANTAGE_NAMES = (
    "leave_one_out",
    "group_mean",
    "group_zscore",
    "reinforce_plus_plus",
    "reinforce_plus_plus_baseline",
)
"""Files of `trainer_service/advantages`."""


class TrainerConfig(Options):
    """Everything `octopus trainer` can be told."""

    run: str = Field(default="default", pattern=r"^[A-Za-z0-9_-][A-Za-z0-9_.-]*$")
    """Name of the run: keys, topics and episodes carry it."""
    run_folder: Path = Path("runs")
    """Folder in which the run's own folder, named after the run, is made."""
    objective: str = "dag_grpo"
    """dag_grpo, path_average, token_unique or sft. A run may go on with another one: adapter,
    versions, steps and schedule continue, the optimiser's moments start anew."""
    max_steps: int | None = Field(default=None, ge=1)
    """Optimiser steps since the run began, restarts included; unset runs until SIGINT."""
    seed: int = 0
    """Of adapter initialisation and the order of records."""
    model: ModelOptions = ModelOptions()
    lora: LoraSettings = LoraSettings()
    batch: BatchOptions = BatchOptions()
    loss: LossOptions = LossOptions()
    optim: OptimOptions = OptimOptions()
    ranks: RanksOptions = RanksOptions()
    checkpoint: CheckpointOptions = CheckpointOptions()
    redis: RedisOptions = RedisOptions()
    mqtt: MqttOptions = MqttOptions()
    publish: PublishOptions = PublishOptions()
    report: ReportOptions = ReportOptions()

    @property
    def folder(self) -> Path:
        """The run's own folder."""
        return self.run_folder / self.run

    def on_device(self, device: str) -> TrainerConfig:
        """The same with `model.device` replaced."""
        model = self.model.model_copy(update={"device": device})
        return self.model_copy(update={"model": model})

    @property
    def needs_groups(self) -> bool:
        """Whether the objective compares episodes of a group."""
        return self.objective in GROUP_OBJECTIVES

    @property
    def publishes(self) -> bool:
        """Whether new versions go to replicas."""
        if self.publish.enabled is not None:
            return self.publish.enabled
        return self.batch.records is None

    @property
    def refills(self) -> int:
        """Episodes that runners start in a group in place of failed ones, at most."""
        return self.batch.group_size if self.batch.incomplete == "refill" else 0

    @property
    def max_policy_lag(self) -> int:
        """Versions that a sampled token may be behind."""
        return 1 if self.batch.max_policy_lag is None else self.batch.max_policy_lag

    @property
    def probe_tolerance(self) -> float:
        """Nats."""
        if self.publish.probe_tolerance is not None:
            return self.publish.probe_tolerance
        return 0.1 if self.model.dtype in NARROW else 1e-3

    def require_inputs(self) -> None:
        """Refuse what is not there before torch is imported, which takes seconds.

        Raises:
            ConfigError: No model is in its folder, or redis.url is no address.
            OSError: The file of records cannot be read.
        """
        assert self.model.path is not None
        if not (self.model.path / "config.json").is_file():
            raise ConfigError(
                "no model there",
                value=self.model.path,
                limit="a Hugging Face folder with config.json",
                remedy="correct model.path",
            )
        if self.batch.records is not None:
            self.batch.records.open("rb").close()
        if self.batch.records is None or self.publishes:
            redis_client(self.redis.url)

    @model_validator(mode="after")
    def _check(self) -> TrainerConfig:
        if self.model.path is None:
            raise ConfigError(
                "model.path is not set", remedy="give a checkpoint's folder with --model.path"
            )
        if self.objective not in OBJECTIVE_NAMES:
            raise ConfigError(
                "unknown objective",
                value=self.objective,
                limit=", ".join(OBJECTIVE_NAMES),
                remedy="choose one with --objective",
            )
        if self.needs_groups:
            self._check_groups()
        else:
            self._check_sft()
        if self.batch.max_piece_tokens is not None and self.model.activation_checkpointing:
            raise _pair(
                "batch.max_piece_tokens",
                "model.activation_checkpointing",
                "remove one: pieces compute their activations again already",
            )
        self._check_optim()
        return self

    def _check_groups(self) -> None:
        batch = self.batch
        for name in ("episodes_per_step", "min_reward", "records", "epochs"):
            if _differs(batch, name):
                raise _pair(f"batch.{name}", f"objective {self.objective}", "use objective sft")
        if batch.min_group > batch.group_size:
            raise ConfigError(
                "batch.min_group is above batch.group_size",
                value=batch.min_group,
                limit=f"2..{batch.group_size}",
            )
        if batch.advantages not in ADVANTAGE_NAMES:
            raise ConfigError(
                "unknown batch.advantages",
                value=batch.advantages,
                limit=", ".join(ADVANTAGE_NAMES),
            )
        if batch.staleness == "correct" and self.loss.importance_cap is None:
            raise _pair(
                "batch.staleness correct", "no loss.importance_cap", "set it, as 2.0, or drop"
            )
        self._check_loss()

    def _check_loss(self) -> None:
        loss = self.loss
        if loss.constant_length is not None and self.objective != "dag_grpo":
            raise _pair("loss.constant_length", f"objective {self.objective}", "remove it")
        for name in ("importance", "importance_floor", "importance_level"):
            if loss.importance_cap is None and _differs(loss, name):
                raise _pair(f"loss.{name}", "no loss.importance_cap", "set the cap, as 2.0")
        if loss.importance_floor and loss.importance != "mask":
            raise _pair("loss.importance_floor", "loss.importance truncate", "use mask")
        if loss.importance_cap is not None and loss.importance_floor >= loss.importance_cap:
            raise ConfigError(
                "loss.importance_floor leaves no weight",
                value=loss.importance_floor,
                limit=f"below loss.importance_cap, {loss.importance_cap}",
            )

    def _check_sft(self) -> None:
        batch = self.batch
        group_only = (
            "max_policy_lag", "staleness", "groups_per_step", "group_size", "min_group",
            "group_deadline_s", "incomplete", "advantages",
        )  # fmt: skip
        for name in group_only:
            if _differs(batch, name):
                raise _pair(f"batch.{name}", "objective sft", "remove it")
        if self.publish.in_flight == "wait":
            raise _pair("publish.in_flight wait", "objective sft", "it knows of no groups")
        if self.loss != LossOptions():
            raise _pair("loss.*", "objective sft", "remove it")
        if batch.records is None and _differs(batch, "epochs"):
            raise _pair("batch.epochs", "the stream", "give batch.records")

    def _check_optim(self) -> None:
        optim = self.optim
        if optim.schedule == "constant":
            if optim.decay_steps is not None:
                raise _pair("optim.decay_steps", "optim.schedule constant", "remove one of them")
            return
        end = optim.decay_steps or self.max_steps
        if end is None:
            raise _pair(
                f"optim.schedule {optim.schedule}", "no end", "set optim.decay_steps or max_steps"
            )
        if end <= optim.warmup_steps:
            raise ConfigError(
                "optim.warmup_steps leaves no step for the schedule",
                value=optim.warmup_steps,
                limit=f"below {end}",
            )

    @property
    def optim_options(self) -> OptimOptions:
        """`optim` with its end filled in."""
        if self.optim.schedule == "constant" or self.optim.decay_steps is not None:
            return self.optim
        return self.optim.model_copy(update={"decay_steps": self.max_steps})


def _differs(section: Options, name: str) -> bool:
    """From the default: a resolved configuration, which sets every key, must load again."""
    return getattr(section, name) != type(section).model_fields[name].default


def _pair(one: str, other: str, remedy: str) -> ConfigError:
    return ConfigError(f"{one} does not go with {other}", remedy=remedy)
