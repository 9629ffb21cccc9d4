"""`python -m benchmarks.soak`: hundreds of episodes at a time on a tiny model, with faults.

The service and Valkey are processes of their own; this one is the agents'. Turns are cancelled,
clients vanish, Valkey is killed. Afterwards: each opened episode has one record, nothing is held,
and neither the latency of a turn nor the memory of service and agents has grown. Ends with 1 where
one of these does not hold, or where too few turns were taken to tell.
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
from array import array
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, field
from multiprocessing import get_context
from pathlib import Path
from tempfile import TemporaryDirectory

from harness_sdk import OctopusClient, SamplingOptions, control
from harness_sdk.cli.embedded import ValkeyServer
from harness_sdk.cli.processes import free_port, spawn, stop
from harness_sdk.errors import HarnessError
from harness_sdk.record import record_from_bytes
from harness_sdk.redis_client import redis_client
from harness_sdk.thread import Thread
from harness_sdk.types import ServerStatus

RUN = "soak"
MAX_SLOPE_MB_PER_MIN = 1.0
MAX_LATENCY_RATIO = 1.25
MIN_TURNS = 1000
"""In each of the two windows whose 99th percentiles are compared: ten above it."""
_SAMPLING = SamplingOptions(max_tokens=8, temperature=1.0)
_SETTLE_S = 60.0
_LAG_S = 0.1
_READ = 256
"""Records at a time: their answer must come within the client's patience."""


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

    turn_ends: array[float] = field(default_factory=lambda: array("d"))
    """When each turn ended, in seconds from the start."""
    turn_seconds: array[float] = field(default_factory=lambda: array("d"))
    """How long it took."""
    memory: dict[str, list[tuple[float, float]]] = field(default_factory=dict)
    """RSS in MB by seconds from the start, of each process."""
    lags: array[float] = field(default_factory=lambda: array("d"))
    """How much later than asked the agents' event loop came back: a part of every turn's time."""
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
    turns_start: int
    turn_p50_start: float
    turn_p99_start: float
    """Of the turns that ended in the fifth of the time behind the first tenth, the warm-up."""
    turns_end: int
    turn_p50_end: float
    turn_p99_end: float
    """Of those in the last fifth."""
    client_lag_p99: float
    """Of the agents' own event loop, in every turn's time."""
    memory_start: dict[str, float]
    memory_end: dict[str, float]
    memory_slope_per_min: dict[str, float]
    """By regression over the last two thirds of the time, of each process. Valkey's holds the
    stream, which nothing trims here."""
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
        for name in ("service", "agents"):
            if (slope := self.memory_slope_per_min[name]) > MAX_SLOPE_MB_PER_MIN:
                found.append(f"memory of the {name} grows by {slope:.2f} MB a minute")
        if min(self.turns_start, self.turns_end) < MIN_TURNS:
            found.append(f"{self.turns_start} turns, then {self.turns_end}: too few for their p99")
        elif self.turn_p99_end > MAX_LATENCY_RATIO * self.turn_p99_start:
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
                tasks.create_task(_watch_memory(process.pid, valkey, options, tally, began_s))
                tasks.create_task(_watch_lag(options, tally, began_s))
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
            await thread.generate(text or ())
            ended_s = time.monotonic()
            tally.turn_ends.append(ended_s - began_s)
            tally.turn_seconds.append(ended_s - started_s)

        async def turn_or_less(thread: Thread) -> None:
            if rng.random() >= options.cancelled:
                await turn(thread)
            else:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(rng.uniform(0, 0.05)):
                        await thread.generate()

        await turn(root, "Where is it?")
        children = list((await root.fork({"a": "Left.", "b": "Right."})).values())
        # The second one is read below: it takes its turns.
        await asyncio.gather(turn_or_less(children[0]), turn(children[1]))
        if leaves:
            raise _Vanished
        await turn(children[1])
        await root.read_thread(children[1], (0, 1))
        await turn_or_less(root)
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


