"""One method per RPC: each converts, calls, converts."""

from __future__ import annotations

import contextlib

from harness_sdk import _wire
from harness_sdk.deltas import TokenDelta
from harness_sdk.errors import InvalidRequest, ProtocolError
from harness_sdk.rpc.v1 import rollout_pb2 as pb
from harness_sdk.rpc.v1 import rollout_pb2_grpc
from harness_sdk.types import BranchResult, Message, SamplingOptions
from rollout_service.access import Caller
from rollout_service.background import Background
from rollout_service.rpc.calls import Context, Desk, streaming, unary
from rollout_service.sessions import Call, OpenRequest, Sessions
from rollout_service.sessions.replies import Queued


class RolloutServicer(rollout_pb2_grpc.RolloutServicer):
    """The calls on one replica's sessions.

    Attributes:
        desk: Lets calls in.
    """

    def __init__(self, sessions: Sessions, max_message_bytes: int, desk: Desk) -> None:
        self._sessions = sessions
        self.desk = desk
        self._max_message_bytes = max_message_bytes
        self._losing = Background()

    async def settle(self, timeout_s: float) -> None:
        """Wait until what lost clients left behind is cleared away, for at most `timeout_s` s."""
        await self._losing.settle(timeout_s)

    @unary
    async def Connect(self, request: pb.ConnectRequest, caller: Caller) -> pb.ConnectReply:
        if request.protocol_version != _wire.PROTOCOL_VERSION:
            raise ProtocolError(
                "client and service speak different protocol versions",
                value=f"client {request.protocol_version}",
                limit=f"service {_wire.PROTOCOL_VERSION}",
                remedy="install one release on both ends",
            )
        return _wire.info_to_proto(self._sessions.info(self._max_message_bytes))

    @streaming
    async def OpenEpisode(
        self, request: pb.OpenEpisodeRequest, context: Context, caller: Caller
    ) -> None:
        async def on_queued(queued: Queued) -> None:
            event = pb.EpisodeQueued(ahead=queued.ahead, kv_use=queued.kv_use)
            await context.write(pb.EpisodeEvent(queued=event))

        opened = await self._sessions.open(_open_request_from_proto(request, caller), on_queued)
        try:
            event = pb.EpisodeOpened(
                episode_id=opened.episode_id,
                root_thread=opened.root_thread,
                head=opened.head,
                policy_version=opened.policy_version,
                limits=_wire.limits_to_proto(opened.limits.to_limits()),
            )
            await context.write(pb.EpisodeEvent(opened=event))
            reason = await self._sessions.wait_closed(opened.episode_id)
        except BaseException:
            self._lose(opened.episode_id, opened.holder)
            raise
        await context.write(pb.EpisodeEvent(closed=pb.EpisodeClosed(stop_reason=reason)))

    @streaming
    async def Generate(self, request: pb.GenerateRequest, context: Context, caller: Caller) -> None:
        events = self._sessions.generate(
            _call_from_proto(request.call, caller),
            _messages_from_proto(request),
            tools_json=request.tools_json,
            sampling=_sampling_from_proto(request),
            demonstration=request.demonstration if request.HasField("demonstration") else None,
            with_events=request.with_events,
        )
        async with contextlib.aclosing(events):
            async for event in events:
                if isinstance(event, TokenDelta):
                    reply = pb.GenerateEvent(delta=_wire.delta_to_proto(event))
                else:
                    reply = pb.GenerateEvent(turn=_wire.turn_to_proto(event.turn, event.head))
                await context.write(reply)

    @unary
    async def Fork(self, request: pb.ForkRequest, caller: Caller) -> pb.ForkReply:
        branches = {branch.thread_id: branch.prompt for branch in request.branches}
        if len(branches) < len(request.branches):
            names = [branch.thread_id for branch in request.branches]
            raise InvalidRequest(
                "branch names are not unique",
                value=", ".join(map(repr, names)),
                limit="each name once",
                remedy="rename the branches",
            )
        reply = await self._sessions.fork(_call_from_proto(request.call, caller), branches)
        return pb.ForkReply(
            head=reply.head,
            threads=[
                pb.ForkedThread(thread_id=each.thread_id, head=each.head) for each in reply.threads
            ],
            budget=_wire.budget_to_proto(reply.budget),
        )

    @unary
    async def Rewind(self, request: pb.RewindRequest, caller: Caller) -> pb.RewindReply:
        call = _call_from_proto(request.call, caller)
        reply = await self._sessions.rewind(call, request.step, request.note)
        return pb.RewindReply(
            head=reply.head,
            step=reply.result.step,
            tokens_returned=reply.result.tokens_returned,
            cancelled_threads=reply.result.cancelled_threads,
            budget=_wire.budget_to_proto(reply.budget),
        )

    @unary
    async def ReadThread(self, request: pb.ReadThreadRequest, caller: Caller) -> pb.ReadThreadReply:
        call = _call_from_proto(request.call, caller)
        reply = await self._sessions.read_thread(
            call, request.branch, request.first_step, request.last_step
        )
        result = reply.result
        return pb.ReadThreadReply(
            head=reply.head,
            first_step=result.first_step,
            last_step=result.last_step,
            tokens_mounted=result.tokens_mounted,
            next_position=result.next_position,
            stub=result.stub,
            budget=_wire.budget_to_proto(reply.budget),
        )

    @streaming
    async def Wait(self, request: pb.WaitRequest, context: Context, caller: Caller) -> None:
        call = _call_from_proto(request.call, caller)
        events = self._sessions.wait(call, list(request.branches), request.timeout_s)
        async with contextlib.aclosing(events):
            async for event in events:
                if isinstance(event, BranchResult):
                    reply = pb.WaitEvent(ended=_wire.branch_result_to_proto(event))
                else:
                    results = [_wire.branch_result_to_proto(each) for each in event.results]
                    reply = pb.WaitEvent(
                        reply=pb.WaitReply(
                            head=event.head,
                            results=results,
                            note=event.note,
                            budget=_wire.budget_to_proto(event.budget),
                        )
                    )
                await context.write(reply)

    @unary
    async def Done(self, request: pb.DoneRequest, caller: Caller) -> pb.DoneReply:
        call = _call_from_proto(request.call, caller)
        reply = await self._sessions.done(call, request.answer, request.evidence)
        return pb.DoneReply(head=reply.head, status=reply.status)

    @unary
    async def Cancel(self, request: pb.CancelRequest, caller: Caller) -> pb.CancelReply:
        call = _call_from_proto(request.call, caller)
        return pb.CancelReply(cancelled_threads=await self._sessions.cancel(call, request.reason))

    @unary
    async def CloseEpisode(
        self, request: pb.CloseEpisodeRequest, caller: Caller
    ) -> pb.CloseEpisodeReply:
        result = await self._sessions.close(
            request.episode_id,
            reward=request.reward if request.HasField("reward") else None,
            error_kind=request.error_kind,
            error_message=request.error_message,
            idempotency_key=request.idempotency_key,
            owner=caller.reaches,
        )
        return pb.CloseEpisodeReply(
            stop_reason=result.stop_reason,
            entry_id=result.entry_id,
            num_nodes=result.num_nodes,
            num_tokens=result.num_tokens,
        )

    @unary
    async def Status(self, request: pb.StatusRequest, caller: Caller) -> pb.StatusReply:
        return _wire.server_status_to_proto(self._sessions.status())

    def _lose(self, episode_id: str, holder: int) -> None:
        # A task of its own: the handler that notices is being cancelled.
        self._losing.begin(self._sessions.lost(episode_id, holder))


def _call_from_proto(proto: pb.CallContext, caller: Caller) -> Call:
    return Call(
        episode_id=proto.episode_id,
        thread_id=proto.thread_id,
        expected_head=proto.expected_head,
        idempotency_key=proto.idempotency_key,
        owner=caller.reaches,
    )


def _open_request_from_proto(proto: pb.OpenEpisodeRequest, caller: Caller) -> OpenRequest:
    return OpenRequest(
        episode_id=proto.episode_id,
        group_id=proto.group_id,
        task_id=proto.task_id,
        run=proto.run,
        limits=_wire.limits_from_proto(proto.limits),
        primitives=tuple(proto.primitives),
        version_policy=proto.version_policy,
        idempotency_key=proto.idempotency_key,
        owner=caller.name,
    )


def _messages_from_proto(proto: pb.GenerateRequest) -> list[Message]:
    return [_wire.message_from_proto(message) for message in proto.messages]


def _sampling_from_proto(proto: pb.GenerateRequest) -> SamplingOptions:
    if not proto.HasField("sampling"):
        return SamplingOptions()
    return _wire.sampling_from_proto(proto.sampling)
