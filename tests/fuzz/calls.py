"""Every RPC with drawn messages on a real server: what a caller may find, and what is left."""

from __future__ import annotations

import asyncio
import random
import threading
import time
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import grpc
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message_factory import GetMessageClass

from harness_sdk._status import ERROR_METADATA_KEY
from harness_sdk.errors import ERRORS_BY_NAME
from harness_sdk.rpc.v1 import rollout_pb2 as pb
from harness_sdk.types import PRIMITIVES
from rollout_service.engine.base import Engine
from rollout_service.sessions import SessionOptions
from tests.fuzz.messages import ABSENT, broken, draw
from tests.service.served import Served, served
from tests.session_cases import LOOK, tool_call

METHODS = pb.DESCRIPTOR.services_by_name["Rollout"].methods
SERVICE = "/octopus.rpc.v1.Rollout/"
_CALLS = [method for method in METHODS if method.name not in ("OpenEpisode", "CloseEpisode")]
_WEIGHTS = {"Generate": 4, "Connect": 0.2, "Status": 0.2, "Cancel": 0.15, "Done": 0.2}

DEADLINE_S = 30.0
"""Of a call that nothing but the service can hold up."""
OPTIONS = SessionOptions(
    run="r", busy_grace_s=0.05, max_visible_tokens=3000, answer_reserve=200, admission_poll_s=0.01
)
"""Budgets that keep one call's computation short: what takes long then hangs."""
_SHORT_S = 0.3
"""Of a wait without limit, and of turns without end."""

_FITTING: dict[str, tuple[Any, ...]] = {
    "protocol_version": (1,),
    "role": ("system", "user", "assistant", "tool", "user", "tool"),
    "content": ("go on", "42", "see", '{"x": 1}', "\n"),
    "name": ("", "look"),
    "tool_call_id": ("", "call_1"),
    "tools_json": (
        "", "", "[]", '[{"type": "function", "function": {"name": "look", "parameters": {}}}]',
    ),
    "max_tokens": (1, 2, 4, 8),
    "temperature": (1.0, 0.7),
    "top_p": (1.0,),
    "top_k": (0,),
    "seed": (1, 2),
    "demonstration": (LOOK, "plain", tool_call("fork", branches={"x": "y"}), tool_call("done")),
    "prompt": ("do it", ""),
    "step": (0, 1, 2, 3),
    "first_step": (0, 1, 2),
    "last_step": (1, 2, 5),
    "note": ("again", ""),
    "timeout_s": (0.01, 0.05),
    "answer": ("42", ""),
    "evidence": ("", "seen"),
    "reason": ("enough",),
    "reward": (0.0, 0.5, 1.0),
    "error_kind": ("", "", "ToolError"),
    "error_message": ("",),
    "primitives": PRIMITIVES,
    "version_policy": ("", "keep", "refresh"),
    "run": ("", "r"),
    "group_id": ("g",),
    "task_id": ("t",),
    "thread_budget": (0, 1000, 2000),
    "answer_reserve": (0, 100),
    "max_threads": (0, 3, 8),
    "max_depth": (0, 2),
    "max_turns": (0, 5, 20),
    "client": ("fuzz",),
}  # fmt: skip


@dataclass
class Found:
    """What calls came to."""

    calls: int = 0
    succeeded: Counter[str] = field(default_factory=Counter)
    refused: Counter[str] = field(default_factory=Counter)
    """By method and status."""
    given_up: Counter[str] = field(default_factory=Counter)
    """Turns and waits without an end that the caller ended."""
    faults: list[str] = field(default_factory=list)
    drawn: set[str] = field(default_factory=set)
    """Episode ids that a caller drew for itself alone."""

    def lines(self) -> list[str]:
        """The outcome in a few lines."""
        refused = ", ".join(f"{count} {what}" for what, count in self.refused.most_common(12))
        return [
            f"{self.calls} calls: {self.succeeded.total()} succeeded, {self.refused.total()} "
            f"refused, {self.given_up.total()} given up by the caller, {len(self.faults)} faults",
            "succeeded: " + ", ".join(f"{n} {what}" for what, n in self.succeeded.most_common()),
            f"refused most: {refused}",
            *self.faults[:20],
        ]


