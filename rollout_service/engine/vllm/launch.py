"""Starting vLLM's engine process: environment, arguments, and a stand-in for torchvision.

vLLM is imported here at the earliest in `launch`, after the environment that it reads is set.
"""

from __future__ import annotations

import atexit
import dataclasses
import functools
import importlib
import importlib.util
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from harness_sdk.errors import ConfigError
from rollout_service.engine.vllm.lifeline import Lifeline

_PACKAGE = "rollout_service.engine.vllm"
_STUBS = Path(__file__).parent / "stubs"
POOL_KEY = "octopus"
"""Where vLLM's `additional_config` carries the pool to the workers."""
MOUNT_LAYERS_KEY = "octopus_mount_layers"
"""And where the layers that read mounts."""
_LIFELINE_KEY = "octopus_lifeline"
_CPU_POOL_BYTES = 1 << 30
"""Where nothing else is asked for: left alone, vLLM takes most of the machine's memory."""
DEVICE_ARGUMENTS: dict[str, dict[str, Any]] = {
    "cpu": {"enforce_eager": True, "kv_cache_memory_bytes": _CPU_POOL_BYTES},
    # Graphs for decoding and nothing compiled by inductor, as measured: vLLM's own choice starts in
    # three minutes in place of one.
    "cuda": {"compilation_config": {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"}},
}
"""What vLLM is asked for on each device, unless the caller asks for something else."""
_NULL_BLOCKS = 1
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json")
_LORA_RANKS = (8, 16, 32, 64, 128, 256, 320, 512)
"""Sizes of its buffers."""
_ENVIRONMENT = {
    # The service runs threads (gRPC); a fork of it could hang.
    "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
    "VLLM_USE_V2_MODEL_RUNNER": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    # Cores are the host's to share out.
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "TOKENIZERS_PARALLELISM": "false",
    # It tells of memory that it then frees, which is what it is for.
    "PYTHONWARNINGS": "ignore:resource_tracker:UserWarning",
}
_SOCKETS = "VLLM_RPC_BASE_PATH"


@dataclass(frozen=True, slots=True, kw_only=True)
class Pool:
    """How much may be resident at a time."""

    max_tokens: int | None
    """Rows of K/V, in whole pages; None takes what memory allows, states included."""
    page_tokens: int | None
    """Rows per page where the model leaves the choice."""
    num_state_blocks: int = 0
    """Blocks for recurrent states beside the pages."""

    def num_blocks(self, page_rows: Sequence[int]) -> int:
        """Blocks for `max_tokens` and the states.

        Args:
            page_rows: Rows of a page in each attention group, all of which take their own blocks.
        """
        assert self.max_tokens is not None
        num_pages = sum(-(-self.max_tokens // rows) for rows in page_rows)
        return num_pages + self.num_state_blocks + _NULL_BLOCKS


def prepare_environment() -> None:
    """Set what vLLM and its engine process read when they are imported; what is set stays.

    May be called again.
    """
    for name, value in _ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    if _SOCKETS not in os.environ:
        os.environ[_SOCKETS] = _sockets()
    if importlib.util.find_spec("torchvision") is None and str(_STUBS) not in sys.path:
        # vLLM's Qwen 3.5 module imports vision code that a text model never calls.
        sys.path.append(str(_STUBS))
        paths = [os.environ.get("PYTHONPATH", ""), str(_STUBS)]
        os.environ["PYTHONPATH"] = os.pathsep.join(path for path in paths if path)


@functools.cache
def _sockets() -> str:
    """A folder for vLLM's sockets, which it leaves where they are: it goes with this process."""
    folder = tempfile.mkdtemp(prefix="octopus-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


def has_tokenizer(model_path: str) -> bool:
    """Whether vLLM finds a tokenizer in the folder."""
    return all((Path(model_path) / name).is_file() for name in _TOKENIZER_FILES)


def launch(
    model_path: str,
    *,
    device: str,
    dtype: str,
    head_dtype: str,
    pool: Pool,
    mount_layers: Sequence[int],
    max_positions: int,
    max_num_seqs: int,
    max_adapters: int,
    max_lora_rank: int,
    lora_targets: Sequence[str],
    tensor_parallel_size: int,
    async_scheduling: bool,
    on_step: Callable[[float], None],
    output: int,
    extra: Mapping[str, Any],
) -> Any:
    """Start the engine; blocks until the model is loaded.

    Args:
        model_path: Hugging Face folder.
        device: cpu or cuda.
        dtype: Of weights and K/V.
        head_dtype: Of the logits: float32, or model.
        pool: How much stays resident.
        mount_layers: Decoder layers that read mounts.
        max_positions: Longest context of the model.
        max_num_seqs: Requests computed at once.
        max_adapters: LoRA versions beside the base model; 0 serves the base model alone.
        max_lora_rank: Highest rank among them.
        lora_targets: Modules that they may change.
        tensor_parallel_size: Devices that share every layer.
        async_scheduling: Whether the core schedules a step ahead.
        on_step: Told the pool's use, 0 to 1, after each step.
        output: Descriptor that takes what its processes write.
        extra: Further engine arguments of vLLM, which win; its `hf_overrides` and
            `compilation_config` come beside ours.

    Returns:
        vLLM's `AsyncLLM`.

    Raises:
        ConfigError: The installed vLLM lacks something that the engine stands on, or refuses the
            arguments, or an argument takes states or blocks out of the engine's hands.
    """
    prepare_environment()
    # Every seam is looked up here, before a process is started.
    seams: Any = importlib.import_module(f"{_PACKAGE}.seams")
    arguments: dict[str, Any] = {
        "model": model_path,
        "dtype": dtype,
        # Only constraints need one: text is the service's affair.
        "skip_tokenizer_init": not has_tokenizer(model_path),
        "structured_outputs_config": {"backend": "xgrammar"},
        "max_num_seqs": max_num_seqs,
        # By the number of the call that a request belongs to.
        "scheduling_policy": "priority",
        "enable_prefix_caching": False,
        "tensor_parallel_size": tensor_parallel_size,
        "async_scheduling": async_scheduling,
        "logprobs_mode": "processed_logprobs",
        "max_logprobs": 1,
        "seed": int.from_bytes(os.urandom(4), "big") >> 1,
        "scheduler_cls": f"{_PACKAGE}.scheduler.{'Ahead' * async_scheduling}CursorScheduler",
        "worker_cls": f"{_PACKAGE}.worker.Cursor{'CPU' if device == 'cpu' else 'GPU'}Worker",
        "disable_log_stats": True,
        "enable_log_requests": False,
        "additional_config": {MOUNT_LAYERS_KEY: list(mount_layers)},
        **DEVICE_ARGUMENTS[device],
    }
    if max_adapters:
        # On CPUs vLLM 0.32.0 adds the last slot's adapter to the base model's tokens wherever they
        # share a batch with an adapter's (it indexes by -1): one more slot, never filled, adds 0.
        num_slots = max_adapters + (device == "cpu")
        arguments |= {
            "enable_lora": True,
            "max_loras": num_slots,
            "max_cpu_loras": num_slots,
            "max_lora_rank": next(rank for rank in _LORA_RANKS if rank >= max_lora_rank),
            "lora_target_modules": list(lora_targets),
        }
    if pool.page_tokens is not None:
        arguments["block_size"] = pool.page_tokens
    if pool.max_tokens is not None:
        # The page size is known in the worker alone: a hybrid's follows its recurrent state's.
        arguments["additional_config"][POOL_KEY] = dataclasses.asdict(pool)
        arguments["max_model_len"] = min(pool.max_tokens, max_positions)
    own = arguments.get("compilation_config", {})
    arguments |= dict(extra)
    arguments["hf_overrides"] = _overrides(head_dtype, extra.get("hf_overrides"))
    if isinstance(compilation := extra.get("compilation_config"), Mapping):
        arguments["compilation_config"] = {**own, **compilation}
    config = _engine_config(seams, arguments)
    # vLLM takes it back on CPUs, where its worker cannot overlap steps; the core can.
    config.scheduler_config.async_scheduling = async_scheduling
    if tensor_parallel_size == 1:
        # On CPUs vLLM would start a second process, to bind threads that are the host's to bind.
        config.parallel_config.distributed_executor_backend = "uni"
    # A folder that was set by somebody else stays.
    sockets = _sockets() if _sockets.cache_info().currsize else None
    config.additional_config[_LIFELINE_KEY] = Lifeline(output, sockets)
    return seams.AsyncLLM.from_vllm_config(
        config, disable_log_stats=True, stat_loggers=[_step_logger(seams.StatLoggerBase, on_step)]
    )


def _overrides(head_dtype: str, given: Any) -> dict[str, Any]:
    """What is changed in the model's configuration.

    Raises:
        ConfigError: `given` is no table, or asks for another type of the logits.
    """
    if given is not None and not isinstance(given, Mapping):
        raise ConfigError(
            "hf_overrides is a table",
            value=repr(given),
            limit="names and values",
            remedy="give it as {name = value}",
        )
    overrides = {"head_dtype": head_dtype} | dict(given or {})
    if overrides["head_dtype"] != head_dtype:
        raise ConfigError(
            "hf_overrides asks for another type of the logits than head_dtype",
            value=f"head_dtype {overrides['head_dtype']!r}",
            limit=repr(head_dtype),
            remedy="set model.head_dtype, which records tell",
        )
    return overrides


def _engine_config(seams: Any, arguments: Mapping[str, Any]) -> Any:
    try:
        config = seams.AsyncEngineArgs(**arguments).create_engine_config()
    except ValidationError as error:
        raise _refused("; ".join(map(_cause, error.errors()))) from error
    except (TypeError, ValueError) as error:
        raise _refused(str(error)) from error
    cache = config.cache_config
    # Each keeps a sequence's state in more than the one block, or engine, that a cursor takes over,
    # or brings it from elsewhere by the tokens of one request, which are not all of a cursor's.
    unserved = {
        "enable_prefix_caching": cache.enable_prefix_caching,
        "mamba_cache_mode": cache.mamba_cache_mode != "none",
        "use_replayssm": cache.use_replayssm,
        "speculative_config": config.speculative_config is not None,
        "pipeline_parallel_size": config.parallel_config.pipeline_parallel_size > 1,
        "data_parallel_size": config.parallel_config.data_parallel_size > 1,
        "decode_context_parallel_size": config.parallel_config.decode_context_parallel_size > 1,
        "kv_transfer_config": config.kv_transfer_config is not None,
    }
    given = [name for name, is_given in unserved.items() if is_given]
    if given:
        raise ConfigError(
            "cursors do not go together with these arguments of vLLM",
            value=", ".join(given),
            limit="none of them",
            remedy="leave them out of engine.vllm.arguments",
        )
    return config


def _refused(causes: str) -> ConfigError:
    return ConfigError(
        f"vLLM refuses the engine's arguments: {causes}",
        remedy="change engine.vllm.arguments, or the setting that it names",
    )


def _cause(fault: Mapping[str, Any]) -> str:
    """A fault that pydantic found; one of several arguments together names them itself."""
    name = ".".join(map(str, fault["loc"]))
    return f"{name}: {fault['msg']}, got {fault['input']!r:.100}" if name else fault["msg"]


def _step_logger(base: Any, on_step: Callable[[float], None]) -> Any:
    """A factory of vLLM stat loggers that only tells the pool's use."""

    class StepLogger(base):
        """Hands each step's pool use on."""

        def __init__(self, vllm_config: Any, engine_index: int = 0) -> None:
            """Nothing to prepare."""

        def record(
            self,
            scheduler_stats: Any,
            iteration_stats: Any,
            mm_cache_stats: Any = None,
            engine_idx: int = 0,
        ) -> None:
            """Called after each step."""
            if scheduler_stats is not None:
                on_step(scheduler_stats.kv_cache_usage)

        def log_engine_initialized(self) -> None:
            """Nothing to log."""

    return StepLogger
