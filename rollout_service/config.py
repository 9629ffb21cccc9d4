"""Configuration of the rollout service: one frozen model, nested by component.

Importable without torch, transformers or redis; `octopus rollout --dry-run` prints the resolved
form.
"""

from __future__ import annotations

import json
import socket
from pathlib import Path
from typing import Literal

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    JsonValue,
    SecretStr,
    field_validator,
    model_validator,
)

from harness_sdk.errors import ConfigError
from harness_sdk.masking import masked
from rollout_service.engine.vllm.release import require_vllm

ADDRESS_FILE = "address"
"""File in a replica's folder that says where it listens, while it does."""

_MAX_COUNT = 2**32 - 1
"""Of an episode's limits, which its opening tells in 32 bits."""

_LOOPBACK = ("127.0.0.1", "localhost", "::1")

_SETTINGS_OF_ARGUMENTS = {
    "model": "model.path",
    "dtype": "model.dtype",
    "gpu_memory_utilization": "engine.vllm.gpu_memory_fraction",
    "tensor_parallel_size": "engine.vllm.tensor_parallel_size",
    "block_size": "engine.vllm.page_tokens",
    "max_num_batched_tokens": "engine.vllm.max_batched_tokens",
    "max_num_seqs": "engine.max_num_seqs",
    "max_model_len": "engine.max_tokens",
    "max_lora_rank": "engine.vllm.max_lora_rank",
    "max_loras": "adapters.max_versions",
    "max_cpu_loras": "adapters.max_versions",
}
_OWN_ARGUMENTS = frozenset(
    {
        "additional_config",
        "async_scheduling",
        "disable_log_stats",
        "distributed_executor_backend",
        "enable_lora",
        "enable_log_requests",
        "enable_prefix_caching",
        "hf_token",
        "logprobs_mode",
        "lora_target_modules",
        "max_logprobs",
        "max_num_queued_reqs",
        "max_num_queued_tokens",
        "runner",
        "scheduler_cls",
        "scheduling_policy",
        "seed",
        "skip_tokenizer_init",
        "worker_cls",
    }
)
"""Arguments of vLLM that cursors, versions, log-probabilities and the order of calls stand on, and
a secret that a model folder needs no more than the log."""


class Options(BaseModel):
    """Base of every section."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)


class ModelOptions(Options):
    """The base model, which is policy version 0."""

    path: Path | None = None
    """Folder of the Hugging Face checkpoint with its tokenizer."""
    dtype: Literal["float32", "bfloat16", "float16", "float64"] = "float32"
    """Of the weights and the cache, as on the trainer. float16 rounds to eighths of what bfloat16
    does, so that both sides agree far better; it ends at 65,504, which some large models exceed."""
    head_dtype: Literal["float32", "model"] = "float32"
    """Of the logits, as on the trainer: float32, at least, or rounded to the model's dtype."""
    device: str = Field(default="cpu", pattern=r"^(cpu|cuda(:\d+)?)$")
    """cpu, cuda or cuda:N."""
    mount_layers: tuple[int, ...] | None = None
    """Layers whose attention reads mounted spans; unset takes the family's rule."""
    preamble: Literal["full", "compact"] = "full"
    """How tools are described where the model's chat template does not list them: full is Qwen's
    wording; compact, for very small models, also takes the place of a template's own list."""
    template_variables: dict[str, JsonValue] = {}
    """What the chat template is given beside messages and tools, as {enable_thinking = false}."""

    @field_validator("template_variables")
    @classmethod
    def _check_variables(cls, variables: dict[str, JsonValue]) -> dict[str, JsonValue]:
        # A dotted flag gives text.
        texts = [name for name, value in variables.items() if value in ("true", "false")]
        if texts:
            raise ConfigError(
                f"model.template_variables.{texts[0]} is text, which templates take for true",
                value=repr(variables[texts[0]]),
                limit="true and false without quotes",
                remedy=f"write --model.template-variables '{{{texts[0]} = {variables[texts[0]]}}}'",
            )
        return variables


