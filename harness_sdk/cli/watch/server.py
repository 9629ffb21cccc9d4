"""The page's HTTP server: GET alone, no cookies, nothing from elsewhere, server-sent events.

Whoever reaches it may read, but no web page of another site: see `harness_sdk.web_origin`.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import importlib
import json
import time
from collections.abc import AsyncGenerator, Callable
from importlib.resources import files
from pathlib import Path
from typing import Any

from aiohttp import web
from aiohttp.typedefs import Handler, Middleware

from harness_sdk._cancellation import end
from harness_sdk.cli.watch.board import BROKER, REDIS, REPLICAS, Board, Source
from harness_sdk.cli.watch.episodes import Episodes
from harness_sdk.cli.watch.page import page_html
from harness_sdk.cli.watch.panes import episode_rows, panes
from harness_sdk.cli.watch.texts import Texts
from harness_sdk.errors import ConfigError, HarnessError, ResourceExhausted
from harness_sdk.masking import masked_url
from harness_sdk.options import TlsOptions
from harness_sdk.view.svg import STYLE
from harness_sdk.web_origin import refused_because

MAX_PAGES = 32
"""Open pages that get events."""
_BEAT_S = 2.0
"""Longest silence between two events."""
_PAUSE_S = 0.25
"""Shortest time between two events."""
_STALL_S = 20.0
"""A page that takes nothing for so long is hung up on; it comes back by itself."""
_STOP_S = 0.5
_ROWS_AT_ONCE = 500

_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; "
    "connect-src 'self'; img-src 'self'; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cache-Control": "no-store",
}
_ICON = (
    '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 16 16"><path d="M2 8h5l5-5M7 8l5 5" '
    'fill="none" stroke="#1d9e86" stroke-width="2"/></svg>'
)


@contextlib.asynccontextmanager
async def watching(
    run: str,
    *,
    redis_url: str | None,
    mqtt_url: str | None,
    tokenizer: Path | None = None,
    host: str = "127.0.0.1",
    port: int = 0,
    max_episodes: int = 1000,
    token: str | None = None,
    tls: TlsOptions | None = None,
) -> AsyncGenerator[str]:
    """Serve the page of `run` while the block runs; yields its address.

    Args:
        run: Name of the run.
        redis_url: Address of Redis; None shows neither episodes nor steps.
        mqtt_url: Address of the MQTT broker; None shows no replicas.
        tokenizer: A `tokenizer.json` or a folder that holds one; None shows ids.
        host: Address to bind.
        port: Port to bind; 0 takes a free one.
        max_episodes: Newest episodes kept.
        token: Bearer token of the replicas; None gives none.
        tls: How the replicas are reached; None speaks plain text.

    Raises:
        ConfigError: The address cannot be bound, or there is no tokenizer.
    """
    board = Board(run=run, episodes=Episodes(max_episodes))
    app = web.Application(middlewares=[_answers(host)])
    app.add_routes(_Page(board, Texts(tokenizer)).routes())
    runner = web.AppRunner(
        app, handler_cancellation=True, shutdown_timeout=_STOP_S, access_log=None
    )
    await runner.setup()
    try:
        await web.TCPSite(runner, host, port).start()
    except OSError as error:
        await runner.cleanup()
        raise ConfigError(
            "the page cannot bind its address",
            value=f"{host}:{port}",
            remedy="free the port, or choose another one; 0 takes a free one",
        ) from error
    tasks = _follow(board, redis_url, mqtt_url, token, tls)
    try:
        shown = f"[{host}]" if ":" in host else host
        yield f"http://{shown}:{runner.addresses[0][1]}/"
    finally:
        for task in tasks:
            await end(task)
        await runner.cleanup()


def _follow(
    board: Board,
    redis_url: str | None,
    mqtt_url: str | None,
    token: str | None,
    tls: TlsOptions | None,
) -> list[asyncio.Task[None]]:
    wanted: list[tuple[str, str, str, tuple[Any, ...]]] = []
    if redis_url:
        wanted.append((REDIS, redis_url, "follow_streams", (redis_url,)))
    if mqtt_url:
        wanted.append((BROKER, mqtt_url, "follow_bus", (mqtt_url,)))
        wanted.append((REPLICAS, "", "follow_replicas", (token, tls)))
    for name, url, _, _ in wanted:
        board.sources[name] = Source(name=name, address=masked_url(url))
    return [
        asyncio.create_task(_keep(board, name, follow, options))
        for name, _, follow, options in wanted
    ]


async def _keep(board: Board, name: str, follow: str, options: tuple[Any, ...]) -> None:
    # The clients of Redis and MQTT take longer to import than the page to listen.
    try:
        sources = await asyncio.to_thread(importlib.import_module, "harness_sdk.cli.watch.sources")
    except ImportError as error:
        board.lost(name, f"{error}; pip install 'octopus-agents[rollout]'")
        return
    await sources.keep_following(
        board, name, functools.partial(getattr(sources, follow), board, *options)
    )


class _Page:
    """The answers to each address."""

    def __init__(self, board: Board, texts: Texts) -> None:
        self._board = board
        self._texts = texts
        # Parsing and decoding go one after the other: many windows cannot pile them up.
        self._reading = asyncio.Lock()
        self._drawn: tuple[int, dict[str, str]] = (-1, {})

    def routes(self) -> list[web.RouteDef]:
        """GET, and HEAD with it; anything else is refused."""
        view, own = files("harness_sdk.view"), files("harness_sdk.cli.watch")

        def text(*parts: Any) -> str:
            return "".join(part.read_text("utf-8") for part in parts)

        fixed = {
            "/": ("text/html", page_html(self._board.run)),
            "/watch.css": ("text/css", text(view / "page.css", own / "watch.css") + STYLE),
            "/watch.js": ("text/javascript", text(view / "episode.js", own / "watch.js")),
            "/icon.svg": ("image/svg+xml", _ICON),
        }
        return [
            *(web.get(path, _fixed(kind, body)) for path, (kind, body) in fixed.items()),
            web.get("/events", self._events),
            web.get(r"/episodes/{entry:\d+-\d+}", self._episode),
            web.get(r"/episodes/{entry:\d+-\d+}/nodes/{node:\d+}", self._tokens),
        ]

    async def _episode(self, request: web.Request) -> web.Response:
        entry = request.match_info["entry"]
        return _json_response(await self._one_by_one(lambda: self._read(entry)))

    async def _tokens(self, request: web.Request) -> web.Response:
        entry, node = request.match_info["entry"], int(request.match_info["node"])
        begin, stop = (_number(request, name) for name in ("begin", "end"))

        def read() -> dict[str, Any]:
            record = self._board.episodes.record(entry)
            return self._texts.tokens(entry, record, node, begin, stop)

        return _json_response(await self._one_by_one(read))

    async def _one_by_one(self, read: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """`read()` on a thread, which goes on although the page that asked has closed: only at its
        end is it another's turn."""
        async with self._reading:
            reading = asyncio.create_task(asyncio.to_thread(read))
            try:
                return await asyncio.shield(reading)
            except asyncio.CancelledError:
                await asyncio.gather(reading, return_exceptions=True)
                raise

    def _read(self, entry: str) -> dict[str, Any]:
        return self._texts.episode(self._board.episodes.record(entry))

    async def _events(self, request: web.Request) -> web.StreamResponse:
        """What changed, as it changes; everything at the start of a connection."""
        if self._board.num_watchers >= MAX_PAGES:
            raise ResourceExhausted(
                "too many pages are open", value=MAX_PAGES + 1, limit=MAX_PAGES,
                remedy="close some",
            )  # fmt: skip
        response = web.StreamResponse(
            headers={**_HEADERS, "Content-Type": "text/event-stream; charset=utf-8"}
        )
        await response.prepare(request)
        with self._board.open_page(), contextlib.suppress(ConnectionError, TimeoutError):
            await self._send_news(response)
        return response

    async def _send_news(self, response: web.StreamResponse) -> None:
        board, episodes = self._board, self._board.episodes
        sent: dict[str, str] = {}
        serial = 0
        await _send(response, {"reset": "true", "max_episodes": str(episodes.max_rows)})
        while True:
            since, drawn = board.num_changes, self._panes()
            rows, serial = episodes.rows(since=serial), episodes.serial
            for at in range(0, len(rows), _ROWS_AT_ONCE):
                part = episode_rows(rows[at : at + _ROWS_AT_ONCE])
                await _send(response, {"episodes": _dumps(part)})
            news = {name: text for name, text in drawn.items() if sent.get(name) != text}
            await _send(response, {"now_s": _dumps(time.time()), **news})
            sent = drawn
            await asyncio.sleep(_PAUSE_S)
            await board.changed(since, _BEAT_S)

    def _panes(self) -> dict[str, str]:
        """JSON of each pane, made once for all pages."""
        if self._drawn[0] != self._board.num_changes:
            drawn = {name: _dumps(pane) for name, pane in panes(self._board).items()}
            self._drawn = (self._board.num_changes, drawn)
        return self._drawn[1]


