"""Bytes from and to a client: its whole body, and events as they come; one that stalls is left."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncGenerator
from typing import Any

from aiohttp import web

from harness_sdk.errors import DeadlineExceeded
from rollout_service.openai.ask import Placed
from rollout_service.openai.errors import ParameterError, as_harness_error, error_json

SESSION_HEADER = "X-Octopus-Session"

Events = AsyncGenerator[Placed | dict[str, Any], None]


async def received(request: web.Request, stall_s: float) -> bytes:
    """The body.

    Args:
        request: The request.
        stall_s: Seconds that the client has to send it.

    Raises:
        DeadlineExceeded: It did not.
        ParameterError: Its Content-Encoding is not what it is encoded in.
    """
    try:
        async with asyncio.timeout(stall_s):
            return await request.read()
    except web.RequestPayloadError as error:
        raise ParameterError("the body cannot be decoded", value=error) from error
    except TimeoutError as error:
        raise DeadlineExceeded(
            "the body did not arrive in time",
            value=f"{request.content_length} bytes",
            limit=f"{stall_s:g} s",
            remedy="send the whole body at once",
        ) from error


async def stream(
    request: web.Request, events: Events, *, stall_s: float, ends_with: str = ""
) -> web.StreamResponse:
    """Write `events` as they come; an error before the first is an ordinary response.

    Args:
        request: The request.
        events: What is said; closed at the end, which cancels what still runs.
        stall_s: Seconds that the client has to take an event.
        ends_with: Data of one event more.
    """
    response = web.StreamResponse(
        headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"}
    )
    # A connection that is gone, or given up here, ends the events and nothing else.
    with contextlib.suppress(ConnectionError):
        async with contextlib.aclosing(events):
            await _write_events(request, response, events, stall_s)
        if ends_with:
            await _write(request, response, f"data: {ends_with}\n\n".encode(), stall_s)
        await response.write_eof()
    return response


async def _write_events(
    request: web.Request, response: web.StreamResponse, events: Events, stall_s: float
) -> None:
    try:
        async for event in events:
            if isinstance(event, Placed):
                response.headers[SESSION_HEADER] = event.session
                continue
            if not response.prepared:
                await response.prepare(request)
            await _write(request, response, _sse(event), stall_s)
    except ConnectionError:
        raise
    except Exception as error:
        if not response.prepared:
            raise
        failure = {"type": "error", **error_json(as_harness_error(error))}
        await _write(request, response, _sse(failure), stall_s)


async def _write(
    request: web.Request, response: web.StreamResponse, data: bytes, stall_s: float
) -> None:
    """Raises ConnectionError where the client is gone, or takes nothing and is cut off."""
    try:
        async with asyncio.timeout(stall_s):
            await response.write(data)
    except TimeoutError as error:
        if request.transport is not None:
            request.transport.abort()
        raise ConnectionResetError("the client has stopped reading") from error


def _sse(event: dict[str, Any]) -> bytes:
    name = f"event: {event['type']}\n" if "type" in event else ""
    return f"{name}data: {json.dumps(event, ensure_ascii=False)}\n\n".encode("utf-8", "replace")
