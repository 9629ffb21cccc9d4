"""`python -m benchmarks.soak`: hundreds of episodes at a time on a tiny model, with faults.

The service and Valkey are processes of their own. Turns are cancelled, clients vanish, Valkey is
killed. Afterwards: each opened episode has one record, nothing is held, and neither the latency of
a turn nor the service's memory has grown. Ends with 1 where one of these does not hold.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import random
import signal
import statistics
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import redis.asyncio

from benchmarks.tree_training.hardware import hardware
from harness_sdk import OctopusClient, SamplingOptions, control
from harness_sdk.cli.embedded import ValkeyServer
from harness_sdk.cli.processes import free_port, spawn, stop
from harness_sdk.errors import HarnessError
from harness_sdk.record import record_from_bytes
from harness_sdk.thread import Thread
from harness_sdk.types import ServerStatus

RUN = "soak"
MAX_SLOPE_MB_PER_MIN = 1.0
MAX_LATENCY_RATIO = 1.25
_SAMPLING = SamplingOptions(max_tokens=8, temperature=1.0)
_SETTLE_S = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class SoakOptions:
    """How much of it."""

    seconds: float
    episodes: int = 200
    """At a time."""
    clients: int = 8
    """Connections that they share."""
    seed: int = 0
    cancelled: float = 0.05
    """Share of the turns that their agent gives up."""
    vanished: float = 0.03
    """Share of the episodes whose agent leaves without closing."""
    valkey_kill_s: float = 60.0
    """Between two ends of Valkey."""


@dataclass(slots=True, kw_only=True)
class Tally:
    """What happened."""

    turns: list[tuple[float, float]] = field(default_factory=list)
    """When each ended, in seconds from the start, and how long it took."""
    memory: list[tuple[float, float]] = field(default_factory=list)
    """The service's RSS in MB, by seconds from the start."""
    entries: set[str] = field(default_factory=set)
    """What agents were told is stored."""
    failed: Counter[str] = field(default_factory=Counter)
    """Episodes by the kind of their error."""
    kills: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class SoakReport:
    """The outcome; times in seconds, memory in MB."""

    seconds: float
    episodes: int
    turns: int
    failed: dict[str, int]
    valkey_kills: int
    turn_p50_start: float
    turn_p50_end: float
    turn_p99_start: float
    turn_p99_end: float
    memory_start: float
    memory_end: float
    memory_slope_per_min: float
    lost: int
    """Opened episodes without a record, and told entries that are not in the stream."""
    duplicated: int
    """Records of an episode beyond its first under another entry, retries by Valkey's end aside."""
    held: dict[str, float]
    """What the service still holds once every episode has ended."""

    def faults(self) -> list[str]:
        """What must not be."""
        found = []
        if self.lost or self.duplicated:
            found.append(f"{self.lost} records lost, {self.duplicated} duplicated")
        if any(self.held.values()):
            found.append(f"held at the end: {self.held}")
        if self.memory_slope_per_min > MAX_SLOPE_MB_PER_MIN:
            found.append(f"memory grows by {self.memory_slope_per_min:.2f} MB a minute")
        if self.turn_p99_end > MAX_LATENCY_RATIO * self.turn_p99_start:
            found.append(f"p99 of a turn {self.turn_p99_start:.2f} s, then {self.turn_p99_end:.2f}")
        return found


async def soak(options: SoakOptions, folder: Path, model: Path) -> SoakReport:
    """Run it in `folder`, on the checkpoint `model` with its tokenizer."""
    tally, began_s = Tally(), time.monotonic()
    async with _services(folder, model) as (valkey, process, address):
        async with contextlib.AsyncExitStack() as stack:
            clients = [
                await stack.enter_async_context(OctopusClient.connect(address))
                for _ in range(options.clients)
            ]
            began_s = time.monotonic()
            async with asyncio.TaskGroup() as tasks:
                for number in range(options.episodes):
                    rng = random.Random(f"{options.seed} {number}")
                    client = clients[number % len(clients)]
                    tasks.create_task(_play(client, rng, options, tally, began_s))
                tasks.create_task(_kill_valkey(valkey, options, tally, began_s))
                tasks.create_task(_watch_memory(process.pid, options, tally, began_s))
            status = await _settled(clients[0])
        lost, duplicated = await _compare(valkey.url, tally, status)
    return _report(options, tally, status, lost, duplicated)


