"""Recurrent checkpoints that stay resident, and threads that decode beside them."""

from __future__ import annotations

import asyncio
import time

from benchmarks.vllm_engine.report import Report, say
from benchmarks.vllm_engine.world import World, call
from harness_sdk.types import SamplingOptions

_EPISODE = "checkpoints"
_AT_ONCE = 32
_TURN_TOKENS = 64
_STEADY_TOKENS = 8


async def resident(world: World, report: Report) -> None:
    """Fork children off one root until so many checkpoints are held; decode in as many threads.

    A thread counts as decoding while it has sampled some tokens and has more to sample; a
    checkpoint counts while the engine's own count of states holds it.
    """
    scale = world.scale
    await world.open(_EPISODE)
    await world.turn(_EPISODE, "root", world.texts.take(64))
    names = [f"thread-{number}" for number in range(scale.num_checkpoints // 2)]
    begin = time.perf_counter()
    await world.sessions.fork(call(_EPISODE), dict.fromkeys(names, "go on"))
    permits = asyncio.Semaphore(_AT_ONCE)

    async def first_turn(name: str) -> None:
        # Two checkpoints a step: after the observation and after the turn.
        async with permits:
            await world.turn(_EPISODE, name, num_tokens=2)

    await asyncio.gather(*map(first_turn, names))
    seconds = time.perf_counter() - begin
    held = world.engine.stats().recurrent_slots
    say(f"{held} checkpoints in {seconds:.1f} s, KV use {world.engine.stats().kv_use:.2f}")
    evicted = world.engine.stats().tokens_recomputed["eviction"]
    most, tokens_per_s = await _decode(world, names[: scale.num_decoding])
    stats = world.engine.stats()
    report.put(resident_checkpoints=min(held, stats.recurrent_slots), decoding_threads=most)
    report.put_detail(
        "resident",
        {
            "checkpoints_after_forks": held,
            "checkpoints_after_decoding": stats.recurrent_slots,
            "kv_use": round(stats.kv_use, 4),
            "tokens_per_s": round(tokens_per_s, 1),
            "recomputed_after_eviction": stats.tokens_recomputed["eviction"] - evicted,
            "turns_of_forks_per_s": round(len(names) / seconds, 1),
        },
    )
    await world.sessions.close(_EPISODE)


async def _decode(world: World, names: list[str]) -> tuple[int, float]:
    """Most threads that decoded at once, and tokens a second meanwhile."""
    decoding: set[str] = set()
    most = count = 0
    begin = end = 0.0

    async def turn(name: str) -> None:
        nonlocal most, count, begin, end
        sampled = 0
        async for _ in world.sessions.generate(
            call(_EPISODE, name), sampling=SamplingOptions(max_tokens=_TURN_TOKENS)
        ):
            sampled += 1
            if sampled == _STEADY_TOKENS:
                decoding.add(name)
            if sampled == _TURN_TOKENS - _STEADY_TOKENS:
                decoding.discard(name)
            if len(decoding) > most:
                most, begin, count = len(decoding), time.perf_counter(), 0
            if len(decoding) == most:
                count, end = count + 1, time.perf_counter()
        decoding.discard(name)

    await asyncio.gather(*map(turn, names))
    return most, count / max(end - begin, 1e-9)
