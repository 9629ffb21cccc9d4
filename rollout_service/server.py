"""The gRPC server: messages to calls on `Sessions` and back. No rule of an episode lives here."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractContextManager
from typing import Any, NoReturn, TypeVar

import grpc

from harness_sdk import _status, _wire
from harness_sdk.deltas import TokenDelta
from harness_sdk.errors import (
    AuthError,
    ConfigError,
    EngineError,
    HarnessError,
    InvalidRequest,
    ProtocolError,
)
from harness_sdk.log_ids import log_ids
from harness_sdk.rpc.v1 import rollout_pb2 as pb
from harness_sdk.rpc.v1 import rollout_pb2_grpc
from harness_sdk.tracing import spanning
from harness_sdk.types import BranchResult, Message, SamplingOptions
from rollout_service.access import Access, Caller
from rollout_service.background import Background
from rollout_service.decoding import Decoding
from rollout_service.sessions import Call, OpenRequest, Sessions
from rollout_service.sessions.replies import Queued

logger = logging.getLogger(__name__)

Q = TypeVar("Q")
R = TypeVar("R")
Context = grpc.aio.ServicerContext

# A client that vanished without closing its connection is noticed within their sum, and its
# episodes are closed within 5 s.
_KEEPALIVE_MS, _KEEPALIVE_TIMEOUT_MS = 2000, 2000


class RunningServer:
    """A started server; `stop` closes its episodes and then itself."""

    def __init__(
        self, server: grpc.aio.Server, servicer: RolloutServicer, sessions: Sessions, address: str
    ) -> None:
        self._server = server
        self._servicer = servicer
        self._sessions = sessions
        self.address = address
        """host:port that it is bound to."""

    async def stop(self, grace_s: float = 1.0) -> None:
        """Close every episode, let running calls end, clear away: `grace_s` seconds for each."""
        try:
            async with asyncio.timeout(grace_s):
                await self._sessions.shutdown()
        except TimeoutError:
            logger.error("the records of some episodes are still being written")
        await self._server.stop(grace_s)
        await self._servicer.settle(grace_s)

    async def wait(self) -> None:
        """Suspend until the server has stopped."""
        await self._server.wait_for_termination()


async def serve(
    sessions: Sessions,
    *,
    host: str = "127.0.0.1",
    port: int = 0,
    max_message_bytes: int = _wire.DEFAULT_MAX_MESSAGE_BYTES,
    access: Access | None = None,
    tls: grpc.ServerCredentials | None = None,
) -> RunningServer:
    """Start serving `sessions`.

    Args:
        sessions: The episodes.
        host: Address to bind.
        port: Port to bind; 0 takes a free one.
        max_message_bytes: Largest message in either direction.
        access: Tokens, one of which every call must carry; None asks for none.
        tls: Certificates; None serves plain text.

    Raises:
        ConfigError: The address cannot be bound.
    """
    access = access or Access()
    server = grpc.aio.server(
        interceptors=[*([] if access.is_open else [_BearerAuth(access)]), Decoding()],
        options=[
            ("grpc.max_receive_message_length", max_message_bytes),
            ("grpc.max_send_message_length", max_message_bytes),
            ("grpc.so_reuseport", 0),
            ("grpc.keepalive_time_ms", _KEEPALIVE_MS),
            ("grpc.keepalive_timeout_ms", _KEEPALIVE_TIMEOUT_MS),
            # While a ping of gRPC's own measuring is unanswered, keepalive sends none: its limit,
            # a minute by default, is then the one that counts.
            ("grpc.http2.ping_timeout_ms", _KEEPALIVE_MS + _KEEPALIVE_TIMEOUT_MS),
            ("grpc.keepalive_permit_without_calls", 1),
            ("grpc.http2.max_pings_without_data", 0),
            # Clients may look after their connection just as often.
            ("grpc.http2.min_recv_ping_interval_without_data_ms", 1000),
            ("grpc.http2.max_ping_strikes", 0),
        ],
    )
    servicer = RolloutServicer(sessions, max_message_bytes, access)
    rollout_pb2_grpc.add_RolloutServicer_to_server(servicer, server)
    address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    try:
        if tls is None:
            bound = server.add_insecure_port(address)
        else:
            bound = server.add_secure_port(address, tls)
    except RuntimeError as error:
        raise ConfigError(
            "the server cannot bind its address",
            value=address,
            remedy="free the port or choose another one",
        ) from error
    await server.start()
    return RunningServer(server, servicer, sessions, f"{address.rpartition(':')[0]}:{bound}")


async def abort(context: Context, error: Exception) -> NoReturn:
    """End a call with `error`, whole: the one place where errors become statuses.

    Raises:
        CancelledError: The client has left; nobody is there to be told.
    """
    if isinstance(error, grpc.aio.InternalError):
        # gRPC's word for a message that it could not send.
        raise asyncio.CancelledError from error
    if not isinstance(error, HarnessError):
        logger.error("unexpected failure in a call", exc_info=error)
        error = EngineError(
            f"the service failed unexpectedly: {error}",
            value=type(error).__name__,
            remedy="report it with the service's log; the episode is where it was",
        )
    code, text, trailing = _status.error_to_status(error)
    try:
        await context.abort(code, text, trailing)
    except grpc.aio.InternalError as gone:
        raise asyncio.CancelledError from gone
    raise AssertionError("abort raises")


def _unary(method: Callable[[Any, Q, Caller], Awaitable[R]]) -> Any:
    @functools.wraps(method)
    async def handler(self: Any, request: Q, context: Context) -> R:
        ids = _ids(request)
        with log_ids(**ids):
            try:
                caller = self._access.caller(_authorization(context))
                with _span(method.__name__, ids, context):
                    return await method(self, request, caller)
            except Exception as error:
                await abort(context, error)

    return handler


def _streaming(method: Callable[[Any, Q, Context, Caller], Awaitable[None]]) -> Any:
    @functools.wraps(method)
    async def handler(self: Any, request: Q, context: Context) -> None:
        ids = _ids(request)
        with log_ids(**ids):
            try:
                caller = self._access.caller(_authorization(context))
                with _span(method.__name__, ids, context):
                    await method(self, request, context, caller)
            except Exception as error:
                await abort(context, error)

    return handler


def _ids(request: Any) -> dict[str, str]:
    """What a call is about, for the log and the trace."""
    call = getattr(request, "call", request)
    return {
        "episode": getattr(call, "episode_id", ""),
        "thread": getattr(call, "thread_id", ""),
        "request": getattr(call, "idempotency_key", ""),
    }


def _span(name: str, ids: dict[str, str], context: Context) -> AbstractContextManager[object]:
    """The call's span, in its caller's trace."""
    if not ids["episode"]:
        # Connect and Status, which some ask for every other second, belong to no episode.
        return contextlib.nullcontext()
    metadata: Any = context.invocation_metadata() or ()
    return spanning(
        f"octopus.rpc.v1.Rollout/{name}",
        kind="server",
        metadata=metadata,
        episode=ids["episode"],
        thread=ids["thread"],
        request=ids["request"],
    )


class RolloutServicer(rollout_pb2_grpc.RolloutServicer):
    """One method per RPC; each converts, calls, converts."""

    def __init__(self, sessions: Sessions, max_message_bytes: int, access: Access) -> None:
        self._sessions = sessions
        self._access = access
        self._max_message_bytes = max_message_bytes
        self._losing = Background()

    async def settle(self, timeout_s: float) -> None:
        """Wait until what lost clients left behind is cleared away, for at most `timeout_s` s."""
        await self._losing.settle(timeout_s)

    @_unary
    async def Connect(self, request: pb.ConnectRequest, caller: Caller) -> pb.ConnectReply:
        if request.protocol_version != _wire.PROTOCOL_VERSION:
            raise ProtocolError(
                "client and service speak different protocol versions",
                value=f"client {request.protocol_version}",
                limit=f"service {_wire.PROTOCOL_VERSION}",
                remedy="install one release on both ends",
            )
        return _wire.info_to_proto(self._sessions.info(self._max_message_bytes))

    @_streaming
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

    @_streaming
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

    @_unary
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

    @_unary
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

    @_unary
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

    @_streaming
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

    @_unary
    async def Done(self, request: pb.DoneRequest, caller: Caller) -> pb.DoneReply:
        call = _call_from_proto(request.call, caller)
        reply = await self._sessions.done(call, request.answer, request.evidence)
        return pb.DoneReply(head=reply.head, status=reply.status)

    @_unary
    async def Cancel(self, request: pb.CancelRequest, caller: Caller) -> pb.CancelReply:
        call = _call_from_proto(request.call, caller)
        return pb.CancelReply(cancelled_threads=await self._sessions.cancel(call, request.reason))

    @_unary
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

    @_unary
    async def Status(self, request: pb.StatusRequest, caller: Caller) -> pb.StatusReply:
        return _wire.server_status_to_proto(self._sessions.status())

    def _lose(self, episode_id: str, holder: int) -> None:
        # A task of its own: the handler that notices is being cancelled.
        self._losing.begin(self._sessions.lost(episode_id, holder))


class _BearerAuth(grpc.aio.ServerInterceptor):
    """Refuses what the call's token does not hold, before its message is read."""

    def __init__(self, access: Access) -> None:
        self._access = access

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        details: Any = handler_call_details
        handler = await continuation(details)
        try:
            given = dict(details.invocation_metadata).get("authorization", "")
            self._access.caller(str(given)).require(details.method.rpartition("/")[2])
            return handler
        except AuthError as error:
            return handler and _refusing(error, streams=handler.response_streaming)


def _refusing(error: AuthError, *, streams: bool) -> Any:
    async def refuse(request: Any, context: Context) -> None:
        await abort(context, error)

    async def refuse_stream(request: Any, context: Context) -> AsyncIterator[Any]:
        await abort(context, error)
        yield

    if streams:
        return grpc.unary_stream_rpc_method_handler(refuse_stream)
    return grpc.unary_unary_rpc_method_handler(refuse)


def _authorization(context: Context) -> str:
    return str(dict(context.invocation_metadata() or ()).get("authorization", ""))


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
