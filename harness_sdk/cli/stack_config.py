"""Configuration of the services that run together on one machine; import it lazily."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, SecretStr


class StackConfig(BaseModel):
    """What `octopus up` starts, and where it keeps what it writes."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    model: Path
    """Checkpoint that is served and trained: a Hugging Face folder, `smollm2` or `demo`."""
    run: str = Field(default="local", pattern=r"^[A-Za-z0-9_-][A-Za-z0-9_.-]*$")
    """Name of the run."""
    folder: Path = Path("runs")
    """Folder of the runs; this one's is RUN in it: logs, Valkey's data, checkpoints."""
    redis_url: str | None = Field(default=None, json_schema_extra={"env": "OCTOPUS_REDIS_URL"})
    """Address of Redis or Valkey; unset starts the embedded server."""
    mqtt_url: str | None = Field(default=None, json_schema_extra={"env": "OCTOPUS_MQTT_URL"})
    """Address of the MQTT broker; unset starts the embedded one."""
    token: SecretStr | None = Field(default=None, json_schema_extra={"env": "OCTOPUS_TOKEN"})
    """Bearer token that the rollout service asks for."""
    replicas: int = Field(default=1, ge=1, le=64)
    """Rollout services; of several, one that ends is started again."""
    trainer_processes: int = Field(default=1, ge=1, le=64)
    """Processes of the trainer; torchrun starts several, each on a GPU of its own."""
    gpus: int | None = Field(default=None, ge=1, le=64)
    """GPUs of this machine to divide: each replica gets rollout.engine.vllm.tensor_parallel_size,
    then each trainer process one; unset, every service sees all of them."""
    port: int = Field(default=0, ge=0, le=65535)
    """Port of the rollout service, the next ones those of further replicas; 0 takes free ones."""
    openai_port: int | None = Field(default=None, ge=1, le=65535)
    """Port of the rollout service's OpenAI-compatible endpoint, and so on; unset serves none."""
    page_port: int | None = Field(default=0, ge=0, le=65535)
    """Port of the live page; 0 takes a free one, `none` serves no page."""
    with_rollout: bool = True
    """Start the rollout service."""
    with_trainer: bool = True
    """Start the trainer service."""
    threads: int | None = Field(default=None, ge=1)
    """Threads that each service computes with (OMP_NUM_THREADS); unset leaves the choice to it."""
    start_s: float = Field(default=600.0, gt=0)
    """Seconds that the rollout service has to load its model."""
    stop_s: float = Field(default=30.0, gt=0)
    """Seconds that each service has to stop before it is killed."""
    rollout: dict[str, Any] = {}
    """Settings of `octopus rollout`, as --rollout.engine.max-tokens 65536."""
    trainer: dict[str, Any] = {}
    """Settings of `octopus trainer`, as --trainer.batch.group-size 8."""

    @property
    def run_folder(self) -> Path:
        """Everything that this run writes."""
        return self.folder / self.run
