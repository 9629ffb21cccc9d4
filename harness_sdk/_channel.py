"""One gRPC channel to one replica: credentials, limits, deadlines, and errors made typed.

Knows the methods of the wire, nothing of episodes.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, TypeVar, cast

import grpc
import grpc.aio
from google.protobuf.message import Message

from harness_sdk._status import error_from_rpc, message_too_large
from harness_sdk.errors import ClientClosed, ConfigError
from harness_sdk.options import RetryPolicy, TlsOptions
from harness_sdk.retry import call_with_retry
from harness_sdk.rpc.v1 import rollout_pb2 as pb
from harness_sdk.tracing import Metadata

Q = TypeVar("Q", bound=Message)
R = TypeVar("R", bound=Message)

_MAX_PORT = 65_535

# A connection whose peer answers no ping is given up: that is how a silent `wait` ends when the
# service's machine is gone.
_CLIENT_OPTIONS: tuple[tuple[str, int], ...] = (
    ("grpc.keepalive_time_ms", 20_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    # Of the pings by which gRPC measures: keepalive sends none while one of them is unanswered.
    ("grpc.http2.ping_timeout_ms", 30_000),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 5000),
    # Repeats are ours: they carry an idempotency key and obey RetryPolicy.
    ("grpc.enable_retries", 0),
    # Clients of one process must not share a connection: closing one would cut the other's.
    ("grpc.use_local_subchannel_pool", 1),
)


@dataclass(frozen=True, slots=True)
class Method(Generic[Q, R]):
    """One RPC of the service."""

    name: str
    request: type[Q]
    reply: type[R]

    @property
    def path(self) -> str:
        """Its HTTP/2 path."""
        return f"/octopus.rpc.v1.Rollout/{self.name}"


CONNECT = Method("Connect", pb.ConnectRequest, pb.ConnectReply)
OPEN_EPISODE = Method("OpenEpisode", pb.OpenEpisodeRequest, pb.EpisodeEvent)
GENERATE = Method("Generate", pb.GenerateRequest, pb.GenerateEvent)
FORK = Method("Fork", pb.ForkRequest, pb.ForkReply)
REWIND = Method("Rewind", pb.RewindRequest, pb.RewindReply)
READ_THREAD = Method("ReadThread", pb.ReadThreadRequest, pb.ReadThreadReply)
WAIT = Method("Wait", pb.WaitRequest, pb.WaitEvent)
DONE = Method("Done", pb.DoneRequest, pb.DoneReply)
CANCEL = Method("Cancel", pb.CancelRequest, pb.CancelReply)
CLOSE_EPISODE = Method("CloseEpisode", pb.CloseEpisodeRequest, pb.CloseEpisodeReply)
STATUS = Method("Status", pb.StatusRequest, pb.StatusReply)


class Rpc:
    """Calls on one channel.

    Every failure is a `harness_sdk.errors` class; cancelling the caller cancels the call.
    """

    def __init__(
        self,
        channel: grpc.aio.Channel,
        *,
        token: str | None,
        retry: RetryPolicy,
        max_message_bytes: int,
        limiting_side: str,
    ) -> None:
        self._channel = channel
        self._metadata = (("authorization", f"Bearer {token}"),) if token else ()
        self._retry = retry
        self._max_message_bytes = max_message_bytes
        self._limiting_side = limiting_side
        self._closed = False

    async def unary(
        self,
        method: Method[Q, R],
        request: Q,
        timeout_s: float | None,
        metadata: Metadata = (),
    ) -> R:
        """Call `method` until it answers, within `timeout_s` seconds."""
        self._check(request)

        async def attempt(left_s: float | None) -> R:
            call = self._channel.unary_unary(
                method.path, method.request.SerializeToString, method.reply.FromString
            )(request, timeout=left_s, metadata=(*self._metadata, *metadata))
            try:
                return await call
            except grpc.aio.AioRpcError as error:
                raise error_from_rpc(error) from error
            except asyncio.CancelledError:
                self._check_cancelled_by_close()
                raise

        return await call_with_retry(attempt, self._retry, timeout_s)

    async def stream(
        self,
        method: Method[Q, R],
        request: Q,
        timeout_s: float | None,
        metadata: Metadata = (),
    ) -> AsyncGenerator[R, None]:
        """The messages of one call; it is repeated only while none has come.

        Close the generator (`contextlib.aclosing`) to cancel the call at once.
        """
        self._check(request)

        async def first(left_s: float | None) -> tuple[AsyncGenerator[R, None], R | None]:
            replies = self._replies(method, request, left_s, metadata)
            return replies, await anext(replies, None)

        replies, reply = await call_with_retry(first, self._retry, timeout_s)
        try:
            while reply is not None:
                yield reply
                reply = await anext(replies, None)
        finally:
            await replies.aclose()

    def check_open(self) -> None:
        """Raise `ClientClosed` once the channel is closed."""
        if self._closed:
            raise _closed_error()

    async def close(self) -> None:
        """Cancel every call and close the channel."""
        self._closed = True
        await self._channel.close()

    async def _replies(
        self, method: Method[Q, R], request: Q, timeout_s: float | None, metadata: Metadata
    ) -> AsyncGenerator[R, None]:
        call = self._channel.unary_stream(
            method.path, method.request.SerializeToString, method.reply.FromString
        )(request, timeout=timeout_s, metadata=(*self._metadata, *metadata))
        # Left open, it and the call hold each other until a full collection.
        messages = cast("AsyncGenerator[R, None]", aiter(call))
        try:
            async with contextlib.aclosing(messages):
                async for reply in messages:
                    yield reply
        except grpc.aio.AioRpcError as error:
            raise error_from_rpc(error) from error
        except asyncio.CancelledError:
            self._check_cancelled_by_close()
            raise
        finally:
            call.cancel()

    def _check(self, request: Message) -> None:
        self.check_open()
        size = request.ByteSize()
        if size > self._max_message_bytes:
            raise message_too_large(self._limiting_side, size, self._max_message_bytes)

    def _check_cancelled_by_close(self) -> None:
        # grpc raises CancelledError in callers whose channel was closed; only a task that was
        # itself asked to stop may see one.
        task = asyncio.current_task()
        if self._closed and (task is None or task.cancelling() == 0):
            raise _closed_error()


async def open_channel(
    address: str, *, tls: TlsOptions | None, max_message_bytes: int
) -> grpc.aio.Channel:
    """A channel to `address`; it connects with the first call.

    Raises:
        ConfigError: The address is no host and port, or a TLS file cannot be read.
    """
    _check_address(address)
    options = [
        *_CLIENT_OPTIONS,
        ("grpc.max_send_message_length", max_message_bytes),
        ("grpc.max_receive_message_length", max_message_bytes),
    ]
    if tls is None:
        return grpc.aio.insecure_channel(address, options)
    ca, key, cert = [await _pem(path) for path in (tls.ca_file, tls.key_file, tls.cert_file)]
    credentials = grpc.ssl_channel_credentials(ca, key, cert)
    named = [("grpc.ssl_target_name_override", tls.server_name)] if tls.server_name else []
    return grpc.aio.secure_channel(address, credentials, [*options, *named])


def _check_address(address: str) -> None:
    """gRPC takes 443 where no port is given, and a port past 65535 modulo 65536."""
    if not address or address.isspace():
        raise ConfigError("the address is empty", remedy='give "host:port"')
    target = address.removeprefix("dns:///")
    host, _, port = target.rpartition(":")
    is_port = port.isdecimal() and 0 < int(port) <= _MAX_PORT
    if not host or not is_port or "://" in target:
        raise ConfigError(
            "the address is not a host and a port",
            value=address,
            limit=f"host:port, ports 1 to {_MAX_PORT}, without a scheme",
            remedy="give it as `octopus up` and `octopus rollout` print it",
        )


async def _pem(path: str | None) -> bytes | None:
    if path is None:
        return None
    try:
        return await asyncio.to_thread(Path(path).read_bytes)
    except OSError as error:
        raise ConfigError(
            "cannot read a TLS file", value=path, remedy=f"check the path: {error.strerror}"
        ) from error


def _closed_error() -> ClientClosed:
    return ClientClosed(
        "the client is closed", remedy="open another with `async with OctopusClient.connect(...)`"
    )
