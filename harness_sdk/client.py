"""The client of one rollout replica: handshake, status, and the episodes it opens."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib import metadata
from types import TracebackType

from harness_sdk import _channel, _wire
from harness_sdk._channel import Rpc
from harness_sdk._episode_options import QueuedEvent, episode_options
from harness_sdk.episode import Episode
from harness_sdk.errors import ClientClosed, ProtocolError, Unavailable
from harness_sdk.options import RetryPolicy, Timeouts, TlsOptions
from harness_sdk.rpc.v1 import rollout_pb2 as pb
from harness_sdk.types import PRIMITIVES, Limits, SamplingOptions, ServerInfo, ServerStatus


class OctopusClient:
    """A connection to one rollout replica, used with `async with`.

    Belongs to the event loop that it is entered on; a process may hold several.

    Example:
        async with OctopusClient.connect("localhost:7040") as client:
            async with client.episode(task_id="t1") as episode:
                turn = await episode.root.generate("What is 6 times 7?")
                await episode.root.done(turn.text)
                await episode.close(reward=1.0)
    """

    def __init__(
        self,
        address: str,
        *,
        token: str | None = None,
        tls: TlsOptions | None = None,
        timeouts: Timeouts | None = None,
        retry: RetryPolicy | None = None,
        max_message_bytes: int = _wire.DEFAULT_MAX_MESSAGE_BYTES,
    ) -> None:
        self.address = address
        self._token = token
        self._tls = tls
        self._timeouts = timeouts or Timeouts()
        self._retry = retry or RetryPolicy()
        self._max_message_bytes = max_message_bytes
        self._rpc: Rpc | None = None
        self._info: ServerInfo | None = None

    @classmethod
    def connect(
        cls,
        address: str,
        *,
        token: str | None = None,
        tls: TlsOptions | None = None,
        timeouts: Timeouts | None = None,
        retry: RetryPolicy | None = None,
        max_message_bytes: int = _wire.DEFAULT_MAX_MESSAGE_BYTES,
    ) -> OctopusClient:
        """A client that shakes hands with `address` when it is entered.

        Args:
            address: "host:port", or any other gRPC target.
            token: Bearer token; sent in the clear unless `tls` is set.
            tls: Files for TLS or mutual TLS; None speaks plain text.
            timeouts: Deadlines by kind of call.
            retry: How calls are repeated while the service is unavailable.
            max_message_bytes: Largest message that this side sends or takes; the lower of this
                and the service's own limit holds.
        """
        return cls(
            address,
            token=token,
            tls=tls,
            timeouts=timeouts,
            retry=retry,
            max_message_bytes=max_message_bytes,
        )

    @property
    def info(self) -> ServerInfo:
        """What the handshake told about the replica."""
        if self._info is None:
            raise _not_connected()
        return self._info

    async def __aenter__(self) -> OctopusClient:
        """Connect.

        Raises:
            ProtocolError: The service speaks another protocol version.
            Unavailable: It cannot be reached.
            AuthError: It does not take the token.
        """
        if self._rpc is not None:
            raise ClientClosed("a client is entered once", remedy="make another with connect()")
        rpc = await self._open(self._max_message_bytes, "client")
        try:
            reply = await self._handshake(rpc)
            limit = reply.max_message_bytes
            if 0 < limit < self._max_message_bytes:
                await rpc.close()
                rpc = await self._open(limit, "server")
        except BaseException:
            await rpc.close()
            raise
        self._rpc, self._info = rpc, _wire.info_from_proto(reply)
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Cancel outstanding calls and disconnect; the service closes open episodes as lost."""
        if self._rpc is not None:
            await self._rpc.close()

    async def status(self) -> ServerStatus:
        """The replica's state now."""
        reply = await self._connected().unary(
            _channel.STATUS, pb.StatusRequest(), self._timeouts.call_s
        )
        return _wire.server_status_from_proto(reply)

    def episode(
        self,
        *,
        task_id: str = "",
        group_id: str = "",
        episode_id: str | None = None,
        limits: Limits | None = None,
        primitives: Sequence[str] = PRIMITIVES,
        version_policy: str = "keep",
        run: str = "",
        sampling: SamplingOptions | None = None,
        on_queued: Callable[[QueuedEvent], None] | None = None,
    ) -> Episode:
        """An episode that opens when it is entered.

        Args:
            task_id: What the episode is about; goes into its record.
            group_id: Episodes of one task that are compared with each other.
            episode_id: Its id; None draws one.
            limits: Budgets; None takes the service's.
            primitives: Branching tools that the model is offered.
            version_policy: `keep` finishes on the policy that it began with, `refresh` takes the
                newest before each turn.
            run: Name of the run; empty takes the service's.
            sampling: What its turns take that say nothing else.
            on_queued: Called while the episode waits for admission.
        """
        options = episode_options(
            task_id=task_id,
            group_id=group_id,
            episode_id=episode_id,
            limits=limits,
            primitives=primitives,
            version_policy=version_policy,
            run=run,
            sampling=sampling,
            on_queued=on_queued,
        )
        return Episode(self._connected(), self._timeouts, options)

    async def _open(self, max_message_bytes: int, limiting_side: str) -> Rpc:
        channel = await _channel.open_channel(
            self.address, tls=self._tls, max_message_bytes=max_message_bytes
        )
        return Rpc(
            channel,
            token=self._token,
            retry=self._retry,
            max_message_bytes=max_message_bytes,
            limiting_side=limiting_side,
        )

    async def _handshake(self, rpc: Rpc) -> pb.ConnectReply:
        request = pb.ConnectRequest(
            protocol_version=_wire.PROTOCOL_VERSION, client=f"harness_sdk {_release()}"
        )
        try:
            reply = await rpc.unary(_channel.CONNECT, request, self._timeouts.connect_s)
        except Unavailable as error:
            if error.value:
                raise
            raise Unavailable(
                "the rollout service cannot be reached",
                value=f"{self.address}: {error.message}",
                remedy="start it with `octopus up`, or give the address that it prints",
            ) from error
        if reply.protocol_version != _wire.PROTOCOL_VERSION:
            raise ProtocolError(
                "the service speaks another protocol version",
                value=reply.protocol_version,
                limit=_wire.PROTOCOL_VERSION,
                remedy="use the SDK and the service of one release",
            )
        return reply

    def _connected(self) -> Rpc:
        if self._rpc is None:
            raise _not_connected()
        self._rpc.check_open()
        return self._rpc


def _release() -> str:
    for distribution in ("octopus-agents", "octopus-agents-sdk"):
        try:
            return metadata.version(distribution)
        except metadata.PackageNotFoundError:
            continue
    return "unknown"


def _not_connected() -> ClientClosed:
    return ClientClosed(
        "the client is not connected",
        remedy="enter it with `async with OctopusClient.connect(...)`",
    )
