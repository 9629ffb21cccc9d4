"""The sections of the trainer's configuration; what goes together is checked in `config`."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

from harness_sdk.control import MAX_PROBE_TOKENS


class Options(BaseModel):
    """Base of every section."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)


class ModelOptions(Options):
    """The base model that the adapter belongs to."""

    path: Path | None = None
    """Folder of the Hugging Face checkpoint."""
    dtype: Literal["float32", "bfloat16", "float16", "float64"] = "float32"
    """Of the base weights, as on every replica; the adapter is float32 at least. float16 rounds to
    eighths of what bfloat16 does, so that both sides agree far better; it ends at 65,504, which
    some large models exceed. Its loss is scaled on the way back: optim/loss_scale."""
    device: str = Field(default="cpu", pattern=r"^(cpu|cuda(:\d+)?)$")
    """cpu, cuda or cuda:N."""
    head_dtype: Literal["float32", "model"] = "float32"
    """Of the logits, as on every replica: float32, at least, or rounded to the model's dtype."""
    mount_layers: tuple[int, ...] | None = None
    """Layers whose attention reads mounted spans; unset takes the family's rule."""
    activation_checkpointing: bool = False
    """Keep each layer's input alone and compute the layer again in the backward: the same gradients
    with less memory. SmolLM2-135M on the CPU in float32 peaked at 3.6 GiB in place of 7.1 for a
    strip of 2,048 tokens, and took a quarter longer."""
    activation_tile_tokens: int = Field(default=16_384, ge=1)
    """With activation_checkpointing, rows of a dense feed-forward part that the backward holds
    activations of at once; nothing is computed more often for it."""


class LoraSettings(Options):
    """Shape of the adapter."""

    rank: int = Field(default=16, ge=1)
    """Rank of every pair."""
    alpha: float = Field(default=32.0, gt=0, allow_inf_nan=False)
    """Scale is alpha / rank."""
    targets: tuple[str, ...] | None = None
    """Names of the linear layers; unset takes the family's list."""
    adapter: Path | None = None
    """PEFT folder that a fresh run starts from, served as version 1; unset starts from zero."""


class BatchOptions(Options):
    """What one optimiser step consumes."""

    groups_per_step: int = Field(default=4, ge=1)
    """Groups of one step."""
    group_size: int = Field(default=8, ge=2)
    """Episodes of a complete group."""
    min_group: int = Field(default=2, ge=2)
    """Finished episodes that a group needs at its deadline; 2 at least, for the baseline."""
    group_deadline_s: float = Field(default=600.0, gt=0)
    """Seconds from a group's first episode until it goes on with what it has."""
    incomplete: Literal["train", "refill", "drop"] = "train"
    """What becomes of a group of which episodes failed for the infrastructure's fault or did not
    come in time: train on the rest if it is min_group; refill, by octopus run starting others in
    place of the failed ones, up to group_size more, and train on what there is at the end; or
    drop it."""
    max_policy_lag: int | None = Field(default=None, ge=0)
    """Versions that a sampled token may be behind; unset is 1, and nothing for sft."""
    staleness: Literal["drop", "correct"] = "drop"
    """Beyond the lag: drop the episode, or keep it with truncated importance weights."""
    episodes_per_step: int = Field(default=8, ge=1)
    """Episodes of one sft step."""
    min_reward: float | None = Field(default=None, ge=0.0, le=1.0)
    """Sft leaves episodes below this reward out; unset takes every finished one."""
    records: Path | None = None
    """File of records that sft trains on in place of the stream."""
    epochs: int = Field(default=1, ge=1)
    """Passes over the file of records."""
    max_strip_tokens: int = Field(default=16_384, ge=1)
    """Packed tokens of one forward and backward; a longer episode is a strip of its own, which
    max_piece_tokens cuts."""
    max_piece_tokens: int | None = Field(default=None, ge=1)
    """A strip above it is computed in pieces of at most so many tokens: activations of one piece at
    a time, and the keys, values and states that others read. The gradients are the same; every
    token is computed twice, as with model.activation_checkpointing. Unset cuts no strip."""
    advantages: str = "leave_one_out"
    """leave_one_out (RLOO), group_mean (Dr. GRPO), group_zscore (GRPO), reinforce_plus_plus (the
    step's mean and deviation) or reinforce_plus_plus_baseline."""


class LossOptions(Options):
    """The objective's numbers."""

    clip_low: float = Field(default=0.2, gt=0)
    """Ratios below 1 - clip_low earn no further gain."""
    clip_high: float = Field(default=0.28, gt=0)
    """Ratios above 1 + clip_high earn no further gain."""
    constant_length: float | None = Field(default=None, gt=0, allow_inf_nan=False)
    """Tokens that dag_grpo divides an episode's sum by, as in Dr. GRPO; unset is the episode's own
    number of sampled tokens."""
    importance_cap: float | None = Field(default=None, gt=0)
    """Importance sampling: the largest weight of what another version sampled, which then takes
    the place of the clipped ratio; unset weighs nothing."""
    importance: Literal["truncate", "mask"] = "truncate"
    """Weights above the cap become the cap, or 0."""
    importance_floor: float = Field(default=0.0, ge=0)
    """With mask: weights below it become 0."""
    importance_level: Literal["token", "sequence", "geometric"] = "token"
    """Whose weight a token has: its own, the product over its episode's sampled tokens, or that
    product's geometric mean."""
    kl_coef: float = Field(default=0.0, ge=0, allow_inf_nan=False)
    """Penalty on KL(policy || base model), which costs a second forward, the adapter off."""
    entropy_coef: float = Field(default=0.0, ge=0, allow_inf_nan=False)
    """Bonus on the entropy of each sampled token's distribution."""


