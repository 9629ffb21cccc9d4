"""A turn at the longest context through gRPC, beside a stateless client that sends it all again.

Ours: from the client's call to the engine's, so the message's way through gRPC, rendering and
tokenising what is new, budgets and the cursor; what of it the service itself takes stands beside
it. Stateless: parsing the whole conversation's JSON,
rendering and tokenising it; its way over the wire is not counted, to its advantage.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, cast

from benchmarks.vllm_engine.report import Report, say, spread
from benchmarks.vllm_engine.world import World
from harness_sdk import Limits, OctopusClient
from harness_sdk.types import Message, SamplingOptions
from rollout_service.engine.base import Engine
from rollout_service.rpc import serve
from rollout_service.sessions import Sessions

_NUM_TURNS = 20
_NUM_RESENT = 6
_OBSERVATION_TOKENS = 64
_REPLY_TOKENS = 8


class _Clocked:
    """An engine, or sessions, that note when they are first asked."""

    def __init__(self, asked: object, *names: str) -> None:
        self._asked = asked
        self._names = names
        self.asked_s: float | None = None

    def __getattr__(self, name: str) -> Any:
        if name in self._names and self.asked_s is None:
            self.asked_s = time.perf_counter()
        return getattr(self._asked, name)


@dataclass(slots=True)
class _Played:
    """Turns of one thread."""

    conversation: list[dict[str, Any]]
    """What a stateless client would send after the last one."""
    milliseconds: list[float] = field(default_factory=list)
    in_service: list[float] = field(default_factory=list)
    """Of these, from the service's handler to the engine."""
    num_bytes: list[int] = field(default_factory=list)
    stateless: list[tuple[float, int]] = field(default_factory=list)
    """Milliseconds and bytes of the same turn, sent whole."""
    reply_bytes: int = 0


async def assembly(world: World, report: Report) -> None:
    """Turns of one thread at the longest context: timed in one episode, counted in another.

    Who counts passes every byte on, which would be part of the time.
    """
    engine = _Clocked(world.engine, "extend", "generate")
    # Stopping the server closes its sessions for good.
    service = _Clocked(world.new_sessions(cast(Engine, engine)), "generate")
    server = await serve(cast(Sessions, service))
    clocks = service, engine
    prompt = world.texts.take(world.scale.full_context - 4096)
    async with OctopusClient.connect(server.address) as client:
        timed = await _play(world, client, clocks, prompt, lambda: 0)
    async with (
        _Counter(server.address) as counter,
        OctopusClient.connect(counter.address) as client,
    ):
        counted = await _play(world, client, clocks, prompt, lambda: counter.total)
    await server.stop()
    _tell(world, report, timed, counted)


async def _play(
    world: World,
    client: OctopusClient,
    clocks: tuple[_Clocked, _Clocked],
    prompt: str,
    num_bytes: Callable[[], int],
) -> _Played:
    service, engine = clocks
    played = _Played([{"role": "user", "content": prompt}])
    sampling = SamplingOptions(max_tokens=_REPLY_TOKENS)
    limits = Limits(answer_reserve=1, max_turns=1 << 20)
    async with client.episode(limits=limits, primitives=()) as episode:
        await episode.root.generate(prompt, sampling=sampling)
        for _ in range(_NUM_TURNS):
            observation = world.texts.take(_OBSERVATION_TOKENS)
            service.asked_s = engine.asked_s = None
            before = num_bytes()
            begin = time.perf_counter()
            turn = await episode.root.generate(
                [Message(role="tool", content=observation)], sampling=sampling
            )
            assert service.asked_s is not None and engine.asked_s is not None
            played.milliseconds.append(1e3 * (engine.asked_s - begin))
            played.in_service.append(1e3 * (engine.asked_s - service.asked_s))
            played.num_bytes.append(num_bytes() - before)
            played.reply_bytes = len(turn.raw_text.encode())
            played.conversation += [
                {"role": "tool", "content": observation},
                {"role": "assistant", "content": turn.raw_text},
            ]
            if len(played.stateless) < _NUM_RESENT:
                played.stateless.append(_resent(world, played.conversation))
    return played


def _tell(world: World, report: Report, timed: _Played, counted: _Played) -> None:
    say(f"assembly: {len(timed.milliseconds)} turns")
    ours, resend = spread(timed.milliseconds), spread([ms for ms, _ in timed.stateless])
    own = spread(counted.num_bytes)
    other = spread([size for _, size in counted.stateless])["median"] + counted.reply_bytes
    report.put(assembly_ms_128k=ours["median"], wire_reduction=round(1 - own["median"] / other, 5))
    report.put_detail(
        "assembly",
        {
            "ours_ms": ours,
            "ours_in_service_ms": spread(timed.in_service),
            "stateless_ms": resend,
            "speedup": round(resend["median"] / ours["median"], 1),
            "ours_bytes_both_ways": own,
            "stateless_bytes_both_ways": other,
            "stateless_prompt_tokens": len(_prompt(world, timed.conversation)),
        },
    )


def _resent(world: World, conversation: list[dict[str, Any]]) -> tuple[float, int]:
    """Milliseconds from the request's bytes to token ids, and their number."""
    sent = json.dumps({"messages": conversation}).encode()
    begin = time.perf_counter()
    _prompt(world, json.loads(sent)["messages"])
    return 1e3 * (time.perf_counter() - begin), len(sent)


def _prompt(world: World, conversation: list[dict[str, Any]]) -> tuple[int, ...]:
    return world.chat.prompt([Message(**message) for message in conversation])


class _Counter:
    """Passes a connection on and counts its bytes, both ways, framing included."""

    def __init__(self, target: str) -> None:
        self._host, port = target.rsplit(":", 1)
        self._port = int(port)
        self.total = 0
        self.address = ""
        self._tasks: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> _Counter:
        self._server = await asyncio.start_server(self._connected, "127.0.0.1", 0)
        self.address = f"127.0.0.1:{self._server.sockets[0].getsockname()[1]}"
        return self

    async def __aexit__(self, *_: object) -> None:
        self._server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there = await asyncio.open_connection(self._host, self._port)
        for source, sink in ((reader, there[1]), (there[0], writer)):
            task = asyncio.create_task(self._pass_on(source, sink))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _pass_on(self, source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError):
            while data := await source.read(1 << 16):
                self.total += len(data)
                sink.write(data)
                await sink.drain()
        sink.close()
