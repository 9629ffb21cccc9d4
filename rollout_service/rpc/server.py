"""The server's start and stop: its address, options, certificates, and who is let in."""

from __future__ import annotations

import asyncio
import logging

import grpc

from harness_sdk import _wire
from harness_sdk.errors import ConfigError
from harness_sdk.rpc.v1 import rollout_pb2_grpc
from rollout_service.access import Access
from rollout_service.client_limits import ClientLimits
from rollout_service.rpc.auth import BearerAuth
from rollout_service.rpc.calls import Desk
from rollout_service.rpc.decoding import Decoding
from rollout_service.rpc.health import health_handler
from rollout_service.rpc.servicer import RolloutServicer
from rollout_service.sessions import Sessions

logger = logging.getLogger(__name__)

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


async def serve(
    sessions: Sessions,
    *,
    host: str = "127.0.0.1",
    port: int = 0,
    max_message_bytes: int = _wire.DEFAULT_MAX_MESSAGE_BYTES,
    access: Access | None = None,
    limits: ClientLimits | None = None,
    tls: grpc.ServerCredentials | None = None,
) -> RunningServer:
    """Start serving `sessions`.

    Args:
        sessions: The episodes.
        host: Address to bind.
        port: Port to bind; 0 takes a free one.
        max_message_bytes: Largest message in either direction.
        access: Tokens, one of which every call must carry; None asks for none.
        limits: What each client may ask at a time; None sets no limit.
        tls: Certificates; None serves plain text.

    Raises:
        ConfigError: The address cannot be bound.
    """
    access = access or Access()
    server = grpc.aio.server(
        interceptors=[] if access.is_open else [BearerAuth(access)],
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
    desk = Desk(access, limits or ClientLimits())
    servicer = RolloutServicer(sessions, max_message_bytes, desk)
    rollout_pb2_grpc.add_RolloutServicer_to_server(servicer, Decoding(server))
    server.add_generic_rpc_handlers((health_handler(lambda: sessions.is_serving),))
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
