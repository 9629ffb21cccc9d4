"""Which benchmarks share an engine, their time limits, and what happens where one fails."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import dataclasses
import sys
import tempfile
import traceback
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

from benchmarks.vllm_engine import admission, agent_load, assembly, branching, plain, resident
from benchmarks.vllm_engine.report import Report, hardware, say, versions
from benchmarks.vllm_engine.scale import SCALES, Scale
from benchmarks.vllm_engine.shapes import Texts, save_shape
from benchmarks.vllm_engine.world import running

Measure = Callable[[], Awaitable[None]]

LIMIT_S = {
    "fork": 180,
    "rewind": 180,
    "mount": 120,
    "assembly": 90,
    "resident": 120,
    "load": 240,
    "decode": 90,
    "plain_load": 480,
    "plain_decode": 90,
    "admission": 300,
    "adapters": 120,
}
"""Seconds on a GPU; a CPU has four times as long."""
NAMES = tuple(LIMIT_S)
_CPU_PATIENCE = 4
_WAIT_S = 150
"""Then it measures beside the others, and says so by its figures."""

_MAIN = ("fork", "rewind", "mount", "assembly", "resident", "decode", "load")


class Run:
    """One call of the command."""

    def __init__(self, args: argparse.Namespace, command: str, scratch: Path) -> None:
        self.scale: Scale = SCALES[args.device]
        if args.samples:
            self.scale = dataclasses.replace(self.scale, num_samples=args.samples)
        if args.episodes:
            load, admission = (
                dataclasses.replace(each, num_episodes=args.episodes)
                for each in (self.scale.load, self.scale.admission)
            )
            self.scale = dataclasses.replace(self.scale, load=load, admission=admission)
        if args.pool_gib:
            pools = self.scale.pool_bytes | {"main": args.pool_gib << 30}
            self.scale = dataclasses.replace(self.scale, pool_bytes=pools)
        self.only: list[str] = args.only
        self.tell: Path | None = args.tell
        self.wait: list[Path] = args.wait
        self.report = Report(args.out, compares=args.device == "cuda")
        if set(self.only) == set(NAMES):
            self.report.clear()
        self.report.put(hardware=hardware(args.device), command=command, versions=versions())
        self.scratch = scratch
        self.failed: list[str] = []
        given = args.model or self.scale.model
        self.folder = Path(given) if Path(given).is_dir() else save_shape(scratch / given, given)

    async def main(self) -> None:
        """The load, what one thread at a time pays, and how many there may be."""
        async with (
            running(self.scale, self.folder, pool="main", timed=True) as world,
            self.turn(),
        ):
            # Where a run is cut short, the load was worth most.
            await self.measure("load", lambda: agent_load.agent_load(world, self.report))
            await self.measure("decode", lambda: agent_load.decode(world, self.report))
            await world.engine.forget_all()
            # The load's sessions have a budget of their own, too small for long contexts.
            world.sessions = world.new_sessions(world.engine)
            for name, measure in (
                # Forks come last: a rewind would end them each time.
                ("rewind", branching.rewind),
                ("fork", branching.fork),
                ("mount", branching.mount),
                ("assembly", assembly.assembly),
            ):
                await self.measure(name, lambda m=measure: m(world, self.report))
            await world.engine.forget_all()
            await self.measure("resident", lambda: resident.resident(world, self.report))

    async def plain(self) -> None:
        """The same through plain vLLM."""
        texts = Texts(self.folder)
        async with plain.running_plain(self.scale, self.folder) as engine, self.turn():
            for name, measure in (
                ("plain_decode", plain.plain_decode),
                ("plain_load", plain.plain_load),
            ):
                await self.measure(
                    name, lambda m=measure: m(engine, self.scale, texts, self.report)
                )

    async def admission(self) -> None:
        """Many episodes, a small pool, new adapters."""
        scale = self.scale
        async with (
            running(
                scale,
                self.folder,
                pool="admission",
                max_adapters=admission.NUM_VERSIONS,
                max_lora_rank=scale.lora_rank,
                vllm={"num_gpu_blocks_override": scale.admission_blocks},
            ) as world,
            self.turn(),
        ):
            publish = "adapters" in self.only
            await self.measure(
                "admission" if "admission" in self.only else "adapters",
                lambda: admission.admission(
                    world, self.report, self.scratch / "adapters", publish=publish
                ),
            )

    async def measure(self, name: str, measure: Measure) -> None:
        """One benchmark, where it is asked for; a failure is told and the next one runs."""
        if name not in self.only:
            return
        say(f"{name} begins")
        patience = _CPU_PATIENCE if self.scale.device == "cpu" else 1
        try:
            async with asyncio.timeout(LIMIT_S[name] * patience):
                await measure()
            say(f"{name} ends")
        except Exception as error:
            self.fail(name, error)

    def fail(self, name: str, error: BaseException) -> None:
        """Tell, and go on."""
        traceback.print_exception(error)
        say(f"{name} FAILED: {error!r}")
        self.failed.append(name)

    def serves(self) -> None:
        """Tell others that they need not wait for this run's start any longer."""
        if self.tell is not None:
            self.tell.with_suffix(".up").touch()

    @asynccontextmanager
    async def turn(self) -> AsyncIterator[None]:
        """While no other run measures; several may start their engines at once."""
        self.serves()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_WAIT_S):
                while not all(path.exists() for path in self.wait):
                    await asyncio.sleep(0.1)
        yield


async def run(args: argparse.Namespace, command: str) -> list[str]:
    """Run what was asked for; returns what failed."""
    with tempfile.TemporaryDirectory() as scratch:
        run = Run(args, command, Path(scratch))
        for names, part in (
            (_MAIN, run.main),
            (("plain_load", "plain_decode"), run.plain),
            (("admission", "adapters"), run.admission),
        ):
            if not set(names) & set(run.only):
                continue
            try:
                await part()
            except Exception as error:
                run.fail("/".join(names), error)
                run.serves()
        if args.tell is not None:
            args.tell.with_suffix(".done").touch()
        sys.stdout.write(run.report.tables() + "\n")
        return run.failed
