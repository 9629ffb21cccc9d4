"""The agent-shaped load and plain decoding through this engine."""

from __future__ import annotations

import asyncio
import random
import statistics
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing
from typing import Any

from benchmarks.vllm_engine.episodes import Script, Tally, load_scripts, play, told
from benchmarks.vllm_engine.report import Report, quantile, say
from benchmarks.vllm_engine.scale import Load
from benchmarks.vllm_engine.world import World, call
from harness_sdk.errors import HarnessError
from harness_sdk.types import SamplingOptions
from rollout_service.engine.base import Generated


class SessionPlayer:
    """An episode of the sessions."""

    def __init__(self, world: World, episode_id: str) -> None:
        self._world = world
        self._episode = episode_id
        self.num_reusable = 0
        """Tokens that turns and reads found computed, or should have."""

    async def turn(self, thread: str, text: str, num_tokens: int) -> None:
        head = self._world.sessions.episode(self._episode).thread(thread).head
        self.num_reusable += head.num_visible if head is not None else 0
        await self._world.turn(self._episode, thread, text, num_tokens=num_tokens)

    async def fork(self, names: Sequence[str]) -> None:
        await self._world.sessions.fork(call(self._episode), dict.fromkeys(names, "look into it"))

    async def rewind(self, thread: str, step: int) -> None:
        await self._world.sessions.rewind(call(self._episode, thread), step, "another way")

    async def read(self, thread: str, peer: str, step: int) -> None:
        await self._world.sessions.read_thread(call(self._episode, thread), peer, step, step)


async def agent_load(world: World, report: Report) -> None:
    """Episodes at once; tokens, latency, and what was computed more than once."""
    load = world.scale.load
    world.sessions = world.new_sessions(world.engine, thread_budget=load.thread_budget)
    scripts, warm_up = load_scripts(load, world.texts)
    await _play_all(world, warm_up, Tally(), _totals(), "warm-up")
    before = world.engine.stats()
    tally, totals = Tally(), _totals()
    begin = time.perf_counter()

    def so_far(seconds: float) -> dict[str, Any]:
        sampled = world.engine.stats().tokens_sampled - before.tokens_sampled
        return counts(tally, seconds, sampled)

    async with told(report, "agent_load", tally, so_far):
        await _play_all(world, scripts, tally, totals, "load")
    seconds = time.perf_counter() - begin
    after = world.engine.stats()
    computed = after.tokens_computed - before.tokens_computed
    sampled = after.tokens_sampled - before.tokens_sampled
    recomputed = max(computed - totals["nodes"], 0)
    report.put(reuse_ratio=round(1 - recomputed / totals["reusable"], 5))
    report.put_detail(
        "agent_load",
        {
            "seconds": round(seconds, 2),
            "episodes": load.num_episodes,
            **counts(tally, seconds, sampled),
            "tokens_computed": computed,
            "tokens_unique": totals["nodes"],
            "tokens_reusable": totals["reusable"],
            "tokens_recomputed": recomputed,
            "recomputed_by_cause": {
                cause: count - before.tokens_recomputed[cause]
                for cause, count in after.tokens_recomputed.items()
            },
            "prefill_tokens_computed": computed - sampled,
            "kv_hit_rate": round(totals["reusable"] / (totals["reusable"] + computed - sampled), 5),
            "failures": totals["failures"],
            "peak_kv_use": round(totals["peak_kv"], 4),
        },
    )
    compare(report)


async def decode(world: World, report: Report) -> None:
    """Sequences of equal length that only decode."""
    num_sequences, context, num_tokens = world.scale.decode
    rng = random.Random(1)
    engine = world.engine
    roots = [
        await engine.extend(None, _ids(rng, context), mounts=(), policy_version=0)
        for _ in range(num_sequences)
    ]

    async def tokens(root: Any) -> AsyncIterator[int]:
        stream = engine.generate(
            root,
            (1, 2),
            SamplingOptions(max_tokens=num_tokens),
            stop_token_ids=frozenset(),
            policy_version=0,
        )
        async with aclosing(stream) as events:  # type: ignore[type-var]
            async for event in events:
                if isinstance(event, Generated):
                    await engine.release([event.cursor])
                else:
                    yield 1

    rates = [await decode_rate([tokens(root) for root in roots]) for _ in range(NUM_DECODES)]
    report.put_detail("decode", decode_detail(num_sequences, rates))
    await engine.release(roots)
    compare(report)


