"""The HTTP server: routes, the token, errors as JSON, and its own start and stop."""

from __future__ import annotations

import asyncio
import ssl

from aiohttp import web
from aiohttp.typedefs import Handler, Middleware

from harness_sdk._cancellation import end
from harness_sdk.errors import ConfigError
from harness_sdk.web_origin import is_loopback, refused_because
from rollout_service.access import Access
from rollout_service.client_limits import ClientLimits, client_name
from rollout_service.openai.conversations import Conversations
from rollout_service.openai.endpoint import Endpoint
from rollout_service.openai.errors import (
    BodyTooLarge,
    as_harness_error,
    error_json,
    http_status,
)
from rollout_service.sessions import Sessions

_MAX_BODY_BYTES = 64 * 1024 * 1024


class RunningOpenAI:
    """A started endpoint; `stop` ends its requests and then itself."""

    def __init__(
        self,
        runner: web.AppRunner,
        conversations: Conversations,
        *,
        address: str,
        scheme: str,
        grace_s: float,
    ) -> None:
        self._runner = runner
        self._conversations = conversations
        self._sweeping = asyncio.create_task(conversations.sweep())
        self._grace_s = grace_s
        self.address = address
        """host:port that it is bound to."""
        self.url = f"{scheme}://{address}/v1"
        """What clients take as `base_url`."""

    async def stop(self) -> None:
        """Take no more requests and end those that run; sessions are the service's to close."""
        await end(self._sweeping)
        await self._runner.cleanup()
        await self._conversations.settle(self._grace_s)


async def serve_openai(
    sessions: Sessions,
    *,
    host: str = "127.0.0.1",
    port: int = 0,
    max_body_bytes: int = _MAX_BODY_BYTES,
    access: Access | None = None,
    limits: ClientLimits | None = None,
    tls: ssl.SSLContext | None = None,
    max_threads: int = 100,
    idle_s: float = 900.0,
    spare_s: float = 30.0,
    stall_s: float = 120.0,
    grace_s: float = 1.0,
) -> RunningOpenAI:
    """Start serving `sessions` over HTTP.

    Args:
        sessions: The episodes.
        host: Address to bind.
        port: Port to bind; 0 takes a free one.
        max_body_bytes: Largest body of a request.
        access: Tokens, the API keys, one of which every request must carry; None asks for none.
        limits: What each client may ask at a time; None sets no limit.
        tls: Certificates; None serves plain HTTP.
        max_threads: Branches of a session.
        idle_s: Seconds without a request after which a session is closed.
        spare_s: The same for one that nobody named, while new ones wait for room in the pool.
        stall_s: Seconds that a client has to send its body, and to take a piece of a stream.
        grace_s: Seconds that running requests have at a stop.

    Raises:
        ConfigError: The address cannot be bound.
    """
    access = access or Access()
    conversations = Conversations(sessions, max_threads=max_threads, idle_s=idle_s, spare_s=spare_s)
    endpoint = Endpoint(
        sessions,
        conversations,
        sessions.info(max_body_bytes).model,
        access=access,
        stall_s=stall_s,
    )
    # The first is the outermost.
    admitted = _admitted(access, limits or ClientLimits())
    middlewares = [_errors_as_json, _own_origin(host), admitted]
    app = web.Application(client_max_size=max_body_bytes, middlewares=middlewares)
    app.add_routes(endpoint.routes())
    # A client that goes away cancels its handler, and with it the generation.
    runner = web.AppRunner(
        app, handler_cancellation=True, shutdown_timeout=grace_s, access_log=None
    )
    await runner.setup()
    try:
        await web.TCPSite(runner, host, port, ssl_context=tls).start()
    except OSError as error:
        await runner.cleanup()
        raise ConfigError(
            "the OpenAI endpoint cannot bind its address",
            value=f"{host}:{port}",
            remedy="free the port or choose another one with --openai.port",
        ) from error
    shown = f"[{host}]" if ":" in host else host
    return RunningOpenAI(
        runner,
        conversations,
        address=f"{shown}:{runner.addresses[0][1]}",
        scheme="http" if tls is None else "https",
        grace_s=grace_s,
    )


@web.middleware
async def _errors_as_json(request: web.Request, handler: Handler) -> web.StreamResponse:
    """The one place where errors become responses."""
    try:
        return await handler(request)
    except web.HTTPRequestEntityTooLarge as error:
        wrong = BodyTooLarge(
            "the body is larger than the service accepts",
            value=f"{request.content_length} bytes",
            limit=f"{request.client_max_size} bytes",
            remedy="shorten the messages or raise --server.max-message-bytes",
        )
        return web.json_response(error_json(wrong), status=error.status)
    except web.HTTPException as error:
        shown = {"message": f"{error.reason}: {request.method} {request.path}", "param": None}
        whole = {"error": {**shown, "type": "invalid_request_error", "code": "unknown_url"}}
        return web.json_response(whole, status=error.status)
    except Exception as error:
        wrong = as_harness_error(error)
        return web.json_response(error_json(wrong), status=http_status(wrong))


def _own_origin(bound: str) -> Middleware:
    """Without a token nothing else would keep the web pages of this machine's browser out."""

    @web.middleware
    async def check(request: web.Request, handler: Handler) -> web.StreamResponse:
        refused = refused_because(request.headers, bound=bound) if is_loopback(bound) else ""
        if refused:
            raise web.HTTPForbidden(reason=refused)
        return await handler(request)

    return check


def _admitted(access: Access, limits: ClientLimits) -> Middleware:
    """Lets in who has a token, and no more requests of a client than it may have at a time."""

    @web.middleware
    async def check(request: web.Request, handler: Handler) -> web.StreamResponse:
        caller = access.caller(request.headers.get("Authorization", ""))
        call = "CloseEpisode" if request.path.endswith("/close") else "Generate"
        if request.method == "POST":
            caller.require(call)
        with limits.call(client_name(caller, request.remote or ""), call):
            return await handler(request)

    return check