@contextlib.asynccontextmanager
async def _services(
    folder: Path, model: Path
) -> AsyncIterator[tuple[ValkeyServer, asyncio.subprocess.Process, str]]:
    valkey = ValkeyServer(folder / "valkey")
    await valkey.start()
    port = free_port()
    command = [
        sys.executable, "-m", "rollout_service", "--run", RUN, "--run-folder", str(folder / "runs"),
        "--model.path", str(model), "--server.port", str(port), "--redis.trim-every", str(10**9),
        "--limits.thread-budget", "1024", "--limits.answer-reserve", "64",
    ]  # fmt: skip
    log = folder / "rollout.log"
    environment = {"OCTOPUS_REDIS_URL": valkey.url, "OMP_NUM_THREADS": "1"}
    process = await spawn(command, log_path=log, environment=environment)
    try:
        async with asyncio.timeout(180):
            while True:
                assert process.returncode is None, log.read_text()
                try:
                    _, writer = await asyncio.open_connection("127.0.0.1", port)
                    writer.close()
                    break
                except OSError:
                    await asyncio.sleep(0.1)
        yield valkey, process, f"127.0.0.1:{port}"
    finally:
        await stop(process, 30)
        await valkey.stop()


async def _play(
    client: OctopusClient, rng: random.Random, options: SoakOptions, tally: Tally, began_s: float
) -> None:
    """One episode after the other."""
    while time.monotonic() - began_s < options.seconds:
        try:
            await _episode(client, rng, options, tally, began_s)
        except HarnessError as error:
            tally.failed[type(error).__name__] += 1
        except _Vanished:
            tally.failed["vanished"] += 1


class _Vanished(Exception):
    """The agent leaves its episode where it is."""


async def _episode(
    client: OctopusClient, rng: random.Random, options: SoakOptions, tally: Tally, began_s: float
) -> None:
    leaves = rng.random() < options.vanished
    async with client.episode(task_id="t", primitives=(), sampling=_SAMPLING) as episode:
        root = episode.root

        async def turn(thread: Thread, text: str = "") -> None:
            started_s = time.monotonic()
            if rng.random() < options.cancelled:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(rng.uniform(0, 0.05)):
                        await thread.generate(text or ())
                return
            await thread.generate(text or ())
            ended_s = time.monotonic()
            tally.turns.append((ended_s - began_s, ended_s - started_s))

        await root.generate("Where is it?")
        children = list((await root.fork({"a": "Left.", "b": "Right."})).values())
        # The second one is read below: it takes its turns.
        await asyncio.gather(turn(children[0]), children[1].generate())
        if leaves:
            raise _Vanished
        await children[1].generate()
        await root.read_thread(children[1], (0, 1))
        await turn(root)
        await root.done("there")
        tally.entries.add((await episode.close(reward=1.0)).entry_id)


async def _kill_valkey(
    valkey: ValkeyServer, options: SoakOptions, tally: Tally, began_s: float
) -> None:
    while True:
        left_s = options.seconds - (time.monotonic() - began_s)
        if left_s < options.valkey_kill_s:
            return
        await asyncio.sleep(options.valkey_kill_s)
        assert valkey.process is not None
        os.kill(valkey.process.pid, signal.SIGKILL)
        await valkey.process.wait()
        await valkey.start()
        tally.kills += 1