NUM_DECODES = 3
"""The first one warms up."""


def decode_detail(num_sequences: int, rates: list[float]) -> dict[str, Any]:
    """What both engines report alike."""
    return {
        "sequences": num_sequences,
        "tokens_per_s": round(statistics.median(rates[1:]), 1),
        "runs": [round(rate, 1) for rate in rates],
    }


async def decode_rate(streams: list[AsyncIterator[int]]) -> float:
    """Tokens a second while all streams decode: after the last first token, before an end.

    Args:
        streams: Each yields how many tokens came.
    """
    times: list[list[tuple[float, int]]] = [[] for _ in streams]

    async def drain(stream: AsyncIterator[int], found: list[tuple[float, int]]) -> None:
        async for count in stream:
            found.append((time.perf_counter(), count))

    await asyncio.gather(*(drain(s, t) for s, t in zip(streams, times, strict=True)))
    begin = max(found[0][0] for found in times)
    end = min(found[-1][0] for found in times)
    count = sum(n for found in times for at, n in found if begin < at <= end)
    return count / (end - begin)


def counts(tally: Tally, seconds: float, sampled: int) -> dict[str, Any]:
    """What both engines report alike; None for a latency of which there is none yet."""

    def seconds_at(values: list[float], share: float) -> float | None:
        return round(quantile(values, share), 4) if values else None

    return {
        "turns": tally.turns,
        "forks": tally.forks,
        "rewinds": tally.rewinds,
        "reads": tally.reads,
        "tokens_sampled": sampled,
        "sampled_tokens_per_s": round(sampled / seconds, 1),
        "turn_p50_s": seconds_at(tally.turn_s, 0.5),
        "turn_p95_s": seconds_at(tally.turn_s, 0.95),
        "episode_p50_s": seconds_at(tally.episode_s, 0.5),
        "episode_p95_s": seconds_at(tally.episode_s, 0.95),
    }


def count_failures(errors: BaseExceptionGroup[HarnessError], found: dict[str, int]) -> None:
    """Count errors by kind, and tell the first of each."""
    for error in errors.exceptions:
        if isinstance(error, BaseExceptionGroup):
            count_failures(error, found)
            continue
        kind = type(error).__name__
        if kind not in found:
            say(f"{kind}: {error}")
        found[kind] = found.get(kind, 0) + 1


def compare(report: Report) -> None:
    """The ratios, once both engines have been measured.

    On a CPU the details stand alone: there the engines' processes and the client share few cores,
    and which of them waits for which is what a ratio would tell.
    """
    if not report.compares:
        return
    ours, plain = report.detail("agent_load"), report.detail("plain_load")
    if ours and plain:
        report.put(end_to_end_ratio_vs_plain=round(plain["seconds"] / ours["seconds"], 4))
    ours, plain = report.detail("decode"), report.detail("plain_decode")
    if ours and plain:
        report.put(decode_ratio_vs_plain=round(ours["tokens_per_s"] / plain["tokens_per_s"], 4))


def _totals() -> dict[str, Any]:
    return {"nodes": 0, "reusable": 0, "peak_kv": 0.0, "failures": {}}


async def _play_all(
    world: World, scripts: list[Script], tally: Tally, totals: dict[str, Any], name: str
) -> None:
    load: Load = world.scale.load
    permits = asyncio.Semaphore(load.concurrency)

    async def one(number: int, script: Script) -> None:
        async with permits:
            episode, asked = f"{name}-{number}", time.perf_counter()
            await world.open(episode)
            player = SessionPlayer(world, episode)
            try:
                await play(script, player, tally, random.Random(number))
            except* HarnessError as errors:
                count_failures(errors, totals["failures"])
            nodes = world.sessions.episode(episode).nodes
            totals["nodes"] += sum(len(node.cursor.token_ids) for node in nodes)
            totals["reusable"] += player.num_reusable
            totals["peak_kv"] = max(totals["peak_kv"], world.engine.stats().kv_use)
            await world.sessions.close(episode)
            tally.episode_s.append(time.perf_counter() - asked)

    async with asyncio.TaskGroup() as group:
        for number, script in enumerate(scripts):
            group.create_task(one(number, script))


def _ids(rng: random.Random, count: int) -> tuple[int, ...]:
    return tuple(rng.randrange(8000) for _ in range(count))
