"""fork, rewind and mount through the sessions: what each costs beside the forward pass.

A fork's or rewind's server time is the call itself plus what its first request costs in the engine:
taking it in, scheduling it, attaching its pages, and copying its partial page and recurrent state
until the device is done. The forward pass over the new tokens is not part of it, nor is what every
turn costs.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from typing import Any

from benchmarks.vllm_engine.report import Report, say, spread
from benchmarks.vllm_engine.world import World, call

_NOTE = "try another way"


async def fork(world: World, report: Report) -> None:
    """One child at a time from contexts of each length, in turns."""
    samples = await _contexts(world, report)
    for index in range(world.scale.num_samples + 1):
        for context, found in samples.items():
            found.append(await _fork_sample(world, f"context-{context}", f"child-{index}"))
        _progress("fork", index, world.scale.num_samples)
    medians = _summarise(report, "fork", samples)
    report.put(
        fork_ms_128k=medians[world.scale.full_context], fork_flatness=_flatness(medians.values())
    )


async def rewind(world: World, report: Report) -> None:
    """Back to the prompt, contexts of each length in turns."""
    samples = await _contexts(world, report)
    for index in range(world.scale.num_samples + 1):
        for context, found in samples.items():
            found.append(await _rewind_sample(world, f"context-{context}"))
        _progress("rewind", index, world.scale.num_samples)
    medians = _summarise(report, "rewind", samples)
    report.put(rewind_ms_128k=medians[world.scale.full_context])
    report.put_detail("rewind", {"flatness": _flatness(medians.values())})


async def mount(world: World, report: Report) -> None:
    """A thread that reads one step of its peer and goes back again.

    The mount's time is that of the request that carries it.
    """
    episode, size = "mounts", world.scale.mount_tokens
    await world.open(episode)
    await world.turn(episode, "root", world.texts.take(300))
    await world.sessions.fork(call(episode), {"peer": "read on", "reader": "compare"})
    await world.turn(episode, "peer", num_tokens=4)
    await world.turn(episode, "peer", world.texts.take(size))
    await world.turn(episode, "reader", num_tokens=4)
    samples: list[dict[str, float]] = []
    for index in range(world.scale.num_samples + 1):
        samples.append(await _mount_sample(world, episode))
        _progress("mount", index, world.scale.num_samples)
    del samples[0]
    report.put(
        mount_ms_32k=spread([sample["server_ms"] for sample in samples])["median"],
        mount_full_pages=max(sample["full_pages"] for sample in samples),
    )
    report.put_detail(
        "mount",
        {
            "spans": max(sample["mounts"] for sample in samples),
            "tokens_mounted": max(sample["mounted_rows"] for sample in samples),
            "rows_copied_most": max(sample["copied_rows"] for sample in samples),
            **_columns(samples, ("server_ms", "core_ms", "worker_ms", "read_thread_ms")),
        },
    )
    await world.sessions.close(episode)


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


async def _fork_sample(world: World, episode: str, name: str) -> dict[str, float]:
    await world.times()
    begin = time.perf_counter()
    await world.sessions.fork(call(episode), {name: "look into it"})
    called = time.perf_counter()
    await world.turn(episode, name)
    ended = time.perf_counter()
    step = (await world.times())[0]
    await world.drop_thread(episode, name)
    await world.sessions.cancel(call(episode, name))
    return _sample(begin, called, ended, step)


async def _rewind_sample(world: World, episode: str) -> dict[str, float]:
    await world.times()
    begin = time.perf_counter()
    await world.sessions.rewind(call(episode), 0, _NOTE)
    called = time.perf_counter()
    await world.turn(episode, "root")
    ended = time.perf_counter()
    return _sample(begin, called, ended, (await world.times())[0])


async def _mount_sample(world: World, episode: str) -> dict[str, float]:
    await world.sessions.rewind(call(episode, "reader"), 0, _NOTE)
    await world.times()
    begin = time.perf_counter()
    await world.sessions.read_thread(call(episode, "reader"), "peer", 1, 1)
    ended = time.perf_counter()
    steps = await world.times()
    (step,) = [step for step in steps if step["mounts"]]
    # A rewind goes back to before a finished step, so the reader takes another turn.
    await world.turn(episode, "reader")
    return {
        "server_ms": 1e3 * step["server_s"],
        "core_ms": 1e3 * step["core_s"],
        "worker_ms": 1e3 * step["worker_s"],
        "read_thread_ms": 1e3 * (ended - begin),
        **{key: step[key] for key in ("mounts", "mounted_rows", "copied_rows", "full_pages")},
    }


def _sample(begin: float, called: float, ended: float, step: dict[str, Any]) -> dict[str, float]:
    return {
        "server_ms": 1e3 * (called - begin + step["server_s"]),
        "call_ms": 1e3 * (called - begin),
        "core_ms": 1e3 * step["core_s"],
        "worker_ms": 1e3 * step["worker_s"],
        "first_turn_ms": 1e3 * (ended - called),
    }


def _summarise(
    report: Report, name: str, samples: dict[int, list[dict[str, float]]]
) -> dict[int, float]:
    medians = {}
    for context, found in samples.items():
        # The first one warms up.
        columns = _columns(found[1:], tuple(found[0]))
        report.put_detail(name, {f"{context}": columns})
        medians[context] = columns["server_ms"]["median"]
    return medians


def _columns(samples: Sequence[dict[str, float]], names: Iterable[str]) -> dict[str, Any]:
    return {name: spread([sample[name] for sample in samples]) for name in names}


def _flatness(medians: Iterable[float]) -> float:
    """The slowest context's median over the fastest's."""
    found = list(medians)
    return round(max(found) / min(found), 4)


def _progress(name: str, index: int, total: int) -> None:
    if index % 50 == 0 or index == total:
        say(f"{name} {index}/{total}")