class Caller:
    """One client that plays episodes badly.

    Args:
        running: The server, in this process.
        rng: Source of all choices.
        found: Where outcomes are noted; callers share it.
    """

    def __init__(self, running: Served, rng: random.Random, found: Found) -> None:
        self._running = running
        self._rng = rng
        self._found = found
        self._episode_id = ""
        self._keys: list[str] = []
        self._held: set[asyncio.Task[None]] = set()

    async def play(self, num_calls: int) -> None:
        """Open an episode, make `num_calls` calls on it and around it, and close it, or not."""
        self._episode_id = f"e{self._rng.getrandbits(64):x}"
        self._found.drawn.add(self._episode_id)
        self._keys = []
        await self._open()
        for _ in range(num_calls):
            if self._has_ended() and self._rng.random() < 0.3:
                break
            method = self._rng.choices(_CALLS, [_WEIGHTS.get(m.name, 1) for m in _CALLS])[0]
            if self._rng.random() < 0.03:
                method = next(m for m in METHODS if m.name == "OpenEpisode")
            elif self._rng.random() < 0.02:
                method = next(m for m in METHODS if m.name == "CloseEpisode")
            calls = [self._call(method)]
            if self._rng.random() < 0.1:
                # Two writers on one thread, or one and the end of its episode.
                calls.append(self._call(self._rng.choice(METHODS)))
            await asyncio.gather(*calls)
        if self._rng.random() < 0.7:
            await self._call(METHODS_BY_NAME["CloseEpisode"])
        for task in self._held:
            task.cancel()
        await asyncio.gather(*self._held, return_exceptions=True)

    def _has_ended(self) -> bool:
        episode = self._running.sessions._episodes.get(self._episode_id)
        return episode is None or episode.root.status.is_final

    async def _open(self) -> None:
        """Most often with what an agent would send; the stream is held while the calls are made."""
        method = METHODS_BY_NAME["OpenEpisode"]
        for wildness in (0.05, 0.0, 0.0):
            request: Any = draw(self._rng, method.input_type, self._fitting, wildness)
            request.episode_id = self._episode_id
            task = asyncio.create_task(self._send(method, request.SerializeToString(), None))
            self._held.add(task)
            task.add_done_callback(self._held.discard)
            while not task.done() and self._episode_id not in self._running.sessions._episodes:
                await asyncio.sleep(0.002)
            if not task.done():
                break

    async def _call(self, method: Any) -> None:
        wildness = self._rng.choice((0.0, 0.0, 0.1, 0.1, 0.5))
        message = draw(self._rng, method.input_type, self._fitting, wildness)
        self._address(message, wildness)
        data = message.SerializeToString()
        if self._rng.random() < 0.08:
            data = broken(self._rng, data)
        deadline_s = _SHORT_S if _may_be_endless(method, data) else DEADLINE_S
        await self._send(method, data, deadline_s)

    def _address(self, message: Any, wildness: float) -> None:
        """Give a call on a thread the head that the thread has."""
        if "call" not in message.DESCRIPTOR.fields_by_name or self._rng.random() < wildness:
            return
        episode = self._running.sessions._episodes.get(self._episode_id)
        if episode is None:
            return
        threads = list(episode.threads.values())
        live = [thread for thread in threads if not thread.status.is_final]
        thread = self._rng.choice(live if live and self._rng.random() < 0.9 else threads)
        key = self._rng.choice(("", "", f"k{self._rng.getrandbits(30)}", *self._keys[-2:]))
        self._keys.append(key)
        message.call.CopyFrom(
            pb.CallContext(
                episode_id=self._episode_id,
                thread_id=thread.thread_id,
                expected_head=thread.head_id,
                idempotency_key=key,
            )
        )

    def _fitting(self, rng: random.Random, field: FieldDescriptor) -> Any:
        episode = self._running.sessions._episodes.get(self._episode_id)
        threads = list(episode.threads) if episode is not None else ["root"]
        assert field.containing_type is not None
        where = f"{field.containing_type.name}.{field.name}"
        match where:
            case "Branch.thread_id":
                return rng.choice("abcdefghij") + str(rng.randrange(9))
            case "WaitRequest.branches" | "ReadThreadRequest.branch" if len(threads) > 1:
                return rng.choice(threads[1:])
            case "CallContext.thread_id":
                return rng.choice(threads)
            case "OpenEpisodeRequest.primitives":
                return rng.choice(([], list(PRIMITIVES), ["fork", "done"]))
            case "Sampling.stop":
                return rng.choice(([], [], ["\n"]))
            case "Sampling.structured" if rng.random() < 0.95:
                return ABSENT
            case "GenerateRequest.tools_json" if episode is None or episode.root.head is not None:
                return ABSENT
            case "Message.role" if episode is not None and episode.root.head is not None:
                return rng.choice(("tool", "tool", "user"))
        if field.name == "episode_id":
            return self._episode_id
        if field.name == "idempotency_key":
            return rng.choice(("", f"k{rng.getrandbits(30)}"))
        return rng.choice(_FITTING[field.name]) if field.name in _FITTING else None

    async def _send(self, method: Any, data: bytes, deadline_s: float | None) -> None:
        reply = GetMessageClass(method.output_type)
        open_call: Any = (
            self._running.channel.unary_stream
            if method.server_streaming
            else self._running.channel.unary_unary
        )
        rpc = open_call(
            SERVICE + method.name, request_serializer=bytes, response_deserializer=reply.FromString
        )
        self._found.calls += 1
        call = rpc(data, timeout=deadline_s)
        try:
            if method.server_streaming:
                async for _ in call:
                    if method.name == "OpenEpisode" and deadline_s is not None:
                        # What a repeated opening takes over is given back at once.
                        call.cancel()
            else:
                await call
        except grpc.aio.AioRpcError as error:
            self._note_refusal(method, data, deadline_s, error)
        except asyncio.CancelledError:
            call.cancel()
            if asyncio.current_task() in self._held:
                return
            self._found.given_up[method.name] += 1
        else:
            self._found.succeeded[method.name] += 1

    def _note_refusal(
        self, method: Any, data: bytes, deadline_s: float | None, error: grpc.aio.AioRpcError
    ) -> None:
        if error.code() is grpc.StatusCode.CANCELLED and method.name == "OpenEpisode":
            self._found.given_up[method.name] += 1
            return
        if error.code() is grpc.StatusCode.DEADLINE_EXCEEDED and deadline_s == _SHORT_S:
            self._found.given_up[method.name] += 1
            return
        fault = refusal_fault(error)
        if fault:
            self._found.faults.append(f"{method.name} {data[:200]!r}: {fault}")
        else:
            self._found.refused[f"{method.name} {error.code().name}"] += 1


