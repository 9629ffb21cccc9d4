"""A run whose processes are killed: replicas and trainer forked, Valkey, a runner in this one."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import signal
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import redis.asyncio

from harness_sdk import OctopusClient, SamplingOptions, control
from harness_sdk.agents import Agent
from harness_sdk.cli.embedded import ValkeyServer, embedded_broker
from harness_sdk.cli.processes import free_port
from harness_sdk.permits import redis_permits
from harness_sdk.record import record_from_bytes
from harness_sdk.replicas import Replicas
from harness_sdk.runner import EpisodeOutcome, GroupOutcome, Runner, RunOptions
from harness_sdk.thread import Thread
from tests.chat_tokenizers import VOCAB_SIZE, save_chat_tokenizer
from tests.tiny_models import tiny_model
from tests.trainer_process import FORKSERVER
from trainer_service.config import TrainerConfig

RUN, GROUP_SIZE = "chaos", 4
_MARGIN_S = 90.0
"""Longest time without a step, however busy the machine."""


@dataclass
class Told:
    """What the runner was told of the episodes that it closed."""

    outcomes: list[EpisodeOutcome] = field(default_factory=list)

    def add(self, group: GroupOutcome) -> None:
        """A group has ended."""
        self.outcomes += [*group.episodes, *group.replaced]


class Replica:
    """A rollout service in a process of its own, on a port that it keeps."""

    def __init__(self, name: str, settings: Mapping[str, Any], log: Path) -> None:
        self.address = f"127.0.0.1:{free_port()}"
        self._settings = {
            **settings,
            "replica_id": name,
            "server": {"port": int(self.address.rpartition(":")[2]), "grace_s": 1.0},
        }
        self._log = log
        self._process: Any = None

    @property
    def pid(self) -> int:
        """Of the process that runs now."""
        return self._process.pid

    def start(self) -> None:
        """Fork it; it listens a moment later."""
        self._process = FORKSERVER.Process(
            target=_serve, args=(json.dumps(self._settings), str(self._log)), daemon=True
        )
        self._process.start()

    async def kill(self) -> None:
        """SIGKILL, if it runs."""
        await _kill(self._process)


class Trainer:
    """The trainer in a process of its own."""

    def __init__(self, config: TrainerConfig, log: Path) -> None:
        self.config = config
        self._log = log
        self._process: Any = None

    @property
    def pid(self) -> int:
        """Of the process that runs now."""
        return self._process.pid

    @property
    def exit_code(self) -> int | None:
        """None while it runs."""
        return self._process.exitcode

    @property
    def num_steps(self) -> int:
        """Of the newest checkpoint that is whole."""
        folder = self.config.folder / "checkpoints"
        names = os.listdir(folder) if folder.exists() else []
        return max((int(name) for name in names if name.isdigit()), default=0)

    def start(self) -> None:
        """Fork it; it goes on from its newest checkpoint."""
        self._process = FORKSERVER.Process(
            target=_train, args=(self.config.model_dump_json(), str(self._log)), daemon=True
        )
        self._process.start()

    async def kill(self) -> None:
        """SIGKILL, if it runs."""
        await _kill(self._process)


@dataclass(kw_only=True)
class World:
    """All of it."""

    folder: Path
    valkey: ValkeyServer
    replicas: list[Replica]
    trainer: Trainer
    told: Told = field(default_factory=Told)
    rss_mb: dict[str, list[float]] = field(default_factory=dict)
    """Of trainer and first replica, at each step."""
    playing: asyncio.Task[None] | None = None
    """The runner."""

    async def restart_valkey(self) -> None:
        """SIGKILL, and back on the same port and data."""
        process = self.valkey.process
        assert process is not None
        os.kill(process.pid, signal.SIGKILL)
        await process.wait()
        await self.valkey.start()

    async def until_step(self, number: int) -> None:
        """Return once the checkpoint of step `number` is whole.

        Raises:
            TimeoutError: No step came for a long time.
            AssertionError: The trainer failed.
        """
        while (before := self.trainer.num_steps) < number:
            async with asyncio.timeout(_MARGIN_S):
                while self.trainer.num_steps == before:
                    assert self.trainer.exit_code in (None, 0), self.log("trainer")
                    if self.playing is not None and self.playing.done():
                        self.playing.result()
                    await asyncio.sleep(0.05)
            self._measure()

    async def until_ended(self) -> None:
        """Return once the trainer has taken all of its steps."""
        await self.until_step(self.trainer.config.max_steps or 0)
        async with asyncio.timeout(_MARGIN_S):
            while self.trainer.exit_code is None:
                await asyncio.sleep(0.05)
        assert self.trainer.exit_code == 0, self.log("trainer")

    def log(self, name: str) -> str:
        """The end of a process's output."""
        return (self.folder / f"{name}.log").read_text("utf-8")[-3000:]

    async def entries(self) -> dict[str, str]:
        """Episode by entry of the whole stream, which nothing here trims."""
        async with redis.asyncio.Redis.from_url(self.valkey.url) as client:
            found: Any = await client.xrange(control.episodes_key(RUN))
        return {
            entry.decode(): record_from_bytes(fields[b"record"]).episode_id
            for entry, fields in found
        }

    async def unfinished(self) -> set[str]:
        """Entries that no checkpoint has: delivered and not acknowledged, or not delivered."""
        key = control.episodes_key(RUN)
        async with redis.asyncio.Redis.from_url(self.valkey.url) as client:
            pending: Any = await client.xpending_range(key, "trainer", "-", "+", 100_000)
            (group,) = await client.xinfo_groups(key)
            later: Any = await client.xrange(key, f"({group['last-delivered-id'].decode()}")
        return {each["message_id"].decode() for each in pending} | {e.decode() for e, _ in later}

    def checkpoints(self) -> list[dict[str, Any]]:
        """The states of all checkpoints, the oldest first."""
        folder = self.trainer.config.folder / "checkpoints"
        names = sorted((name for name in os.listdir(folder) if name.isdigit()), key=int)
        return [json.loads((folder / name / "state.json").read_text()) for name in names]

    def _measure(self) -> None:
        for name, pid in (("trainer", self.trainer.pid), ("replica", self.replicas[0].pid)):
            with contextlib.suppress(OSError, StopIteration):
                lines = Path(f"/proc/{pid}/status").read_text().splitlines()
                kilobytes = next(line.split()[1] for line in lines if line.startswith("VmRSS"))
                self.rss_mb.setdefault(name, []).append(int(kilobytes) / 1024)


