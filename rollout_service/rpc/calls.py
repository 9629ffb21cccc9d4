"""What every call has: who calls, what it is about, and errors as statuses."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
from collections.abc import Awaitable, Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any, NoReturn, TypeVar

import grpc

from harness_sdk import _status
from harness_sdk.errors import EngineError, HarnessError
from harness_sdk.log_ids import log_ids
from harness_sdk.tracing import is_traced, spanning
from rollout_service.access import Access, Caller
from rollout_service.client_limits import ClientLimits, client_name

logger = logging.getLogger(__name__)

Q = TypeVar("Q")
R = TypeVar("R")
Context = grpc.aio.ServicerContext


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


class Desk:
    """Lets calls in.

    Args:
        access: The tokens.
        limits: What each client may ask at a time.
    """

    def __init__(self, access: Access, limits: ClientLimits) -> None:
        self._access = access
        self._limits = limits

    @contextlib.contextmanager
    def admitted(self, name: str, request: Any, context: Context) -> Iterator[Caller]:
        """Around a call: yields who calls.

        Raises:
            AuthError: The token is nobody's.
            TooManyCalls: The client has asked for too much.
        """
        # Metadata is copied at each look.
        caller = self._access.caller("" if self._access.is_open else _authorization(context))
        client = client_name(caller, context.peer())
        with self._limits.call(client, name), _span(name, call_ids(request), context):
            yield caller


def unary(method: Callable[[Any, Q, Caller], Awaitable[R]]) -> Any:
    """A handler of one reply; its object has a `desk`."""

    @functools.wraps(method)
    async def handler(self: Any, request: Q, context: Context) -> R:
        with log_ids(**call_ids(request)):
            try:
                with self.desk.admitted(method.__name__, request, context) as caller:
                    return await method(self, request, caller)
            except Exception as error:
                await abort(context, error)

    return handler


def streaming(method: Callable[[Any, Q, Context, Caller], Awaitable[None]]) -> Any:
    """A handler that writes its replies to the context; its object has a `desk`."""

    @functools.wraps(method)
    async def handler(self: Any, request: Q, context: Context) -> None:
        with log_ids(**call_ids(request)):
            try:
                with self.desk.admitted(method.__name__, request, context) as caller:
                    await method(self, request, context, caller)
            except Exception as error:
                await abort(context, error)

    return handler


def call_ids(request: Any) -> dict[str, str]:
    """What a call is about, for the log and the trace."""
    call = getattr(request, "call", request)
    return {
        "episode": getattr(call, "episode_id", ""),
        "thread": getattr(call, "thread_id", ""),
        "request": getattr(call, "idempotency_key", ""),
    }


def _span(name: str, ids: dict[str, str], context: Context) -> AbstractContextManager[object]:
    """The call's span, in its caller's trace."""
    # Connect and Status, which some ask for every other second, belong to no episode.
    if not ids["episode"] or not is_traced():
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


def _authorization(context: Context) -> str:
    return str(dict(context.invocation_metadata() or ()).get("authorization", ""))
