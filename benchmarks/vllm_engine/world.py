"""An engine with sessions over it, as a replica runs them, and short ways to use them."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.vllm_engine.report import say
from benchmarks.vllm_engine.scale import Scale
from benchmarks.vllm_engine.shapes import Texts
from harness_sdk.types import Limits, Message, SamplingOptions, Turn
from rollout_service.chat import ChatRenderer, ChatTokenizer
from rollout_service.engine.base import Engine
from rollout_service.engine.vllm import VllmEngine
from rollout_service.interpreter import quickly_switched, seldom_collected
from rollout_service.sessions import Call, OpenRequest, SessionOptions, Sessions

_TIMED = "benchmarks.vllm_engine.timed"
_LIMITS = Limits(
    thread_budget=None, answer_reserve=0, max_threads=1 << 20, max_depth=0, max_turns=1 << 20
)


@dataclass(kw_only=True)
class World:
    """A started engine, and sessions whose newest version `version` names."""

    scale: Scale
    engine: VllmEngine
    chat: ChatRenderer
    texts: Texts
    sessions: Sessions = field(init=False)
    version: int = 0

    def __post_init__(self) -> None:
        self.sessions = self.new_sessions(self.engine)

    def new_sessions(self, engine: Engine, *, thread_budget: int | None = None) -> Sessions:
        """Sessions over `engine`; with the model's own limits where no budget is given."""
        limit = thread_budget or self.engine.info.max_positions
        return Sessions(
            engine,
            self.chat,
            None,
            SessionOptions(thread_budget=limit, answer_reserve=0, max_closed=1 << 20),
            newest_version=lambda: self.version,
        )

    async def open(self, episode_id: str) -> None:
        """Open an episode; waits for admission."""
        await self.sessions.open(OpenRequest(episode_id=episode_id, limits=_LIMITS))

    async def turn(
        self, episode_id: str, thread: str, text: str = "", *, num_tokens: int = 1
    ) -> Turn:
        """A model turn after an observation."""
        head = self.sessions.episode(episode_id).thread(thread).head
        role = "user" if head is None else "tool"
        return await self.sessions.turn(
            Call(episode_id=episode_id, thread_id=thread),
            [Message(role=role, content=text)] if text else [],
            sampling=SamplingOptions(max_tokens=num_tokens),
        )

    async def drop_thread(self, episode_id: str, thread: str) -> None:
        """Give the residency of a thread's own cursors back."""
        nodes = self.sessions.episode(episode_id).nodes
        await self.engine.evict([node.cursor for node in nodes if node.thread_id == thread])

    @asynccontextmanager
    async def clocks(self) -> AsyncIterator[None]:
        """Time the steps in which requests begin, one request at a time."""
        await self._set_clocks(True)
        try:
            yield
        finally:
            await self._set_clocks(False)

    async def _set_clocks(self, is_timed: bool) -> None:
        llm = self.engine._newest().client._llm
        await llm.engine_core.call_utility_async("octopus_bench_clocks", is_timed)
        await llm.collective_rpc("octopus_bench_clocks", args=(is_timed,))

    async def times(self) -> list[dict[str, Any]]:
        """Seconds of each step in which a request began since the last call: core and worker."""
        llm = self.engine._newest().client._llm
        core = await llm.engine_core.call_utility_async("octopus_bench_times")
        (worker,) = await llm.collective_rpc("octopus_bench_times")
        if len(core) != len(worker):
            say(f"{len(core)} steps in the core, {len(worker)} in the worker")
        return [
            {**step, "worker_s": seconds, "server_s": step["core_s"] + seconds}
            for step, seconds in zip(core, worker, strict=False)
        ]


def call(episode_id: str, thread: str = "root") -> Call:
    """The address of a call."""
    return Call(episode_id=episode_id, thread_id=thread)


@asynccontextmanager
async def running(
    scale: Scale, folder: Path, *, pool: str, timed: bool = False, **options: Any
) -> AsyncIterator[World]:
    """Start an engine and end it.

    Args:
        scale: Sizes.
        folder: Model.
        pool: Which of the scale's pools.
        timed: Whether there are clocks in the engine's processes.
        options: Further arguments of `VllmEngine`; those of vLLM itself as `vllm`.
    """
    arguments = vllm_arguments(scale, pool) | options.pop("vllm", {})
    if timed:
        kind = "CPU" if scale.device == "cpu" else "GPU"
        arguments["scheduler_cls"] = f"{_TIMED}.TimedScheduler"
        arguments["worker_cls"] = f"{_TIMED}.Timed{kind}Worker"
    engine = VllmEngine(
        str(folder),
        device=scale.device,
        dtype=scale.dtype,
        vllm_arguments=arguments,
        **{"max_adapters": 0, **scale.engine, **options},
    )
    say(f"starting the engine (pool {pool})")
    await engine.start()
    stats = engine.stats()
    say(f"engine is up: {stats.tokens_capacity} tokens, pages of {engine.info.page_tokens}")
    try:
        world = World(
            scale=scale,
            engine=engine,
            chat=ChatRenderer(ChatTokenizer.load(folder)),
            texts=Texts(folder),
        )
        # As the service's process does.
        with seldom_collected(), quickly_switched():
            yield world
    finally:
        await engine.close()


def vllm_arguments(scale: Scale, pool: str) -> dict[str, Any]:
    """Arguments of vLLM that this engine and the plain one share."""
    arguments = dict(scale.vllm)
    if scale.pool_bytes[pool]:
        arguments["kv_cache_memory_bytes"] = scale.pool_bytes[pool]
        # Or vLLM wants most of the device to be free when it starts.
        arguments["gpu_memory_utilization"] = 0.1
    return arguments
