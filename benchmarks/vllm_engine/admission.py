"""Many short episodes against a small pool: KV use at the gate, and what a new adapter costs them.

Both benchmarks share one engine: adapters are published while the episodes run.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import random
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.vllm_engine.agent_load import SessionPlayer, count_failures
from benchmarks.vllm_engine.episodes import Script, Tally, play, told, write_scripts
from benchmarks.vllm_engine.report import Report, quantile, say
from benchmarks.vllm_engine.shapes import LORA_TARGETS
from benchmarks.vllm_engine.world import World
from harness_sdk import control
from harness_sdk.control import PolicyAnnouncement, ReplicaState
from harness_sdk.errors import HarnessError
from harness_sdk.types import SamplingOptions
from rollout_service.adapters import Adapters

_SAMPLE_S = 0.01
_PROBE = tuple(range(10, 42))
NUM_VERSIONS = 3


@dataclass(slots=True)
class _Outcome:
    kv_use: list[float] = field(default_factory=list)
    timeouts: int = 0
    failures: dict[str, int] = field(default_factory=dict)
    waited_s: list[float] = field(default_factory=list)
    tally: Tally = field(default_factory=Tally)
    begin: float = field(default_factory=time.perf_counter)


async def admission(world: World, report: Report, folder: Path, *, publish: bool) -> None:
    """Play all episodes; with `publish` new adapters come in between.

    An episode times out where its life after admission passes the load's limit; requests aborted
    are turns and episodes that failed while adapters were published.
    """
    load = world.scale.admission
    world.sessions = world.new_sessions(world.engine, thread_budget=load.thread_budget)
    scripts = write_scripts(load, world.texts)
    outcome = _Outcome()
    watching = asyncio.create_task(_watch(world, outcome))
    publishing = asyncio.create_task(_publish(world, report, folder)) if publish else None
    played = outcome.tally
    async with told(report, "admission", played, lambda _: {"turns": played.turns}):
        await _play_all(world, scripts, outcome, lambda: _tell(world, report, outcome))
    watching.cancel()
    _tell(world, report, outcome)
    report.put(
        admission_p90_kv=round(quantile(outcome.kv_use, 0.9), 4),
        admission_timeouts=outcome.timeouts,
    )
    if publishing is not None:
        await publishing
        report.put(aborted_requests=sum(outcome.failures.values()) + outcome.timeouts)


def _tell(world: World, report: Report, outcome: _Outcome) -> None:
    """What was seen so far."""
    stats = world.engine.stats()
    report.put_detail(
        "admission",
        {
            "episodes": len(outcome.tally.episode_s),
            "seconds": round(time.perf_counter() - outcome.begin, 2),
            "turns": outcome.tally.turns,
            "timeouts": outcome.timeouts,
            "pool_tokens": stats.tokens_capacity,
            "kv_p50": round(quantile(outcome.kv_use, 0.5), 4),
            "kv_p90": round(quantile(outcome.kv_use, 0.9), 4),
            "kv_p99": round(quantile(outcome.kv_use, 0.99), 4),
            "kv_max": round(max(outcome.kv_use), 4),
            "kv_samples": len(outcome.kv_use),
            "waited_p95_s": round(quantile(outcome.waited_s, 0.95), 3),
            "recomputed_after_eviction": stats.tokens_recomputed["eviction"],
            "failures": outcome.failures,
            "turn_p95_s": round(quantile(outcome.tally.turn_s, 0.95), 4),
        },
    )


async def _watch(world: World, outcome: _Outcome) -> None:
    while True:
        outcome.kv_use.append(world.engine.stats().kv_use)
        await asyncio.sleep(_SAMPLE_S)


async def _play_all(
    world: World, scripts: list[Script], outcome: _Outcome, tell: Callable[[], None]
) -> None:
    load = world.scale.admission
    permits = asyncio.Semaphore(load.concurrency)

    async def one(number: int, script: Script) -> None:
        async with permits:
            episode, asked = f"short-{number}", time.perf_counter()
            await world.open(episode)
            outcome.waited_s.append(time.perf_counter() - asked)
            try:
                async with asyncio.timeout(load.timeout_s):
                    player = SessionPlayer(world, episode)
                    await play(script, player, outcome.tally, random.Random(number))
            except* TimeoutError:
                outcome.timeouts += 1
            except* HarnessError as errors:
                count_failures(errors, outcome.failures)
            await world.sessions.close(episode)
            outcome.tally.episode_s.append(time.perf_counter() - asked)
            if len(outcome.tally.episode_s) % max(load.num_episodes // 10, 1) == 0:
                tell()

    async with asyncio.TaskGroup() as group:
        for number, script in enumerate(scripts):
            group.create_task(one(number, script))


async def _publish(world: World, report: Report, folder: Path) -> None:
    """New versions one after the other, the way a replica applies what is announced."""
    state = ReplicaState(replica_id="bench", alive=True, versions=(0,))
    adapters = Adapters(
        world.engine,
        state,
        run="bench",
        folder=folder / "served",
        shared=folder,
        fetch=_no_fetch,
        pinned=world.sessions.versions_in_use,
        max_versions=NUM_VERSIONS,
    )
    await adapters.start()
    applied, first_token = [], []
    for version in range(1, NUM_VERSIONS + 1):
        announcement = await asyncio.to_thread(_write, world, folder / f"v{version}", version)
        begin = time.perf_counter()
        known = await adapters.apply(announcement)
        if known.error:
            raise RuntimeError(known.error)
        applied.append(time.perf_counter() - begin)
        await _first_token(world, version)
        first_token.append(time.perf_counter() - begin)
        world.version = version
        say(f"version {version}: applied in {applied[-1]:.2f} s, token at {first_token[-1]:.2f} s")
    report.put(publish_to_first_token_s=round(statistics.median(first_token), 3))
    report.put_detail(
        "adapters",
        {
            "rank": world.scale.lora_rank,
            "first_token_s": [round(s, 3) for s in first_token],
            "applied_s": [round(s, 3) for s in applied],
            "bytes": (folder / "v1" / control.ADAPTER_FILE).stat().st_size,
        },
    )


async def _first_token(world: World, version: int) -> None:
    """A new thread's first token, its prompt computed under the version."""
    engine = world.engine
    root = await engine.extend(None, _PROBE, mounts=(), policy_version=version)
    stream = engine.generate(
        root, (1, 2), SamplingOptions(max_tokens=1), stop_token_ids=frozenset(),
        policy_version=version,
    )  # fmt: skip
    async for _ in stream:
        pass
    await engine.release([root])


