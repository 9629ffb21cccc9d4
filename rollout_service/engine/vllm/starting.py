"""Starting a vLLM engine: what it was asked to be, its process, and what serves over that."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from harness_sdk.errors import ConfigError
from rollout_service.engine.base import EngineInfo
from rollout_service.engine.vllm.adapters import Adapters
from rollout_service.engine.vllm.builder import FootingBuilder
from rollout_service.engine.vllm.launch import Pool, launch
from rollout_service.engine.vllm.limits import check_cpu_model
from rollout_service.engine.vllm.lora import AdapterReader
from rollout_service.engine.vllm.model_facts import ModelFacts, read_facts
from rollout_service.engine.vllm.process import EngineProcess, launched


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineOptions:
    """The arguments of `VllmEngine`, where they are explained."""

    model_path: str
    device: str
    dtype: str
    head_dtype: str
    max_tokens: int | None
    max_states: int
    page_tokens: int | None
    mount_layers: tuple[int, ...] | None
    max_num_seqs: int
    max_adapters: int
    max_lora_rank: int
    tensor_parallel_size: int
    async_scheduling: bool
    hang_timeout_s: float
    detokenize: Callable[[Sequence[int]], str] | None
    vllm_arguments: Mapping[str, Any]

    def pool(self, facts: ModelFacts) -> Pool:
        """How much may be resident of a model."""
        return Pool(
            max_tokens=self.max_tokens,
            page_tokens=None if facts.num_state_groups else self.page_tokens,
            num_state_blocks=facts.num_state_groups * self.max_states,
        )


@dataclass(slots=True)
class StepUse:
    """Hands the pool's use after each step on, once somebody takes it."""

    take: Callable[[float], None] | None = None

    def __call__(self, kv_use: float) -> None:
        if self.take is not None:
            self.take(kv_use)


async def checked_facts(options: EngineOptions) -> ModelFacts:
    """What the model folder says.

    Raises:
        ConfigError: The model or an option cannot be served.
    """
    if options.device == "cpu":
        check_cpu_model(options.model_path, options.dtype)
    facts = await asyncio.to_thread(read_facts, options.model_path)
    facts.mount_layers(options.mount_layers)
    if options.device == "cpu" and facts.has_experts and options.max_adapters:
        raise ConfigError(
            "vLLM has no CPU kernel for experts beside adapters",
            value=f"max_adapters={options.max_adapters}",
            limit="max_adapters=0",
            remedy="serve version 0 alone, use --engine.name transformers, or a GPU",
        )
    return facts


async def launched_llm(
    options: EngineOptions,
    facts: ModelFacts,
    lora_targets: Sequence[str],
    on_step: StepUse,
    output: int,
) -> Any:
    """vLLM's `AsyncLLM` with the model loaded.

    Args:
        options: What it is asked to be.
        facts: Of the model.
        lora_targets: Modules that adapters may change.
        on_step: Told of each step.
        output: File that its processes write to.

    Raises:
        ConfigError: It did not start.
    """
    start = partial(
        launch,
        options.model_path,
        device=options.device,
        dtype=options.dtype,
        head_dtype=options.head_dtype,
        pool=options.pool(facts),
        mount_layers=facts.mount_layers(options.mount_layers),
        max_positions=facts.max_positions,
        max_num_seqs=options.max_num_seqs,
        max_adapters=options.max_adapters,
        max_lora_rank=options.max_lora_rank,
        lora_targets=lora_targets,
        tensor_parallel_size=options.tensor_parallel_size,
        async_scheduling=options.async_scheduling,
        on_step=on_step,
        output=output,
        extra=options.vllm_arguments,
    )
    return await launched(start)


async def builder_over(
    options: EngineOptions, llm: Any, process: EngineProcess, on_step: StepUse
) -> FootingBuilder:
    """What serves calls over a process that has started."""
    builder = FootingBuilder(llm, process)
    on_step.take = builder.client.on_step
    await builder.client.command("usage")
    if options.detokenize is not None:
        await builder.client.load_detokenizer(options.detokenize)
    return builder


def adapter_reader(options: EngineOptions, facts: ModelFacts) -> AdapterReader:
    """What reads versions for the model."""
    return AdapterReader(options.model_path, facts.model_hash, has_experts=facts.has_experts)


def adapters_over(
    options: EngineOptions, reader: AdapterReader, builder: FootingBuilder
) -> Adapters:
    """What loads versions beside the base model."""
    return Adapters(
        builder,
        reader,
        max_adapters=options.max_adapters,
        max_rank=options.max_lora_rank,
        dtype=getattr(torch, options.dtype),
    )


def engine_info(options: EngineOptions, facts: ModelFacts, builder: FootingBuilder) -> EngineInfo:
    """What an engine that has started is."""
    use = builder.client.use
    return EngineInfo(
        name="vllm",
        model=options.model_path,
        model_hash=facts.model_hash,
        vocab_size=facts.vocab_size,
        max_positions=facts.max_positions,
        mount_layers=facts.mount_layers(options.mount_layers),
        page_tokens=use.page_rows,
        dtype=builder.client.dtype,
        head_dtype=builder.client.head_dtype,
        cursor_tokens=use.page_rows * (0.5 + facts.num_state_groups / use.blocks_per_page),
    )