@contextlib.asynccontextmanager
async def chaos_world(
    folder: Path, *, max_steps: int, lag: int, num_replicas: int = 2
) -> AsyncIterator[World]:
    """Started processes, and a runner that plays groups until the end."""
    model = await asyncio.to_thread(_save_model, folder / "model")
    async with contextlib.AsyncExitStack() as stack:
        valkey = ValkeyServer(folder / "valkey")
        stack.push_async_callback(valkey.stop)
        await valkey.start()
        mqtt_url = await stack.enter_async_context(embedded_broker())
        urls = {"redis": {"url": valkey.url, "trim_every": 10**9}, "mqtt": {"url": mqtt_url}}
        settings = {
            "run": RUN,
            "run_folder": str(folder / "runs"),
            "model": {"path": str(model)},
            "limits": {"thread_budget": 1024, "answer_reserve": 64},
            "adapters": {"max_versions": lag + 3},
            **urls,
        }
        replicas = [
            Replica(f"replica-{number}", settings, folder / f"replica-{number}.log")
            for number in range(num_replicas)
        ]
        config = TrainerConfig.model_validate(
            {
                "run": RUN,
                "run_folder": folder / "runs",
                "max_steps": max_steps,
                "model": {"path": model},
                "lora": {"rank": 4, "alpha": 8.0},
                "optim": {"lr": 2e-2},
                "batch": {
                    "groups_per_step": 1,
                    "group_size": GROUP_SIZE,
                    "max_policy_lag": lag,
                    "group_deadline_s": 10.0,
                },
                "checkpoint": {"keep": max_steps + 1},
                "redis": {"url": valkey.url},
                "mqtt": {"url": mqtt_url},
                "publish": {"ack_timeout_s": 20.0},
            }
        )
        trainer = Trainer(config, folder / "trainer.log")
        for each in (*replicas, trainer):
            each.start()
            stack.push_async_callback(each.kill)
        world = World(folder=folder, valkey=valkey, replicas=replicas, trainer=trainer)
        world.playing = playing = asyncio.create_task(_play(world))
        try:
            yield world
        finally:
            playing.cancel()
            await asyncio.gather(playing, return_exceptions=True)