def _write(world: World, folder: Path, version: int) -> PolicyAnnouncement:
    """A random adapter in PEFT's format, in bfloat16 as a trainer may write it."""
    import torch
    from safetensors.torch import save_file

    from rollout_service.engine.vllm.lora import _shapes

    rank = world.scale.lora_rank
    base = _shapes(world.engine.info.model)
    generator = torch.Generator().manual_seed(version)
    tensors: dict[str, Any] = {}
    for name, module in base.named_modules():
        if isinstance(module, torch.nn.Linear) and name.rpartition(".")[2] in LORA_TARGETS:
            for part, size in (
                ("A", (rank, module.in_features)),
                ("B", (module.out_features, rank)),
            ):
                values = torch.randn(size, generator=generator, dtype=torch.float32) * 0.01
                tensors[f"base_model.model.{name}.lora_{part}.weight"] = values.bfloat16()
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / control.ADAPTER_FILE
    save_file(tensors, path)
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": rank,
        "lora_alpha": 2 * rank,
        "target_modules": list(LORA_TARGETS),
        "base_model_name_or_path": world.engine.info.model,
        "bias": "none",
    }
    (folder / control.ADAPTER_CONFIG_FILE).write_text(json.dumps(config))
    return PolicyAnnouncement(
        version=version,
        sha256=hashlib.sha256(path.read_bytes()).hexdigest(),
        num_tensors=len(tensors),
        rank=rank,
        alpha=2.0 * rank,
        uri=folder.resolve().as_uri(),
        base_model=world.engine.info.model_hash,
        probe_token_ids=_PROBE,
    )


async def _no_fetch(version: int, folder: Path) -> None:
    raise AssertionError(f"version {version} is in a shared folder")