async def _send(response: web.StreamResponse, news: dict[str, str]) -> None:
    """One event of named parts, each JSON already."""
    text = ",".join(f'"{name}":{part}' for name, part in news.items())
    async with asyncio.timeout(_STALL_S):
        await response.write(f"data: {{{text}}}\n\n".encode())


def _fixed(kind: str, body: str) -> Handler:
    async def answer(_: web.Request) -> web.Response:
        return web.Response(text=body, content_type=kind, charset="utf-8")

    return answer


def _answers(bound: str) -> Middleware:
    """Headers of every answer, the check of where the request is from, and errors as JSON."""

    @web.middleware
    async def answer(request: web.Request, handler: Handler) -> web.StreamResponse:
        try:
            refused = refused_because(request.headers, bound=bound)
            if refused:
                raise web.HTTPForbidden(reason=refused)
            response = await handler(request)
        except web.HTTPException as error:
            response = _json_response({"error": error.reason}, error.status)
            if isinstance(error, web.HTTPMethodNotAllowed):
                response.headers["Allow"] = "GET, HEAD"
        except HarnessError as error:
            status = 503 if isinstance(error, ResourceExhausted) else 404
            response = _json_response({"error": str(error)}, status)
        if not response.prepared:
            response.headers.update(_HEADERS)
        return response

    return answer


def _number(request: web.Request, name: str) -> int:
    text = request.query.get(name, "")
    if not (text.isascii() and text.isdigit() and len(text) < 12):
        raise web.HTTPBadRequest(reason=f"{name} is no number")
    return int(text)


def _json_response(data: Any, status: int = 200) -> web.Response:
    return web.Response(text=_dumps(data), status=status, content_type="application/json")


def _dumps(data: Any) -> str:
    return json.dumps(data, separators=(",", ":"), allow_nan=False)