def _save_model(folder: Path) -> Path:
    """A tiny random model that can tell tokens apart.

    With Hugging Face's 0.02 in its last layer, no state of it gives low ids more than 0.53.
    """
    import torch

    model = tiny_model("qwen3_5", vocab_size=VOCAB_SIZE)
    with torch.no_grad():
        model.get_output_embeddings().weight.mul_(10)
    model.save_pretrained(folder)
    save_chat_tokenizer(folder)
    return folder


async def _play(world: World) -> None:
    """What `octopus run` does, against replicas that come and go."""
    async with contextlib.AsyncExitStack() as stack:
        clients = [
            await stack.enter_async_context(await _connected(replica.address))
            for replica in world.replicas
        ]
        permits = await stack.enter_async_context(redis_permits(world.valkey.url, RUN))
        options = RunOptions(
            group_size=GROUP_SIZE, num_groups=0, concurrency=2 * GROUP_SIZE, max_failures=10**9
        )
        replicas = await stack.enter_async_context(Replicas(clients))
        runner = Runner(replicas, _agent(), options, permits=permits, on_group=world.told.add)
        await runner.run()


async def _connected(address: str) -> Any:
    """A client of a replica that may still be starting."""
    host, _, port = address.rpartition(":")
    async with asyncio.timeout(_MARGIN_S):
        while True:
            try:
                _, writer = await asyncio.open_connection(host, int(port))
                writer.close()
                return OctopusClient.connect(address)
            except OSError:
                await asyncio.sleep(0.05)


def _agent() -> Agent:
    """Paid for low token ids, which a model of this size learns in a few steps."""
    low: dict[int, list[bool]] = {}

    async def run(thread: Thread, task: dict[str, Any]) -> str:
        marks = low[id(thread)] = []
        turn = await thread.generate("Say it.")
        children = await thread.fork({"left": "Again.", "right": "Once more."})
        turns = [turn, *await asyncio.gather(*(c.generate() for c in children.values()))]
        for child in children.values():
            if not child.ended:
                await child.done("said")
        marks += [token < VOCAB_SIZE // 2 for turn in turns for token in turn.token_ids]
        return str(sum(low.pop(id(thread))) / max(len(marks), 1))

    return Agent(
        name="low tokens",
        tasks=lambda: [{"id": "t"}],
        run=run,
        score=lambda task, answer: float(answer),
        primitives=(),
        sampling=SamplingOptions(max_tokens=6, temperature=1.0),
    )


def _serve(settings: str, log: str) -> None:
    _log_to(log)
    import torch

    from rollout_service.config import RolloutConfig
    from rollout_service.service import run_service

    torch.set_num_threads(1)
    asyncio.run(run_service(RolloutConfig.model_validate_json(settings)))


def _train(config: str, log: str) -> None:
    _log_to(log)
    import torch

    from trainer_service.loop import train

    torch.set_num_threads(1)
    asyncio.run(train(TrainerConfig.model_validate_json(config), asyncio.Event()))


def _log_to(path: str) -> None:
    """All output, that of a fault in C too, appended to a file."""
    import logging

    descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(message)s")


async def _kill(process: Any) -> None:
    process.kill()
    await asyncio.to_thread(process.join, 20)


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What is killed at which step."""

    replicas: frozenset[int]
    valkey: frozenset[int]
    trainer: frozenset[int]

    async def carry_out(self, world: World, rng: random.Random) -> None:
        """Kill at each of the steps, at any moment of it, and start again at once."""
        for step in sorted(self.replicas | self.valkey | self.trainer):
            await world.until_step(step)
            await asyncio.sleep(rng.uniform(0, 0.3))
            if step in self.replicas:
                replica = rng.choice(world.replicas)
                await replica.kill()
                replica.start()
            if step in self.valkey:
                await world.restart_valkey()
            if step in self.trainer and world.trainer.exit_code is None:
                await world.trainer.kill()
                world.trainer.start()
        await world.until_ended()
