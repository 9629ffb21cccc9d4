"""The health check that orchestrators ask, `grpc.health.v1`: whether the replica serves."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

import grpc

HEALTH = "grpc.health.v1.Health"
_POLL_S = 0.2
_MAX_WATCHES = 64
"""Streams at a time: they need no token, so they count for no client."""
_SERVING, _NOT_SERVING = b"\x08\x01", b"\x08\x02"
"""HealthCheckResponse: field 1, a status. The one message is not worth a package."""


def health_handler(is_serving: Callable[[], bool]) -> grpc.GenericRpcHandler:
    """`Check` and `Watch` of every service name, all of which are the replica."""

    def status() -> bytes:
        return _SERVING if is_serving() else _NOT_SERVING

    async def check(request: bytes, context: Any) -> bytes:
        return status()

    num_watches = 0

    async def watch(request: bytes, context: Any) -> AsyncIterator[bytes]:
        nonlocal num_watches
        if num_watches >= _MAX_WATCHES:
            await context.abort(
                grpc.StatusCode.RESOURCE_EXHAUSTED,
                f"{num_watches} Watch streams are open, limit {_MAX_WATCHES}; call Check instead",
            )
        num_watches += 1
        try:
            told = b""
            while True:
                now = status()
                if now != told:
                    told = now
                    yield now
                await asyncio.sleep(_POLL_S)
        finally:
            num_watches -= 1

    return grpc.method_handlers_generic_handler(
        HEALTH,
        {
            "Check": grpc.unary_unary_rpc_method_handler(check),
            "Watch": grpc.unary_stream_rpc_method_handler(watch),
        },
    )