async def _watch_memory(pid: int, options: SoakOptions, tally: Tally, began_s: float) -> None:
    while (now_s := time.monotonic() - began_s) < options.seconds:
        status = Path(f"/proc/{pid}/status").read_text()
        line = next(line for line in status.splitlines() if line.startswith("VmRSS"))
        tally.memory.append((now_s, int(line.split()[1]) / 1024))
        await asyncio.sleep(min(1.0, options.seconds / 20))


async def _settled(client: OctopusClient) -> ServerStatus:
    """The service once its episodes are over, or after a minute."""
    give_up_s = time.monotonic() + _SETTLE_S
    while True:
        status = await client.status()
        idle = not (status.open_episodes or status.queued_episodes or status.resident_cursors)
        if idle or time.monotonic() > give_up_s:
            return status
        await asyncio.sleep(0.1)


async def _compare(url: str, tally: Tally, status: ServerStatus) -> tuple[int, int]:
    """Records lost, and duplicated by something else than Valkey's end."""
    async with redis.asyncio.Redis.from_url(url) as client:
        entries: Any = await client.xrange(control.episodes_key(RUN))
    found = {entry.decode(): record_from_bytes(fields[b"record"]) for entry, fields in entries}
    episodes = Counter(record.episode_id for record in found.values())
    missing = len(tally.entries - set(found))
    unwritten = int(status.metrics["episodes/opened"]) - len(episodes)
    # At each end at most one send is stored and not answered.
    duplicated = max(0, episodes.total() - len(episodes) - tally.kills)
    return missing + max(0, unwritten), duplicated


def _report(
    options: SoakOptions, tally: Tally, status: ServerStatus, lost: int, duplicated: int
) -> SoakReport:
    first, last = options.seconds * 0.2, options.seconds * 0.8
    start = [took for at, took in tally.turns if at < first]
    end = [took for at, took in tally.turns if at > last]
    # Allocators take a while until they have what they need.
    warm = [(at / 60, mb) for at, mb in tally.memory if at > options.seconds / 3]
    slope = statistics.linear_regression(*zip(*warm, strict=True)).slope
    held: dict[str, float] = {
        "episodes": status.open_episodes,
        "queued": status.queued_episodes,
        "threads": status.live_threads,
        "cursors": status.resident_cursors,
        "states": status.recurrent_slots,
        "tokens": status.tokens_resident,
    }
    return SoakReport(
        seconds=options.seconds,
        episodes=int(status.metrics["episodes/opened"]),
        turns=len(tally.turns),
        failed=dict(tally.failed),
        valkey_kills=tally.kills,
        turn_p50_start=_quantile(start, 0.5),
        turn_p50_end=_quantile(end, 0.5),
        turn_p99_start=_quantile(start, 0.99),
        turn_p99_end=_quantile(end, 0.99),
        memory_start=warm[0][1],
        memory_end=warm[-1][1],
        memory_slope_per_min=slope,
        lost=lost,
        duplicated=duplicated,
        held=held,
    )


def _quantile(values: Sequence[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else 0.0


def main() -> int:
    """Soak and report."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.soak", description=__doc__)
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--episodes", type=int, default=200, help="at a time")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, help="JSON file for the report")
    args = parser.parse_args()
    from tests.chat_tokenizers import VOCAB_SIZE, save_chat_tokenizer
    from tests.tiny_models import save_tiny_model

    options = SoakOptions(seconds=args.minutes * 60, episodes=args.episodes, seed=args.seed)
    with TemporaryDirectory() as folder:
        model = save_tiny_model(Path(folder) / "model", "qwen3_5", vocab_size=VOCAB_SIZE)
        report = asyncio.run(soak(options, Path(folder), save_chat_tokenizer(model)))
    data = {**hardware("cpu"), **asdict(report)}
    sys.stdout.write(json.dumps(data, indent=2) + "\n")
    if args.out is not None:
        args.out.write_text(json.dumps(data, indent=2) + "\n", "utf-8")
    for fault in report.faults():
        sys.stdout.write(f"fault: {fault}\n")
    return 1 if report.faults() else 0


if __name__ == "__main__":
    sys.exit(main())
