"""One replica: engine, sessions, gRPC server, stream, bus and adapters, wired and stopped."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

from harness_sdk._cancellation import end
from harness_sdk.cli.settings import render_config
from harness_sdk.control import ReplicaState
from harness_sdk.errors import AdapterError, Unavailable
from harness_sdk.log_ids import set_ids
from rollout_service.adapters import Adapters
from rollout_service.bus import ControlBus
from rollout_service.chat import ChatRenderer, ChatTokenizer, load_template
from rollout_service.client_limits import ClientLimits
from rollout_service.config import ADDRESS_FILE, RolloutConfig
from rollout_service.endpoints import open_openai, open_server
from rollout_service.engine.base import Engine
from rollout_service.engine_choice import new_engine
from rollout_service.exposition import exposed_sessions
from rollout_service.interpreter import quickly_switched, seldom_collected
from rollout_service.rpc import RunningServer
from rollout_service.sessions import SessionOptions, Sessions
from rollout_service.stream import EpisodeStream

logger = logging.getLogger(__name__)


async def run_service(config: RolloutConfig) -> None:
    """Serve until SIGINT or SIGTERM, then stop within `server.drain_s`, and `server.grace_s` a
    part; a second signal ends the draining."""
    set_ids(run=config.run)
    logger.info("resolved configuration:\n%s", render_config(config))
    signals: asyncio.Queue[signal.Signals] = asyncio.Queue()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, signals.put_nowait, number)
    service = RolloutService(config)
    serving = asyncio.create_task(_serve(service))
    await _first(serving, signals.get())
    if not serving.done() and config.server.drain_s > 0:
        drained = asyncio.create_task(service.drain())
        await _first(serving, signals.get(), drained, timeout_s=config.server.drain_s)
        await end(drained)
    serving.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await serving


class RolloutService:
    """The parts of a replica, started in order and stopped in reverse; an async context manager.

    Attributes:
        address: `host:port` that the server is bound to, once entered.
        openai_address: The same of the OpenAI endpoint; empty where there is none.
        metrics_address: The same of Prometheus's endpoint.
        sessions: The replica's episodes, once entered.
        adapters: The versions that it serves, once entered.
    """

    def __init__(self, config: RolloutConfig) -> None:
        self._config = config
        self._exit = contextlib.AsyncExitStack()
        self.address = ""
        self.openai_address = ""
        self.metrics_address = ""
        self.sessions: Sessions
        self.adapters: Adapters
        self._stream: EpisodeStream | None = None
        self._bus: ControlBus | None = None
        self._engine_end: asyncio.Future[None]

    async def __aenter__(self) -> RolloutService:
        try:
            await self._start()
        except BaseException:
            await self._exit.aclose()
            raise
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self._exit.aclose()

    async def run(self) -> None:
        """Apply each announced policy, until cancelled.

        Raises:
            Unavailable: The engine has ended and is not started again.
        """
        applying = asyncio.create_task(self._apply_policies())
        try:
            await asyncio.wait([applying, self._engine_end], return_when=asyncio.FIRST_COMPLETED)
            (self._engine_end if self._engine_end.done() else applying).result()
        finally:
            await end(applying)

    async def drain(self) -> None:
        """Refuse new episodes, tell runs to go elsewhere, return once the open ones have closed.

        At once where the service has not started yet.
        """
        if hasattr(self, "sessions"):
            if self._bus is not None:
                self._bus.leave()
            await self.sessions.drain()

    async def _apply_policies(self) -> None:
        if self._bus is None:
            await asyncio.Event().wait()
            return
        await asyncio.gather(
            self._apply_announced(self._bus), self.adapters.serve_waiting(self._bus.publish)
        )

    async def _apply_announced(self, bus: ControlBus) -> None:
        async for announcement in bus.announcements():
            bus.publish(await self.adapters.apply(announcement))

    async def _start(self) -> None:
        config = self._config
        tokenizer, chat = await asyncio.to_thread(_load_chat, config)
        self._engine_end = asyncio.get_running_loop().create_future()
        engine = new_engine(config, tokenizer, self._lose_engine)
        # A start that fails, or is given up, may have begun a process.
        self._exit.push_async_callback(engine.close)
        await engine.start()
        self._stream = await self._open_stream()
        self.adapters = self._new_adapters(engine, self._stream)
        await self.adapters.start()
        self._exit.push_async_callback(self.adapters.close)
        self.sessions = Sessions(
            engine,
            chat,
            self._stream,
            _session_options(config),
            newest_version=self.adapters.newest,
            loaded_versions=lambda: self.adapters.state.versions,
        )
        metrics = self.sessions.metrics
        limits = ClientLimits(
            config.server.client_calls,
            config.server.client_calls_per_s,
            on_refused=lambda: metrics.add("guardrails/refused_calls"),
        )
        # Told from the start, for a counter that appears is none that rises.
        metrics.add("guardrails/refused_calls", 0.0)
        if config.openai.port is not None:
            endpoint = await open_openai(config, config.openai.port, self.sessions, limits)
            # Stopped after the server, which closes the episodes and so ends the requests.
            self._exit.push_async_callback(endpoint.stop)
            self.openai_address = endpoint.address
            logger.info("OpenAI endpoint at %s", endpoint.url)
        if config.metrics.port is not None:
            serving = exposed_sessions(
                self.sessions, host=config.metrics.host, port=config.metrics.port
            )
            self.metrics_address = self._exit.enter_context(serving)
            logger.info("Prometheus metrics at http://%s/metrics", self.metrics_address)
        server = await open_server(config, self.sessions, limits)
        self._exit.push_async_callback(self._stop_server, server)
        self.address = server.address
        self.adapters.advertise(config.server.advertise or server.address)
        # Where a port of 0 was asked for, this is how its starter learns which one it became.
        await asyncio.to_thread(_write_address, config, server.address)
        self._exit.callback((config.folder / ADDRESS_FILE).unlink, missing_ok=True)
        if config.mqtt.url is None:
            logger.warning("mqtt.url is unset: version 0 alone is served")
        else:
            # Told last and untold first: who reads the state finds a server that answers.
            bus = ControlBus(config.mqtt.url, config.run, self.adapters.state)
            self._bus = await self._exit.enter_async_context(bus)
        logger.info("replica %s serves run %s at %s", config.replica_id, config.run, self.address)

    def _lose_engine(self, error: Unavailable) -> None:
        """The engine ended and is not started again: no call can be served, so `run` ends."""
        if not self._engine_end.done():
            self._engine_end.set_exception(error)
            # Retrieved, where the service is being stopped anyhow.
            self._engine_end.exception()
        if hasattr(self, "sessions"):
            self.sessions.fail(error)

    async def _open_stream(self) -> EpisodeStream | None:
        config = self._config
        if config.redis.url is None:
            logger.warning("redis.url is unset: episodes are not kept")
            return None
        stream = EpisodeStream(
            config.redis.url,
            config.run,
            max_buffered_bytes=config.redis.max_buffered_bytes,
            spill_path=config.folder / "unsent.records",
            trim_every=config.redis.trim_every,
        )
        await stream.start()
        self._exit.push_async_callback(stream.close, config.server.grace_s)
        return stream

    def _new_adapters(self, engine: Engine, stream: EpisodeStream | None) -> Adapters:
        config = self._config

        async def fetch(version: int, folder: Path) -> None:
            if stream is None:
                raise AdapterError(
                    f"adapter {version} is in Redis, which this replica does not know",
                    remedy="set redis.url",
                )
            await stream.fetch_adapter(version, folder, max_bytes=config.adapters.max_bytes)

        return Adapters(
            engine,
            ReplicaState(replica_id=config.replica_id, alive=True, versions=(0,)),
            run=config.run,
            folder=config.folder / "adapters",
            shared=config.run_folder / config.run,
            fetch=fetch,
            pinned=lambda: self.sessions.versions_in_use(),
            max_versions=config.adapters.max_versions,
            max_bytes=config.adapters.max_bytes,
        )

    async def _stop_server(self, server: RunningServer) -> None:
        """Close every episode and end every call, whether Redis is there or not."""
        grace_s = self._config.server.grace_s
        stopping = asyncio.create_task(server.stop(grace_s))
        await asyncio.wait([stopping], timeout=2 * grace_s)
        if not stopping.done() and self._stream is not None:
            # Closing waits for Redis: let the stream keep its records in a file instead.
            await self._stream.close(0)
        await stopping


async def _serve(service: RolloutService) -> None:
    async with service:
        with seldom_collected(), quickly_switched():
            await service.run()


async def _first(
    serving: asyncio.Task[None],
    signalled: Coroutine[Any, Any, signal.Signals],
    *others: asyncio.Task[None],
    timeout_s: float | None = None,
) -> None:
    """Return with the first end of what serves, a signal, `others`, or the time."""
    waiting = asyncio.create_task(signalled)
    try:
        await asyncio.wait(
            [serving, waiting, *others], timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED
        )
    finally:
        await end(waiting)


def _write_address(config: RolloutConfig, address: str) -> None:
    config.folder.mkdir(parents=True, exist_ok=True)
    partial = config.folder / f"{ADDRESS_FILE}.partial"
    partial.write_text(address, "utf-8")
    partial.replace(config.folder / ADDRESS_FILE)


def _load_chat(config: RolloutConfig) -> tuple[ChatTokenizer, ChatRenderer]:
    folder = config.model.path
    assert folder is not None
    tokenizer = ChatTokenizer.load(folder)
    template = load_template(folder, config.model.template_variables)
    chat = ChatRenderer(tokenizer, template, preamble=config.model.preamble)
    return tokenizer, chat


def _session_options(config: RolloutConfig) -> SessionOptions:
    # Each limit has the same name on both sides, so a new one cannot be forgotten here.
    return SessionOptions(
        run=config.run, replica_id=config.replica_id, **config.limits.model_dump()
    )
