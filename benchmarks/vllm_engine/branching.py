"""fork, rewind and mount through the sessions: what each costs beside the forward pass.

A fork's or rewind's server time is the sessions' call itself plus what the first request after it
costs in the engine: taking it in, scheduling it, attaching its pages, and copying its partial page
and recurrent state until the device is done. A mount's is the resolving of its spans plus the same
of the request that carries them. The forward pass over the new tokens is not part of it, so these
requests compute one token; some whole turns are timed beside them.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import Any

from benchmarks.vllm_engine.report import Report, say, spread
from benchmarks.vllm_engine.world import World, call
from harness_sdk.types import SamplingOptions
from rollout_service.cursors import Cursor
from rollout_service.engine.base import Generated
from rollout_service.sessions.mounts import resolve_read

_NOTE = "try another way"
_NUM_WHOLE = 4
"""Whole turns timed for each context."""


async def fork(world: World, report: Report) -> None:
    """One child at a time from contexts of each length, in turns."""
    medians = await _in_turns(world, report, "fork", _fork_sample)
    report.put(
        fork_ms_128k=medians[world.scale.full_context], fork_flatness=_flatness(medians.values())
    )


async def rewind(world: World, report: Report) -> None:
    """Back to the prompt, contexts of each length in turns."""
    medians = await _in_turns(world, report, "rewind", _rewind_sample)
    report.put(rewind_ms_128k=medians[world.scale.full_context])


async def mount(world: World, report: Report) -> None:
    """A thread that reads one step of its peer, each time anew."""
    episode, size = "mounts", world.scale.mount_tokens
    await world.open(episode)
    await world.turn(episode, "root", world.texts.take(300))
    await world.sessions.fork(call(episode), {"peer": "read on", "reader": "compare"})
    await world.turn(episode, "peer", num_tokens=4)
    await world.turn(episode, "peer", world.texts.take(size))
    await world.turn(episode, "reader", num_tokens=4)
    async with world.clocks():
        samples = [await _mount_sample(world, episode) for _ in range(world.scale.num_samples + 1)]
    whole = [await _read_ms(world, episode) for _ in range(_NUM_WHOLE)]
    del samples[0]
    report.put(
        mount_ms_32k=spread([sample["server_ms"] for sample in samples])["median"],
        mount_full_pages=int(max(sample["full_pages"] for sample in samples)),
    )
    report.put_detail(
        "mount",
        {
            "spans": max(sample["mounts"] for sample in samples),
            "tokens_mounted": max(sample["mounted_rows"] for sample in samples),
            "rows_copied_most": max(sample["copied_rows"] for sample in samples),
            "read_thread_whole_ms": spread(whole),
            **_columns(samples, ("server_ms", "call_ms", "core_ms", "worker_ms")),
        },
    )
    await world.sessions.close(episode)


async def _in_turns(
    world: World,
    report: Report,
    name: str,
    sample: Callable[[World, str, int], Awaitable[dict[str, float]]],
) -> dict[int, float]:
    """Samples of all contexts in turns; returns the median of each."""
    samples = await _contexts(world, report)
    async with world.clocks():
        for index in range(world.scale.num_samples + 1):
            for context, found in samples.items():
                found.append(await sample(world, f"context-{context}", index))
            if index % 50 == 0:
                say(f"{name} {index}/{world.scale.num_samples}")
    medians = {}
    for context, found in samples.items():
        # The first one warms up.
        columns = _columns(found[1:], tuple(found[0]))
        whole = [await _whole_ms(world, f"context-{context}", name, i) for i in range(_NUM_WHOLE)]
        report.put_detail(name, {f"{context}": {**columns, "whole_turn_ms": spread(whole)}})
        medians[context] = columns["server_ms"]["median"]
    report.put_detail(name, {"flatness": _flatness(medians.values())})
    return medians


async def _contexts(world: World, report: Report) -> dict[int, list[dict[str, float]]]:
    """An episode with a prompt of each length; made once, for fork and rewind."""
    for context in world.scale.contexts:
        episode = f"context-{context}"
        if episode in world.sessions._episodes:
            continue
        await world.open(episode)
        begin = time.perf_counter()
        await world.turn(episode, "root", world.texts.take(context), num_tokens=2)
        seconds = time.perf_counter() - begin
        head = world.sessions.episode(episode).root.head
        assert head is not None
        say(f"context of {head.num_tokens} tokens in {seconds:.2f} s")
        report.put_detail(
            "contexts", {f"{context}": {"tokens": head.num_tokens, "prefill_s": round(seconds, 3)}}
        )
    report.put(context_tokens=world.scale.full_context)
    return {context: [] for context in world.scale.contexts}


async def _fork_sample(world: World, episode: str, index: int) -> dict[str, float]:
    name = f"child-{index}"
    begin = time.perf_counter()
    await world.sessions.fork(call(episode), {name: "look into it"})
    called = time.perf_counter()
    head = world.sessions.episode(episode).thread(name).head
    sample = _sample(called - begin, await _one_token(world, head))
    await world.sessions.cancel(call(episode, name))
    return sample


async def _rewind_sample(world: World, episode: str, index: int) -> dict[str, float]:
    begin = time.perf_counter()
    await world.sessions.rewind(call(episode), 0, _NOTE)
    called = time.perf_counter()
    head = world.sessions.episode(episode).root.head
    return _sample(called - begin, await _one_token(world, head))


async def _mount_sample(world: World, episode: str) -> dict[str, float]:
    opened = world.sessions.episode(episode)
    reader = opened.thread("reader")
    begin = time.perf_counter()
    spans = resolve_read(reader, opened.thread("peer"), 1, 1).new
    called = time.perf_counter()
    cursor = await world.engine.extend(
        reader.head, (7, 8), mounts=(*reader.mounts, *spans), policy_version=0
    )
    (step,) = [step for step in await world.times() if step["mounts"]]
    await world.engine.release([cursor])
    counts = {key: step[key] for key in ("mounts", "mounted_rows", "copied_rows", "full_pages")}
    return {**_sample(called - begin, step), **counts}


async def _one_token(world: World, head: Cursor | None) -> dict[str, Any]:
    """Times of a request that computes one token on top of `head`; nothing is left of it."""
    assert head is not None
    stream = world.engine.generate(
        head, (), SamplingOptions(max_tokens=1), stop_token_ids=frozenset(), policy_version=0
    )
    async for event in stream:
        if isinstance(event, Generated):
            await world.engine.release([event.cursor])
    return (await world.times())[-1]


async def _whole_ms(world: World, episode: str, name: str, index: int) -> float:
    """A fork or rewind and the whole turn after it, as a client pays them."""
    thread = f"whole-{index}" if name == "fork" else "root"
    begin = time.perf_counter()
    if name == "fork":
        await world.sessions.fork(call(episode), {thread: "look into it"})
    else:
        await world.sessions.rewind(call(episode), 0, _NOTE)
    await world.turn(episode, thread)
    seconds = time.perf_counter() - begin
    if name == "fork":
        await world.drop_thread(episode, thread)
        await world.sessions.cancel(call(episode, thread))
    return 1e3 * seconds


async def _read_ms(world: World, episode: str) -> float:
    """A whole `read_thread`: what was pending, the stub, and their forward passes."""
    await world.sessions.rewind(call(episode, "reader"), 0, _NOTE)
    begin = time.perf_counter()
    await world.sessions.read_thread(call(episode, "reader"), "peer", 1, 1)
    return 1e3 * (time.perf_counter() - begin)


def _sample(call_s: float, step: dict[str, Any]) -> dict[str, float]:
    return {
        "server_ms": 1e3 * (call_s + step["server_s"]),
        "call_ms": 1e3 * call_s,
        "core_ms": 1e3 * step["core_s"],
        "worker_ms": 1e3 * step["worker_s"],
    }


def _columns(samples: Sequence[dict[str, float]], names: Iterable[str]) -> dict[str, Any]:
    return {name: spread([sample[name] for sample in samples]) for name in names}


def _flatness(medians: Iterable[float]) -> float:
    """The slowest context's median over the fastest's."""
    found = list(medians)
    return round(max(found) / min(found), 4)
