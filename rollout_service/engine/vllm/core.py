"""One engine process with all that serves calls over it, from its start to its end."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from dataclasses import dataclass

from harness_sdk.errors import Unavailable
from rollout_service.engine.vllm.adapters import Adapters
from rollout_service.engine.vllm.builder import FootingBuilder
from rollout_service.engine.vllm.engine_log import EngineLog
from rollout_service.engine.vllm.model_facts import ModelFacts
from rollout_service.engine.vllm.process import EngineProcess
from rollout_service.engine.vllm.rehearsal import rehearse
from rollout_service.engine.vllm.starting import (
    EngineOptions,
    StepUse,
    adapter_reader,
    adapters_over,
    builder_over,
    launched_llm,
)

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Core:
    """What serves calls while its process runs; afterwards it still takes back what is released."""

    process: EngineProcess
    builder: FootingBuilder
    adapters: Adapters
    log: EngineLog

    @property
    def has_ended(self) -> bool:
        """Whether its process ended, or is being closed."""
        return self.process.has_ended

    async def ended(self) -> Unavailable:
        """Wait for that; returns what its callers are told."""
        return await self.process.ended()

    def last_lines(self) -> list[str]:
        """What the process wrote last; blocks until it has ended, for a second at most."""
        return self.log.last_lines()

    async def close(self) -> None:
        """End the process and free what it left; twice does no harm."""
        await self.builder.close()
        await self.process.close()


async def start_core(
    options: EngineOptions, facts: ModelFacts, before: Core | None, adapters: Mapping[int, str]
) -> Core:
    """An engine process with its versions loaded.

    Args:
        options: What it is asked to be.
        facts: Of the model.
        before: The one before it, which has ended and whose cursors go on.
        adapters: Folder of each version to load.

    Raises:
        ConfigError: vLLM did not start.
        AdapterError: A version cannot be loaded any more.
    """
    if before is not None:
        await before.close()
    reader = adapter_reader(options, facts)
    targets = await asyncio.to_thread(reader.targets) if options.max_adapters else ()
    # A folder that is gone is told before a model is loaded for minutes.
    for path in adapters.values():
        await asyncio.to_thread(reader.read, path, max_rank=options.max_lora_rank)
    log, on_step = EngineLog(), StepUse()
    try:
        llm = await launched_llm(options, facts, targets, on_step, log.output)
    except Exception:
        lines = await asyncio.to_thread(log.last_lines)
        logger.error("the engine's last lines:\n%s", "\n".join(lines) or "it wrote nothing")
        raise
    finally:
        log.seal()
    process = EngineProcess(llm, hang_timeout_s=options.hang_timeout_s)
    try:
        builder = await builder_over(options, llm, process, on_step)
        served = adapters_over(options, reader, builder)
        # On the CPU vLLM compiles for ten seconds at the first score: not at every start.
        if options.device == "cuda" and options.max_adapters:
            longest = min(facts.max_positions, builder.client.use.capacity)
            await rehearse(served, builder, max_tokens=longest)
        for version, path in sorted(adapters.items()):
            await served.load(version, path)
    except BaseException:
        await process.close()
        raise
    if before is not None:
        builder.succeed(before.builder)
    return Core(process=process, builder=builder, adapters=served, log=log)
