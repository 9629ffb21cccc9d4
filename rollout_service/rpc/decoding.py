"""Requests whose bytes are no message, refused as every other one is: typed, with their detail."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import grpc
from google.protobuf.message import DecodeError

from harness_sdk import _status
from harness_sdk.errors import InvalidRequest


class Decoding:
    """Stands for `server` while a service is added to it: its methods parse requests themselves.

    To what a deserialiser raises, gRPC would say UNKNOWN. An interceptor could do the same, anew
    at each call.
    """

    def __init__(self, server: grpc.aio.Server) -> None:
        self._server = server

    def add_generic_rpc_handlers(self, handlers: object) -> None:
        """Stubs tell their handlers twice: see below."""

    def add_registered_method_handlers(self, service: str, handlers: Mapping[str, Any]) -> None:
        """Add a service's methods."""
        decoded = {name: _decoded(f"/{service}/{name}", each) for name, each in handlers.items()}
        handler = grpc.method_handlers_generic_handler(service, decoded)
        self._server.add_generic_rpc_handlers((handler,))


def _decoded(method: str, handler: Any) -> Any:
    streams = handler.response_streaming
    serving = handler.unary_stream if streams else handler.unary_unary

    def decode(data: bytes) -> Any:
        try:
            return handler.request_deserializer(data)
        except DecodeError:
            return _no_message(data, method)

    async def serve(request: Any, context: grpc.aio.ServicerContext) -> Any:
        if isinstance(request, InvalidRequest):
            await context.abort(*_status.error_to_status(request))
        return await serving(request, context)

    make = grpc.unary_stream_rpc_method_handler if streams else grpc.unary_unary_rpc_method_handler
    return make(serve, decode, handler.response_serializer)


def _no_message(data: bytes, method: str) -> InvalidRequest:
    return InvalidRequest(
        "the request is no message of its method",
        value=f"{len(data)} bytes",
        limit=method,
        remedy="write text as UTF-8, and generate the stubs from this release's proto",
    )