class VllmOptions(Options):
    """What only `engine.name vllm` has."""

    gpu_memory_fraction: float = Field(default=0.9, gt=0, le=1)
    """Share of each GPU's memory for weights, work space and, with max_tokens unset, the pool."""
    tensor_parallel_size: int = Field(default=1, ge=1, le=64)
    """Devices that the model is split over; on the CPU that many processes."""
    page_tokens: int | None = Field(default=None, ge=16, le=1024, multiple_of=16)
    """Tokens per KV page; unset is vLLM's choice, and always is with recurrent layers."""
    max_states: int | None = Field(default=None, ge=1)
    """Recurrent states that may be resident beside engine.max_tokens; unset is 8 for each of
    engine.max_num_seqs."""
    max_batched_tokens: int | None = Field(default=None, ge=16)
    """Tokens computed in one step, longer prompts in chunks; unset is vLLM's choice."""
    max_lora_rank: int = Field(default=64, ge=1, le=512)
    """Highest rank of an adapter; adapters.max_versions buffers of that rank are held."""
    hang_timeout_s: float = Field(default=300.0, ge=0)
    """Seconds within which an engine process has to answer, the step that it computes included,
    and what that compiles or loads; one that does not is killed and started again. More than its
    longest step takes; 0 waits for ever."""
    max_restarts: int = Field(default=5, ge=0, le=1000)
    """Times in restart_window_s that an engine process which ended is started again, with its
    versions; calls wait for it, and threads go on. Past it the service ends."""
    restart_window_s: float = Field(default=3600.0, gt=0)
    """Seconds over which those restarts are counted."""

    @field_validator("hang_timeout_s")
    @classmethod
    def _check_hang_timeout(cls, seconds: float) -> float:
        if 0 < seconds < 1:
            raise ConfigError(
                "engine.vllm.hang_timeout_s is less than an answer takes",
                value=seconds,
                limit="1 or more, 0 for ever",
                remedy="give it more than the longest step takes",
            )
        return seconds

    arguments: dict[str, JsonValue] = {}
    """Further engine arguments of vLLM by its own names, as {attention_backend = "TRITON_ATTN"};
    what has a setting here, or is the service's to decide, is refused. On a GPU compilation_config
    is {mode = 0, cudagraph_mode = "FULL_DECODE_ONLY"}, as in all benchmarks: graphs for decoding,
    no inductor; what is given here comes over these two."""

    @field_validator("arguments")
    @classmethod
    def _check_arguments(cls, arguments: dict[str, JsonValue]) -> dict[str, JsonValue]:
        for name, value in arguments.items():
            if name in _SETTINGS_OF_ARGUMENTS:
                raise ConfigError(
                    f"engine.vllm.arguments.{name} has a setting of its own",
                    value=repr(value),
                    remedy=f"set {_SETTINGS_OF_ARGUMENTS[name]}",
                )
            if name in _OWN_ARGUMENTS:
                raise ConfigError(
                    f"engine.vllm.arguments.{name} is the service's to decide",
                    value=repr(masked({name: value})[name]),
                    remedy=f"leave {name} out",
                )
            # A dotted flag gives text.
            if isinstance(value, str) and _is_scalar(value):
                raise ConfigError(
                    f"engine.vllm.arguments.{name} is text, which vLLM does not convert",
                    value=repr(value),
                    limit="numbers, true and false without quotes",
                    remedy=f"write --engine.vllm.arguments '{{{name} = {value}}}'",
                )
        return arguments


class EngineOptions(Options):
    """What computes."""

    name: Literal["transformers", "vllm"] = "transformers"
    """transformers (any machine) or vllm (fast; an extra of its own, see the README)."""
    max_tokens: int | None = Field(default=None, ge=16)
    """Tokens that may be resident at a time, over all episodes; unset is 262144, or with vllm
    what memory allows: gpu_memory_fraction of the GPU, 1 GiB on the CPU."""
    max_num_seqs: int = Field(default=64, ge=1, le=4096)
    """Sequences decoded in one batch."""
    vllm: VllmOptions = VllmOptions()


def _is_scalar(text: str) -> bool:
    """Whether `text` is a number or truth value of JSON."""
    try:
        return isinstance(json.loads(text), bool | int | float)
    except ValueError:
        return False


