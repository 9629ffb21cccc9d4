"""Configuration of `octopus run`, `eval` and `verifiers`; import it lazily."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, Self, cast

from pydantic import BaseModel, ConfigDict, Field, SecretStr, field_validator, model_validator

from harness_sdk.errors import ConfigError
from harness_sdk.types import PRIMITIVES


class Section(BaseModel):
    """Base of every section."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)


class LimitsSection(Section):
    """Budgets of the episodes; an unset one is the agent's own, else the service's."""

    thread_budget: int | None = Field(default=None, ge=1)
    """Tokens that a thread may append."""
    answer_reserve: int | None = Field(default=None, ge=1)
    """Tokens of it that only done may use."""
    max_threads: int | None = Field(default=None, ge=0)
    """Children per episode; 0 refuses every fork."""
    max_depth: int | None = Field(default=None, ge=0)
    """Forks below the root; 0 sets no limit."""
    max_turns: int | None = Field(default=None, ge=1)
    """Model turns per thread."""


class SamplingSection(Section):
    """Sampling of turns that say nothing else; an unset value is the agent's, else the SDK's."""

    max_tokens: int | None = Field(default=None, ge=1)
    """Tokens of a turn."""
    temperature: float | None = Field(default=None, ge=0)
    """0 is greedy."""


class MetricsSection(Section):
    """Figures for Prometheus; needs the extra `metrics`."""

    port: int | None = Field(default=None, ge=0, le=65535)
    """Port of /metrics; unset serves none, 0 takes a free one."""
    host: str = "127.0.0.1"
    """Address to bind; whoever reaches it reads the figures."""


class AgentConfig(Section):
    """What both commands take."""

    address: tuple[str, ...] = ()
    """host:port of a rollout service, several with commas; groups are spread over them."""
    mqtt_url: str | None = Field(default=None, json_schema_extra={"env": "OCTOPUS_MQTT_URL"})
    """Broker through which all replicas of the run are found, those too that join later; where
    address names some, these alone are used."""
    run: str | None = Field(default=None, pattern=r"^[A-Za-z0-9_-][A-Za-z0-9_.-]*$")
    """Name of the run; unset takes the service's, and finds none through mqtt_url."""
    token: SecretStr | None = Field(default=None, json_schema_extra={"env": "OCTOPUS_TOKEN"})
    """Bearer token of the service."""
    tls_ca: Path | None = None
    """PEM of the authority that signed the service; set, it turns TLS on."""
    tls_cert: Path | None = None
    """PEM of the client's certificate, for mutual TLS; set with tls_key."""
    tls_key: Path | None = None
    """PEM of the client's private key."""
    concurrency: int = Field(default=16, ge=1)
    """Episodes at a time."""
    primitives: tuple[str, ...] | Literal["agent"] = "agent"
    """Branching tools that the model is offered, with commas; none, or agent for its own."""
    limits: LimitsSection = LimitsSection()
    sampling: SamplingSection = SamplingSection()

    @field_validator("address", mode="before")
    @classmethod
    def _split_address(cls, value: Any) -> Any:
        return tuple(value.split(",")) if isinstance(value, str) else value

    @field_validator("primitives", mode="before")
    @classmethod
    def _split_primitives(cls, value: Any) -> Any:
        if value == "agent" or not isinstance(value, (str, list, tuple)):
            return value
        listed = cast("Sequence[Any]", value)
        names = listed.split(",") if isinstance(listed, str) else list(listed)
        if names == ["none"]:
            return ()
        for name in names:
            if name not in PRIMITIVES:
                raise ConfigError(
                    "unknown primitive",
                    value=name,
                    limit=f"{', '.join(PRIMITIVES)}; or none, or agent",
                    remedy="name those that the model may call, with commas",
                )
        return tuple(names)


class RunConfig(AgentConfig):
    """`octopus run`."""

    group_size: int = Field(default=8, ge=1)
    """Episodes of one task that are compared with each other, as the trainer's batch.group-size."""
    groups: int | None = Field(default=None, ge=0)
    """Groups to run: none ends with the pass over the tasks that the run is in, 0 goes on until
    Ctrl-C."""
    version_policy: Literal["keep", "refresh"] = "keep"
    """Whether an episode keeps the policy version that it began with, or takes the newest one at
    each of its turns; either way none is aborted when a version is published."""
    redis_url: str | None = Field(default=None, json_schema_extra={"env": "OCTOPUS_REDIS_URL"})
    """Redis or Valkey that holds the trainer's permits; unset never waits for a trainer."""
    metrics: MetricsSection = MetricsSection()
    model: str | None = None
    """Start all services here with this model: a Hugging Face folder, smollm2 or demo."""
    folder: Path = Path("runs")
    """Folder of the runs, for the services that model starts."""
    drain_s: float = Field(default=600.0, ge=0)
    """Seconds that the trainer which model started may still work after the last group."""
    rollout: dict[str, Any] = {}
    """Settings of the rollout service that model starts, as --rollout.engine.max-tokens 65536."""
    trainer: dict[str, Any] = {}
    """Settings of the trainer that model starts, as --trainer.optim.lr 1e-4."""

    @model_validator(mode="after")
    def _one_place(self) -> Self:
        if self.model is not None and self.address:
            raise ConfigError(
                "model starts services here, address names running ones",
                value=f"model {self.model} and address {', '.join(self.address)}",
                remedy="give one of them",
            )
        return self


class VerifiersConfig(Section):
    """`octopus verifiers`."""

    url: str = "http://127.0.0.1:8000/v1"
    """The rollout service's OpenAI endpoint; its token comes from OCTOPUS_TOKEN."""
    group_size: int = Field(default=8, ge=1)
    """Episodes of one task that are compared with each other, as the trainer's batch.group-size."""
    groups: int | None = Field(default=None, ge=1)
    """Groups to run: none ends with the pass over the tasks that the run is in."""
    concurrency: int = Field(default=16, ge=1)
    """Episodes at a time."""
    rewards: tuple[float, float] = (0.0, 1.0)
    """Lowest and highest reward of the environment, with a comma; they become 0 and 1."""
    run: str = Field(default="local", pattern=r"^[A-Za-z0-9_-][A-Za-z0-9_.-]*$")
    """Name of the run, whose permits count."""
    redis_url: str | None = Field(default=None, json_schema_extra={"env": "OCTOPUS_REDIS_URL"})
    """Redis or Valkey that holds the trainer's permits; unset never waits for a trainer."""
    sampling: SamplingSection = SamplingSection()

    @field_validator("rewards", mode="before")
    @classmethod
    def _split_rewards(cls, value: Any) -> Any:
        return tuple(value.split(",")) if isinstance(value, str) else value


class EvalConfig(AgentConfig):
    """`octopus eval`."""

    repeats: int = Field(default=1, ge=1)
    """Episodes of each task."""
    tasks: int | None = Field(default=None, ge=1)
    """Tasks to run, the first ones; none runs all."""
    redis_url: str | None = Field(default=None, json_schema_extra={"env": "OCTOPUS_REDIS_URL"})
    """Redis or Valkey of the service: the episodes' records are read from there and measured."""
    cost_model: Path | None = None
    """The model's folder or config.json, for the operations per episode; needs redis_url."""

    @model_validator(mode="after")
    def _records_to_cost(self) -> Self:
        if self.cost_model is not None and self.redis_url is None:
            raise ConfigError(
                "the cost of an episode comes from its record",
                value=f"cost_model {self.cost_model} without redis_url",
                remedy="give --redis-url, as `octopus up` prints it",
            )
        return self
