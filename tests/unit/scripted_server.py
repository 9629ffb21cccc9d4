"""A real gRPC server whose replies a test writes: what the SDK does, without a rollout service."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections import defaultdict
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any, NoReturn

import grpc

from harness_sdk import _status, _wire
from harness_sdk.errors import HarnessError
from harness_sdk.options import RetryPolicy
from harness_sdk.rpc.v1 import rollout_pb2 as pb
from harness_sdk.rpc.v1 import rollout_pb2_grpc as rpc

FAST = RetryPolicy(max_attempts=3, initial_backoff_s=0.01, max_backoff_s=0.02)
"""Retries that a test waits for."""

BUDGET = pb.Budget(tokens_left=1000, turns_left=10, threads_left=5)


def call(name: str, arguments: object, call_id: str = "c0", error: str = "") -> pb.ToolCall:
    """A parsed call."""
    return pb.ToolCall(
        call_id=call_id, name=name, arguments_json=json.dumps(arguments), error=error
    )


def reply(*calls: pb.ToolCall, text: str = "", ended: str = "", reserve: bool = False) -> Any:
    """A model turn; head, step and tokens are filled in when it is played."""
    budget = pb.Budget(tokens_left=1000, turns_left=10, threads_left=5, reserve_reached=reserve)
    return pb.TurnReply(
        text=text,
        raw_text=text,
        tool_calls=calls,
        finish_reason="stop",
        thread_ended=ended,
        budget=budget,
    )


class Hang:
    """A turn that never comes."""


@dataclass
class ScriptedServer(rpc.RolloutServicer):
    """Plays `turns[thread]` in order and keeps every request.

    `failures[method]` are raised before that method answers, first in, first out.
    """

    max_message_bytes: int = 1 << 20
    protocol_version: int = _wire.PROTOCOL_VERSION
    token: str = ""
    hold_admission_s: float = 0.0
    turns: dict[str, list[Any]] = field(default_factory=lambda: defaultdict(list))
    failures: dict[str, list[HarnessError]] = field(default_factory=lambda: defaultdict(list))
    requests: list[tuple[str, Any]] = field(default_factory=list)
    heads: dict[str, int] = field(default_factory=lambda: defaultdict(lambda: 1))
    steps: dict[str, int] = field(default_factory=lambda: defaultdict(int))
    ended: dict[str, asyncio.Event] = field(default_factory=lambda: defaultdict(asyncio.Event))
    results: dict[str, pb.BranchResult] = field(default_factory=dict)
    cancelled_calls: list[str] = field(default_factory=list)
    open_episodes: set[str] = field(default_factory=set)
    drop_episode: asyncio.Event = field(default_factory=asyncio.Event)
    drop_reason: str = "engine_error"
    rewind_cancels: tuple[str, ...] = ()

    def of(self, method: str) -> list[Any]:
        """The requests of one method."""
        return [request for name, request in self.requests if name == method]

    async def Connect(self, request: pb.ConnectRequest, context: Any) -> pb.ConnectReply:
        await self._begin("Connect", request, context)
        return pb.ConnectReply(
            protocol_version=self.protocol_version,
            replica_id="scripted",
            max_message_bytes=self.max_message_bytes,
            limits=pb.Limits(thread_budget=1000),
        )

    async def Status(self, request: pb.StatusRequest, context: Any) -> pb.StatusReply:
        await self._begin("Status", request, context)
        return pb.StatusReply(replica_id="scripted", open_episodes=len(self.open_episodes))

    async def OpenEpisode(
        self, request: pb.OpenEpisodeRequest, context: Any
    ) -> AsyncIterator[pb.EpisodeEvent]:
        await self._begin("OpenEpisode", request, context)
        if self.hold_admission_s:
            yield pb.EpisodeEvent(queued=pb.EpisodeQueued(ahead=3, kv_use=0.8))
            await asyncio.sleep(self.hold_admission_s)
        opened = pb.EpisodeOpened(
            episode_id=request.episode_id, root_thread="root", head=1, policy_version=4
        )
        self.open_episodes.add(request.episode_id)
        try:
            yield pb.EpisodeEvent(opened=opened)
            await self.drop_episode.wait()
            yield pb.EpisodeEvent(closed=pb.EpisodeClosed(stop_reason=self.drop_reason))
        finally:
            self.open_episodes.discard(request.episode_id)

    async def Generate(
        self, request: pb.GenerateRequest, context: Any
    ) -> AsyncIterator[pb.GenerateEvent]:
        await self._begin("Generate", request, context)
        thread = request.call.thread_id
        self._check_head(request.call)
        turn = self.turns[thread].pop(0)
        yield pb.GenerateEvent(delta=pb.TokenDelta(token_ids=[7], logprobs=[-0.5], text="a"))
        if isinstance(turn, Hang):
            await self._hang(f"Generate {thread}")
        yield pb.GenerateEvent(delta=pb.TokenDelta(token_ids=[8], logprobs=[-0.25], text="b"))
        self.steps[thread] += 1
        played = pb.TurnReply(head=self._move(request.call), step=self.steps[thread], num_tokens=2)
        played.MergeFrom(turn)
        yield pb.GenerateEvent(turn=played)

    async def Fork(self, request: pb.ForkRequest, context: Any) -> pb.ForkReply:
        await self._begin("Fork", request, context)
        parent = request.call.thread_id
        prefix = "" if parent == "root" else f"{parent}."
        threads = [
            pb.ForkedThread(thread_id=prefix + branch.thread_id, head=1)
            for branch in request.branches
        ]
        return pb.ForkReply(head=self._move(request.call), threads=threads, budget=BUDGET)

    async def Rewind(self, request: pb.RewindRequest, context: Any) -> pb.RewindReply:
        await self._begin("Rewind", request, context)
        self.steps[request.call.thread_id] = request.step
        return pb.RewindReply(
            head=self._move(request.call),
            step=request.step,
            tokens_returned=5,
            cancelled_threads=self.rewind_cancels,
            budget=BUDGET,
        )

    async def ReadThread(self, request: pb.ReadThreadRequest, context: Any) -> pb.ReadThreadReply:
        await self._begin("ReadThread", request, context)
        return pb.ReadThreadReply(
            head=self._move(request.call),
            first_step=request.first_step,
            last_step=request.last_step,
            tokens_mounted=12,
            stub="mounted",
            budget=BUDGET,
        )

    async def Wait(self, request: pb.WaitRequest, context: Any) -> AsyncIterator[pb.WaitEvent]:
        await self._begin("Wait", request, context)
        try:
            for branch in request.branches:
                await self.ended[branch].wait()
                yield pb.WaitEvent(ended=self.results[branch])
        except asyncio.CancelledError:
            self.cancelled_calls.append("Wait")
            raise
        results = [self.results[branch] for branch in request.branches]
        head = self._move(request.call)
        yield pb.WaitEvent(reply=pb.WaitReply(head=head, results=results, budget=BUDGET))

    async def Done(self, request: pb.DoneRequest, context: Any) -> pb.DoneReply:
        await self._begin("Done", request, context)
        self._end(request.call.thread_id, "done", request.answer)
        return pb.DoneReply(head=self._move(request.call), status="done")

    async def Cancel(self, request: pb.CancelRequest, context: Any) -> pb.CancelReply:
        await self._begin("Cancel", request, context)
        self._end(request.call.thread_id, "cancelled", "")
        return pb.CancelReply(cancelled_threads=[request.call.thread_id])

    async def CloseEpisode(
        self, request: pb.CloseEpisodeRequest, context: Any
    ) -> pb.CloseEpisodeReply:
        await self._begin("CloseEpisode", request, context)
        reason = {"": "done", "Cancelled": "cancelled"}.get(request.error_kind, "tool_error")
        return pb.CloseEpisodeReply(stop_reason=reason, entry_id="1-0", num_nodes=2, num_tokens=9)

    async def _begin(self, method: str, request: Any, context: Any) -> None:
        self.requests.append((method, request))
        headers = dict(context.invocation_metadata())
        if self.token and headers.get("authorization") != f"Bearer {self.token}":
            await context.abort(grpc.StatusCode.UNAUTHENTICATED, "wrong token")
        if self.failures[method]:
            await context.abort(*_status.error_to_status(self.failures[method].pop(0)))

    async def _hang(self, name: str) -> NoReturn:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            self.cancelled_calls.append(name)
            raise
        raise AssertionError

    def _check_head(self, context: pb.CallContext) -> None:
        assert context.expected_head == self.heads[context.thread_id], context

    def _move(self, context: pb.CallContext) -> int:
        self._check_head(context)
        self.heads[context.thread_id] += 1
        return self.heads[context.thread_id]

    def _end(self, thread: str, status: str, answer: str) -> None:
        self.results[thread] = pb.BranchResult(thread_id=thread, status=status, answer=answer)
        self.ended[thread].set()


@contextlib.asynccontextmanager
async def serving(scripted: ScriptedServer) -> AsyncIterator[str]:
    """Serve on a free port; yields the address."""
    server = grpc.aio.server(
        options=[("grpc.max_receive_message_length", scripted.max_message_bytes)]
    )
    rpc.add_RolloutServicer_to_server(scripted, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        await server.stop(None)


async def until(condition: Any, timeout_s: float = 5.0) -> None:
    """Wait until `condition()` holds."""
    async with asyncio.timeout(timeout_s):
        while not condition():
            await asyncio.sleep(0.01)
