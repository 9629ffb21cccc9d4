"""The engine that the configuration names; neither one imports the other's packages."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from harness_sdk.errors import Unavailable
from harness_sdk.interpreter import uncollected
from rollout_service.chat import ChatTokenizer
from rollout_service.config import RolloutConfig
from rollout_service.engine.base import Engine

_MAX_TOKENS = 262_144
"""Resident at a time with transformers, where `engine.max_tokens` is unset."""


def new_engine(
    config: RolloutConfig, tokenizer: ChatTokenizer, on_end: Callable[[Unavailable], None]
) -> Engine:
    """The engine, not started.

    Args:
        config: Of the service.
        tokenizer: Of the model, for stop strings.
        on_end: Told once the engine has ended and is not started again.

    Raises:
        ConfigError: The engine cannot be what it is asked to be.
    """
    if config.engine.name == "vllm":
        return _vllm_engine(config, tokenizer, on_end)
    with uncollected():
        from rollout_service.engine.transformers import TransformersEngine

    return TransformersEngine(
        str(config.model.path),
        device=config.model.device,
        dtype=config.model.dtype,
        head_dtype=config.model.head_dtype,
        max_tokens=config.engine.max_tokens or _MAX_TOKENS,
        mount_layers=config.model.mount_layers,
        max_num_seqs=config.engine.max_num_seqs,
        detokenize=tokenizer.decode,
    )


def _vllm_engine(
    config: RolloutConfig, tokenizer: ChatTokenizer, on_end: Callable[[Unavailable], None]
) -> Engine:
    from rollout_service.engine.vllm import VllmEngine
    from rollout_service.engine.vllm.supervisor import RestartPolicy

    options = config.engine.vllm
    arguments: dict[str, Any] = {}
    if config.model.device != "cpu":
        arguments["gpu_memory_utilization"] = options.gpu_memory_fraction
    if options.max_batched_tokens is not None:
        arguments["max_num_batched_tokens"] = options.max_batched_tokens
    return VllmEngine(
        str(config.model.path),
        device=config.model.device,
        dtype=config.model.dtype,
        head_dtype=config.model.head_dtype,
        max_tokens=config.engine.max_tokens,
        max_states=options.max_states,
        page_tokens=options.page_tokens,
        mount_layers=config.model.mount_layers,
        max_num_seqs=config.engine.max_num_seqs,
        # Without the bus no adapter ever comes, and LoRA's buffers would cost for nothing.
        max_adapters=0 if config.mqtt.url is None else config.adapters.max_versions,
        max_lora_rank=options.max_lora_rank,
        tensor_parallel_size=options.tensor_parallel_size,
        detokenize=tokenizer.decode,
        hang_timeout_s=options.hang_timeout_s,
        restarts=RestartPolicy(
            max_restarts=options.max_restarts, window_s=options.restart_window_s
        ),
        on_end=on_end,
        vllm_arguments=arguments | options.arguments,
    )