class ServerOptions(Options):
    """The gRPC server."""

    host: str = "127.0.0.1"
    """Address to bind; anything but loopback needs a token or client certificates."""
    port: int = Field(default=7040, ge=0, le=65535)
    """Port to bind; 0 takes a free one."""
    advertise: str | None = None
    """host:port that clients reach this replica at; unset is the bound one."""
    max_message_bytes: int = Field(default=64 * 1024 * 1024, ge=64 * 1024, le=2**31 - 1)
    """Largest message in either direction; clients learn it when they connect."""
    token: SecretStr | None = Field(default=None, json_schema_extra={"env": "OCTOPUS_TOKEN"})
    """Bearer token of scope admin, where everybody shares one."""
    tokens: Path | None = None
    """File of tokens, NAME SCOPE TOKEN in each line: agent reaches the episodes that its NAME
    opened, trainer the status, admin every episode over gRPC; OpenAI sessions are reached by the
    NAME that opened them alone."""
    tls_cert: Path | None = None
    """PEM of the certificate chain; set with tls_key."""
    tls_key: Path | None = None
    """PEM of the private key."""
    tls_client_ca: Path | None = None
    """PEM of the authority of clients' certificates; set, it makes TLS mutual."""
    client_calls: int = Field(default=2048, ge=1)
    """Calls of one client that run at a time, over gRPC and HTTP, an open episode one of them. A
    client is a NAME of server.tokens, or else an address."""
    client_calls_per_s: float = Field(default=1000.0, gt=0)
    """Calls that one client may begin in a second."""
    drain_s: float = Field(default=0.0, ge=0)
    """Seconds that open episodes may go on at a stop, for a deployment that loses none: meanwhile
    new ones are refused and runs go to other replicas. A second signal ends them at once."""
    grace_s: float = Field(default=10.0, ge=0)
    """Seconds that running calls have at a stop."""


class OpenAIOptions(Options):
    """The OpenAI-compatible endpoint; its host, token and TLS are the server's."""

    port: int | None = Field(default=None, ge=0, le=65535)
    """Port of the HTTP endpoint; unset serves none, 0 takes a free one."""
    idle_s: float = Field(default=900.0, gt=0)
    """Seconds without a request after which a session is closed without a reward; until then it
    holds its room in the pool and its policy version."""
    max_threads: int = Field(default=100, ge=0, le=_MAX_COUNT)
    """Branches of a session: an agent that edits its history needs one for each edit."""


class LimitOptions(Options):
    """Defaults and guardrails of an episode (design.md section 4)."""

    thread_budget: int = Field(default=32_768, ge=1)
    """Tokens that a thread may append; inherited prefix and mounts are free."""
    answer_reserve: int = Field(default=2_048, ge=0)
    """Tokens of the budget that only `done` may use."""
    max_threads: int = Field(default=10, ge=0, le=_MAX_COUNT)
    """Children of an episode."""
    max_depth: int | None = Field(default=None, ge=1, le=_MAX_COUNT)
    """Forks below the root; unset is no limit."""
    max_turns: int = Field(default=50, ge=1, le=_MAX_COUNT)
    """Model turns of a thread."""
    admission_kv_use: float = Field(default=0.75, gt=0, le=1)
    """New episodes wait while more of the pool than this is taken."""
    max_visible_tokens: int | None = Field(default=None, ge=1)
    """Path and mounts of a thread together; unset is the model's positions."""
    allow_truncated_sampling: bool = False
    """Accept top_p, top_k and structured, for evaluation alone: what they sample cannot be trained
    on."""


class RedisOptions(Options):
    """The stream of episodes."""

    url: str | None = Field(default=None, json_schema_extra={"env": "OCTOPUS_REDIS_URL"})
    """Address of Redis or Valkey, rediss:// for TLS, ?ssl_ca_certs=FILE for an authority of yours;
    unset keeps no episodes."""
    max_buffered_bytes: int = Field(default=64 * 1024 * 1024, ge=1)
    """Records held while Redis is away; past it closing an episode waits."""
    trim_every: int = Field(default=64, ge=1)
    """Episodes between two trims of the stream."""


class MqttOptions(Options):
    """The control bus."""

    url: str | None = Field(default=None, json_schema_extra={"env": "OCTOPUS_MQTT_URL"})
    """Address of the broker, mqtts:// for TLS, ?ssl_ca_certs=FILE for an authority of yours; unset
    serves version 0 alone."""


class AdapterOptions(Options):
    """Hot LoRA versions."""

    max_versions: int = Field(default=4, ge=2, le=64)
    """Adapters live at a time; at least max_policy_lag + 1 of the trainer. Where open episodes
    hold all of them, the next version waits, and in time the trainer with it."""
    max_bytes: int = Field(default=4 << 30, ge=1)
    """Largest file of tensors."""