class OptimOptions(Options):
    """AdamW and its schedule."""

    lr: float = Field(default=1e-5, ge=0, allow_inf_nan=False)
    """Peak learning rate; 0 publishes the same weights again and again."""
    beta1: float = Field(default=0.9, ge=0, lt=1)
    """Decay of the first moment."""
    beta2: float = Field(default=0.999, ge=0, lt=1)
    """Decay of the second moment."""
    eps: float = Field(default=1e-8, gt=0, allow_inf_nan=False)
    """Added to the root of the second moment."""
    weight_decay: float = Field(default=0.0, ge=0, allow_inf_nan=False)
    """Decoupled decay of the adapter's weights."""
    max_grad_norm: float = Field(default=1.0, gt=0)
    """Gradients are scaled down to this L2 norm."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """Shape after the warm-up."""
    warmup_steps: int = Field(default=0, ge=0)
    """Steps of the linear ramp."""
    decay_steps: int | None = Field(default=None, ge=1)
    """Step at which linear and cosine reach their floor; unset is max_steps."""
    min_lr_factor: float = Field(default=0.0, ge=0, le=1)
    """Floor, as a multiple of lr."""
    max_skipped: int = Field(default=10, ge=1)
    """Non-finite steps in a row that stop the run. In float16, gradients that are not finite first
    halve the scale of the loss, from 65,536 on, and are computed again, up to 8 times a step."""


class RanksOptions(Options):
    """How the processes of one trainer, which torchrun starts, divide the work."""

    sharding: Literal["none", "fsdp"] = "none"
    """With none every process holds the whole base model; with fsdp each holds its part of every
    layer, which FSDP2 gathers while the layer computes. Episodes are divided either way."""


class CheckpointOptions(Options):
    """What is kept to resume from."""

    keep: int = Field(default=3, ge=1)
    """Newest checkpoints kept."""


class RedisOptions(Options):
    """The stream of episodes."""

    url: str = Field(
        default="redis://127.0.0.1:6379", json_schema_extra={"env": "OCTOPUS_REDIS_URL"}
    )
    """Address of Redis or Valkey, rediss:// for TLS; ?ssl_ca_certs=FILE names an authority."""
    consumer: str = "trainer-0"
    """Name in the consumer group; a restarted trainer keeps it."""
    patience_s: float = Field(default=300.0, gt=0)
    """Seconds without the server that stop the trainer."""
    claim_idle_s: float = Field(default=60.0, gt=0)
    """Entries that another consumer left so long are taken over."""


class MqttOptions(Options):
    """The control bus."""

    url: str = Field(default="mqtt://127.0.0.1:1883", json_schema_extra={"env": "OCTOPUS_MQTT_URL"})
    """Address of the broker; mqtts:// for TLS, ?ssl_ca_certs=FILE for an authority of yours."""
    patience_s: float = Field(default=60.0, gt=0)
    """Seconds without the broker that stop the trainer."""


class PublishOptions(Options):
    """How a new version reaches the replicas."""

    enabled: bool | None = None
    """Off trains without a control bus; unset is on for the stream, off for a file of records."""
    via: Literal["redis", "folder"] = "redis"
    """Adapter in chunks through Redis, or in the run folder that every replica can read."""
    ack_timeout_s: float = Field(default=60.0, gt=0)
    """Seconds that a live replica has to serve a version and say so."""
    min_replicas: int = Field(default=0, ge=0)
    """Acknowledgements without which the run stops; 0 goes on alone."""
    probe_tokens: int = Field(default=16, ge=2, le=MAX_PROBE_TOKENS)
    """Length of the probe, the first tokens of the step's first episode; a replica's turns wait
    for its passes."""
    probe_tolerance: float | None = Field(default=None, gt=0)
    """Largest |delta logp| of the probe; unset is 1e-3, and 0.1 in bfloat16 and float16."""
    in_flight: Literal["cross", "wait"] = "cross"
    """Episodes that run when a version is ready: they cross its publishing, keeping or refreshing
    their own as they were opened; or the version and all further groups wait until they have
    ended. A restarted trainer does not wait."""
    keep_versions: int = Field(default=4, ge=2)
    """Newest adapters kept for replicas that start late."""


class ReportOptions(Options):
    """Where figures go beside the run folder; each needs the extra `metrics`."""

    tensorboard: bool = False
    """Event files in the run folder's tensorboard."""
    wandb_project: str | None = None
    """Project of Weights & Biases; the run has the run's name."""
    prometheus_port: int | None = Field(default=None, ge=0, le=65535)
    """Port of /metrics; unset serves none, 0 takes a free one."""
    prometheus_host: str = "127.0.0.1"
    """Address to bind; whoever reaches it reads the figures."""
