"""What callers connect to: the gRPC server and the OpenAI endpoint, with their tokens and TLS."""

from __future__ import annotations

import asyncio
import ssl
from pathlib import Path
from typing import TYPE_CHECKING

import grpc

from harness_sdk.errors import ConfigError
from rollout_service.access import Access, read_tokens
from rollout_service.client_limits import ClientLimits
from rollout_service.config import RolloutConfig
from rollout_service.rpc import RunningServer, serve
from rollout_service.sessions import Sessions

if TYPE_CHECKING:
    from rollout_service.openai import RunningOpenAI


async def open_server(
    config: RolloutConfig, sessions: Sessions, limits: ClientLimits
) -> RunningServer:
    server = config.server
    return await serve(
        sessions,
        host=server.host,
        port=server.port,
        max_message_bytes=server.max_message_bytes,
        access=await asyncio.to_thread(_access, config),
        limits=limits,
        tls=await asyncio.to_thread(_server_credentials, config),
    )


async def open_openai(
    config: RolloutConfig, port: int, sessions: Sessions, limits: ClientLimits
) -> RunningOpenAI:
    from rollout_service.openai import serve_openai

    server = config.server
    return await serve_openai(
        sessions,
        host=server.host,
        port=port,
        max_body_bytes=server.max_message_bytes,
        access=await asyncio.to_thread(_access, config),
        limits=limits,
        tls=await asyncio.to_thread(_ssl_context, config),
        max_threads=config.openai.max_threads,
        idle_s=config.openai.idle_s,
        grace_s=server.grace_s,
    )


def _access(config: RolloutConfig) -> Access:
    server = config.server
    shared = server.token.get_secret_value() if server.token is not None else None
    return Access(shared, read_tokens(server.tokens) if server.tokens is not None else ())


def _ssl_context(config: RolloutConfig) -> ssl.SSLContext | None:
    server = config.server
    if server.tls_cert is None or server.tls_key is None:
        return None
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    try:
        context.load_cert_chain(server.tls_cert, server.tls_key)
        if server.tls_client_ca is not None:
            context.load_verify_locations(server.tls_client_ca)
            context.verify_mode = ssl.CERT_REQUIRED
    except OSError as error:
        raise ConfigError(
            "cannot use the TLS files for the OpenAI endpoint",
            value=f"{server.tls_cert}, {server.tls_key}, {server.tls_client_ca}",
            remedy=f"check them: {error}",
        ) from error
    return context


def _server_credentials(config: RolloutConfig) -> grpc.ServerCredentials | None:
    server = config.server
    if server.tls_cert is None or server.tls_key is None:
        return None
    pair = (_pem(server.tls_key), _pem(server.tls_cert))
    client_ca = _pem(server.tls_client_ca) if server.tls_client_ca is not None else None
    return grpc.ssl_server_credentials(
        [pair], root_certificates=client_ca, require_client_auth=client_ca is not None
    )


def _pem(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise ConfigError(
            "cannot read a TLS file", value=path, remedy=f"check the path: {error.strerror}"
        ) from error
