"""A turn at the longest context through gRPC, beside a stateless client that sends it all again.

Ours: from the client's call to the engine's, so the message's way through gRPC, rendering and
tokenising what is new, budgets and the cursor. Stateless: parsing the whole conversation's JSON,
rendering and tokenising it; its way over the wire is not counted, to its advantage.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from typing import Any, cast

from benchmarks.vllm_engine.report import Report, say, spread
from benchmarks.vllm_engine.world import World
from harness_sdk import Limits, OctopusClient
from harness_sdk.types import Message, SamplingOptions
from rollout_service.engine.base import Engine
from rollout_service.server import serve

_NUM_TURNS = 20
_NUM_RESENT = 6
_OBSERVATION_TOKENS = 64
_REPLY_TOKENS = 8


class _Clocked:
    """An engine that notes when it is first asked."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self.asked_s: float | None = None

    def __getattr__(self, name: str) -> Any:
        if name in ("extend", "generate") and self.asked_s is None:
            self.asked_s = time.perf_counter()
        return getattr(self._engine, name)


async def assembly(world: World, report: Report) -> None:
    """Turns of one thread at the longest context."""
    clocked = _Clocked(world.engine)
    # Stopping the server closes its sessions for good.
    server = await serve(world.new_sessions(cast(Engine, clocked)))
    async with (
        _Counter(server.address) as counter,
        OctopusClient.connect(counter.address) as client,
    ):
        await _measure(world, report, client, counter, clocked)
    await server.stop()


async def _measure(
    world: World, report: Report, client: OctopusClient, counter: _Counter, clocked: _Clocked
) -> None:
    prompt = world.texts.take(world.scale.full_context - 4096)
    conversation: list[dict[str, Any]] = [{"role": "user", "content": prompt}]
    sampling = SamplingOptions(max_tokens=_REPLY_TOKENS)
    limits = Limits(answer_reserve=1, max_turns=1 << 20)
    ours, ours_bytes, resend, resend_bytes = [], [], [], []
    reply = 0
    async with client.episode(limits=limits, primitives=()) as episode:
        await episode.root.generate(prompt, sampling=sampling)
        for _ in range(_NUM_TURNS):
            observation = world.texts.take(_OBSERVATION_TOKENS)
            clocked.asked_s, before = None, counter.total
            begin = time.perf_counter()
            turn = await episode.root.generate(
                [Message(role="tool", content=observation)], sampling=sampling
            )
            assert clocked.asked_s is not None
            ours.append(1e3 * (clocked.asked_s - begin))
            ours_bytes.append(counter.total - before)
            reply = len(turn.raw_text.encode())
            conversation += [
                {"role": "tool", "content": observation},
                {"role": "assistant", "content": turn.raw_text},
            ]
            if len(resend) < _NUM_RESENT:
                milliseconds, num_bytes = _resent(world, conversation)
                resend.append(milliseconds)
                resend_bytes.append(num_bytes)
    say(f"assembly: {len(ours)} turns")
    own, other = spread(ours_bytes)["median"], spread(resend_bytes)["median"] + reply
    report.put(assembly_ms_128k=spread(ours)["median"], wire_reduction=round(1 - own / other, 5))
    report.put_detail(
        "assembly",
        {
            "ours_ms": spread(ours),
            "stateless_ms": spread(resend),
            "speedup": round(spread(resend)["median"] / spread(ours)["median"], 1),
            "ours_bytes_both_ways": spread(ours_bytes),
            "stateless_bytes_both_ways": other,
            "stateless_prompt_tokens": len(_prompt(world, conversation)),
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