class MetricsOptions(Options):
    """Figures for Prometheus; needs the extra `metrics`."""

    port: int | None = Field(default=None, ge=0, le=65535)
    """Port of /metrics; unset serves none, 0 takes a free one."""
    host: str = "127.0.0.1"
    """Address to bind; whoever reaches it reads the figures."""


class RolloutConfig(Options):
    """Everything `octopus rollout` can be told."""

    run: str = Field(default="default", pattern=r"^[A-Za-z0-9_-][A-Za-z0-9_.-]*$")
    """Name of the run: keys, topics and episodes carry it."""
    replica_id: str = Field(
        default_factory=lambda: socket.gethostname() or "replica",
        pattern=r"^[A-Za-z0-9_-][A-Za-z0-9_.-]*$",
    )
    """Name of this replica, alone in its run; unset is the host's name."""
    run_folder: Path = Path("runs")
    """Folder of the runs; this replica's own is RUN/REPLICA in it."""
    model: ModelOptions = ModelOptions()
    engine: EngineOptions = EngineOptions()
    server: ServerOptions = ServerOptions()
    openai: OpenAIOptions = OpenAIOptions()
    limits: LimitOptions = LimitOptions()
    redis: RedisOptions = RedisOptions()
    mqtt: MqttOptions = MqttOptions()
    adapters: AdapterOptions = AdapterOptions()
    metrics: MetricsOptions = MetricsOptions()

    @property
    def folder(self) -> Path:
        """What this replica keeps: its address, cached adapters, episodes that Redis refused."""
        return self.run_folder / self.run / self.replica_id

    @model_validator(mode="after")
    def _check_pairs(self) -> RolloutConfig:
        self._check_engine()
        self._check_server()
        if self.limits.answer_reserve >= self.limits.thread_budget:
            raise ConfigError(
                "limits.answer_reserve leaves nothing of limits.thread_budget",
                value=self.limits.answer_reserve,
                limit=f"below {self.limits.thread_budget}",
                remedy="lower the reserve or raise the budget",
            )
        return self

    def _check_engine(self) -> None:
        if self.model.path is None:
            raise ConfigError(
                "model.path is not set", remedy="give a checkpoint's folder with --model.path"
            )
        if self.engine.name == "vllm":
            self._check_vllm()

    def _check_vllm(self) -> None:
        model = self.model
        if model.dtype == "float64":
            raise ConfigError(
                "model.dtype is not one that vLLM computes in",
                value=model.dtype,
                limit="float32, bfloat16, float16",
                remedy="set --model.dtype bfloat16, or use --engine.name transformers",
            )
        if ":" in model.device:
            raise ConfigError(
                "vLLM takes no single device by number",
                value=model.device,
                limit="cpu, cuda",
                remedy="set --model.device cuda and CUDA_VISIBLE_DEVICES="
                f"{model.device.partition(':')[2]}",
            )

    def require_engine(self) -> None:
        """Refuse a machine that lacks what the engine needs; values alone are checked before.

        Raises:
            ConfigError: `engine.name` is vllm and this machine's vLLM is not the one it needs.
        """
        if self.engine.name == "vllm":
            require_vllm(self.model.device)

    def _check_server(self) -> None:
        server = self.server
        if (server.tls_cert is None) != (server.tls_key is None):
            raise ConfigError(
                "server.tls_cert and server.tls_key go together",
                value=f"tls_cert={server.tls_cert}, tls_key={server.tls_key}",
                remedy="set both or neither",
            )
        if server.tls_client_ca is not None and server.tls_cert is None:
            raise ConfigError(
                "server.tls_client_ca needs server.tls_cert",
                value=server.tls_client_ca,
                remedy="set server.tls_cert and server.tls_key too",
            )
        asks = (server.token, server.tokens, server.tls_client_ca)
        if server.host not in _LOOPBACK and all(each is None for each in asks):
            raise ConfigError(
                "server.host is open to others without server.token",
                value=server.host,
                limit="127.0.0.1 without authentication",
                remedy="set OCTOPUS_TOKEN or server.tokens, or server.tls_client_ca for mutual TLS",
            )