async def _watch_memory(
    service: int, valkey: ValkeyServer, options: SoakOptions, tally: Tally, began_s: float
) -> None:
    while (now_s := time.monotonic() - began_s) < options.seconds:
        assert valkey.process is not None
        pids = {"service": service, "agents": os.getpid(), "valkey": valkey.process.pid}
        for name, pid in pids.items():
            # Valkey has just been killed, perhaps.
            with contextlib.suppress(OSError, StopIteration):
                lines = Path(f"/proc/{pid}/status").read_text().splitlines()
                line = next(line for line in lines if line.startswith("VmRSS"))
                tally.memory.setdefault(name, []).append((now_s, int(line.split()[1]) / 1024))
        await asyncio.sleep(min(1.0, options.seconds / 20))


async def _watch_lag(options: SoakOptions, tally: Tally, began_s: float) -> None:
    while time.monotonic() - began_s < options.seconds:
        asked_s = time.monotonic() + _LAG_S
        await asyncio.sleep(_LAG_S)
        tally.lags.append(time.monotonic() - asked_s)


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
    found: dict[str, str] = {}
    """Episodes by entry."""
    async with redis_client(url) as client:
        after = "-"
        while entries := await client.xrange(control.episodes_key(RUN), min=after, count=_READ):
            for entry, fields in entries:
                found[entry.decode()] = record_from_bytes(fields[b"record"]).episode_id
            after = f"({entries[-1][0].decode()}"
    episodes = Counter(found.values())
    missing = len(tally.entries - set(found))
    unwritten = int(status.metrics["episodes/opened"]) - len(episodes)
    # At each end at most one send is stored and not answered.
    duplicated = max(0, episodes.total() - len(episodes) - tally.kills)
    return missing + max(0, unwritten), duplicated


def _report(
    options: SoakOptions, tally: Tally, status: ServerStatus, lost: int, duplicated: int
) -> SoakReport:
    start = _turns_between(tally, options.seconds * 0.1, options.seconds * 0.3)
    end = _turns_between(tally, options.seconds * 0.8, options.seconds)
    # Allocators take a while until they have what they need.
    warm = {
        name: [(at / 60, mb) for at, mb in points if at > options.seconds / 3]
        for name, points in tally.memory.items()
    }
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
        turns=len(tally.turn_ends),
        failed=dict(tally.failed),
        valkey_kills=tally.kills,
        turns_start=len(start),
        turn_p50_start=_quantile(start, 0.5),
        turn_p99_start=_quantile(start, 0.99),
        turns_end=len(end),
        turn_p50_end=_quantile(end, 0.5),
        turn_p99_end=_quantile(end, 0.99),
        client_lag_p99=_quantile(tally.lags, 0.99),
        memory_start={name: points[0][1] for name, points in warm.items()},
        memory_end={name: points[-1][1] for name, points in warm.items()},
        memory_slope_per_min={
            name: statistics.linear_regression(*zip(*points, strict=True)).slope
            for name, points in warm.items()
        },
        lost=lost,
        duplicated=duplicated,
        held=held,
    )


def _turns_between(tally: Tally, begin_s: float, end_s: float) -> list[float]:
    """Seconds of the turns that ended then."""
    both = zip(tally.turn_ends, tally.turn_seconds, strict=True)
    return [took for at, took in both if begin_s < at <= end_s]


def _quantile(values: Sequence[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else 0.0


def _save_model(folder: Path) -> Path:
    from tests.chat_tokenizers import VOCAB_SIZE, save_chat_tokenizer
    from tests.tiny_models import save_tiny_model

    return save_chat_tokenizer(save_tiny_model(folder, "qwen3_5", vocab_size=VOCAB_SIZE))


def main() -> int:
    """Soak and report."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.soak", description=__doc__)
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--episodes", type=int, default=200, help="at a time")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, help="JSON file for the report")
    args = parser.parse_args()
    options = SoakOptions(seconds=args.minutes * 60, episodes=args.episodes, seed=args.seed)
    with TemporaryDirectory() as folder:
        # Elsewhere: agents import no torch, and their memory is measured.
        with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
            model = pool.submit(_save_model, Path(folder) / "model").result()
        report = asyncio.run(soak(options, Path(folder), model))
    from benchmarks.tree_training.hardware import hardware

    data = {**hardware("cpu"), **asdict(report)}
    sys.stdout.write(json.dumps(data, indent=2) + "\n")
    if args.out is not None:
        args.out.write_text(json.dumps(data, indent=2) + "\n", "utf-8")
    for fault in report.faults():
        sys.stdout.write(f"fault: {fault}\n")
    return 1 if report.faults() else 0


if __name__ == "__main__":
    sys.exit(main())
