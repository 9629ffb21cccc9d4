"""Tokens, looked at before a call's message is read."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import grpc

from harness_sdk.errors import AuthError
from rollout_service.access import Access
from rollout_service.rpc.calls import Context, abort
from rollout_service.rpc.health import HEALTH


class BearerAuth(grpc.aio.ServerInterceptor):
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
        if details.method.startswith(f"/{HEALTH}/"):
            # Those who ask it have no token, and learn whether the replica serves.
            return handler
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