METHODS_BY_NAME = {method.name: method for method in METHODS}


def refusal_fault(error: grpc.aio.AioRpcError) -> str:
    """What is wrong with a refusal; empty where it is typed and says what to do."""
    told = f"{error.code().name}: {error.details()}"
    if error.code() in (grpc.StatusCode.INTERNAL, grpc.StatusCode.UNKNOWN):
        return told
    pairs: Any = error.trailing_metadata() or ()
    details = [value for key, value in pairs if key == ERROR_METADATA_KEY]
    if not details:
        return f"no detail: {told}"
    detail = pb.ErrorDetail.FromString(details[0])
    if detail.kind not in ERRORS_BY_NAME or ERRORS_BY_NAME[detail.kind].status != error.code().name:
        return f"kind {detail.kind!r}: {told}"
    missing = [name for name in ("message", "value", "remedy") if not getattr(detail, name)]
    return f"without {', '.join(missing)}: {told}" if missing else ""


def _may_be_endless(method: Any, data: bytes) -> bool:
    """Whether the caller has to bring the end: a wait without limit, a turn of many tokens."""
    if method.name == "OpenEpisode":
        return True
    if method.name not in ("Wait", "Generate"):
        return False
    try:
        request: Any = GetMessageClass(method.input_type).FromString(data)
    except Exception:
        return False
    if method.name == "Wait":
        return not 0 < request.timeout_s < DEADLINE_S / 2
    tokens = request.sampling.max_tokens if request.HasField("sampling") else 1 << 20
    return tokens > 100 and not request.HasField("demonstration")


@dataclass(frozen=True, slots=True, kw_only=True)
class Held:
    """What the process holds."""

    threads: int
    tasks: int

    @classmethod
    def now(cls) -> Held:
        """As it is."""
        return cls(threads=threading.active_count(), tasks=len(asyncio.all_tasks()))


async def fuzz_calls(
    engine: Engine, seed: int, num_calls: int, *, callers: int = 6, until_s: float | None = None
) -> Found:
    """Make at least `num_calls` calls, then look at what is left.

    Args:
        engine: Not yet started.
        seed: Of all choices; what calls meet depends on their timing too.
        num_calls: Calls.
        callers: Clients at a time.
        until_s: End of `time.monotonic` past which no further episode is begun.

    Raises:
        AssertionError: Something is left of the episodes.
    """
    found = Found()
    async with _watched(engine, found) as running:
        rngs = [random.Random(f"{seed} {number}") for number in range(callers)]

        async def go_on(rng: random.Random) -> None:
            while found.calls < num_calls and not (until_s and time.monotonic() > until_s):
                await Caller(running, rng, found).play(rng.randrange(1, 40))

        await asyncio.gather(*map(go_on, rngs))
        await _settled(running)
        opened = running.sessions.status().metrics.get("episodes/opened", 0)
        written = Counter(record.episode_id for record in running.sink.records)
        if written.total() != opened:
            found.faults.append(f"{opened} episodes opened, {written.total()} records")
        # A wild id may come again once the service has forgotten the first: `max_closed` later.
        twice = [name for name, count in written.items() if count > 1 and name in found.drawn]
        found.faults += [f"two records of episode {name}" for name in twice]
    return found


@asynccontextmanager
async def _watched(engine: Engine, found: Found) -> AsyncIterator[Served]:
    async with served(engine, options=OPTIONS) as running:
        await running.stub.Status(pb.StatusRequest())
        before = Held.now()
        yield running
        # The last calls' handlers may still be ending.
        give_up_s = time.monotonic() + 10.0
        while (after := Held.now()).tasks > before.tasks + 2 and time.monotonic() < give_up_s:
            await asyncio.sleep(0.05)
        # The threads of an executor are started as they are needed, and kept.
        if after.tasks > before.tasks + 2 or after.threads > before.threads + 40:
            found.faults.append(f"held before {before}, after {after}")


async def _settled(running: Served, within_s: float = 20.0) -> None:
    """Wait until the lost episodes are gone, and nothing is resident any more."""
    async with asyncio.timeout(within_s):
        while running.sessions.status().open_episodes or running.sessions.status().queued_episodes:
            await asyncio.sleep(0.02)
        while running.engine.stats().running or running.engine.stats().resident_cursors:
            await asyncio.sleep(0.02)
    stats = running.engine.stats()
    assert (stats.tokens_resident, stats.recurrent_slots) == (0, 0), stats
