"""Requests whose bytes are no message, refused as every other one is: typed, with their detail."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import grpc
from google.protobuf.message import DecodeError

from harness_sdk import _status
from harness_sdk.errors import InvalidRequest


class Decoding(grpc.aio.ServerInterceptor):
    """Parses each request itself: to what a deserialiser raises, gRPC would say UNKNOWN."""

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        handler = await continuation(handler_call_details)
        if handler is None or handler.request_deserializer is None:
            return handler
        streams = handler.response_streaming
        serving = handler.unary_stream if streams else handler.unary_unary

        def decode(data: bytes) -> Any:
            try:
                return handler.request_deserializer(data)
            except DecodeError:
                return _no_message(data, str(handler_call_details.method))

        async def serve(request: Any, context: grpc.aio.ServicerContext) -> Any:
            if isinstance(request, InvalidRequest):
                await context.abort(*_status.error_to_status(request))
            return await serving(request, context)

        if streams:
            return grpc.unary_stream_rpc_method_handler(serve, decode, handler.response_serializer)
        return grpc.unary_unary_rpc_method_handler(serve, decode, handler.response_serializer)


def _no_message(data: bytes, method: str) -> InvalidRequest:
    return InvalidRequest(
        "the request is no message of its method",
        value=f"{len(data)} bytes",
        limit=method,
        remedy="write text as UTF-8, and generate the stubs from this release's proto",
    )
