"""Bad networks: a relay that delays, stalls, resets and freezes, and a host behind a link."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import random
import shutil
import socket
import struct
import subprocess
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.trainer_process import FORKSERVER

_CLONE_NEWNET = 0x40000000
_CHUNK = 64 * 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class Weather:
    """What a relay does to what it passes on."""

    delay_s: float = 0.0
    """Of each chunk, in both directions."""
    stall_rate: float = 0.0
    """Share of the chunks that wait besides."""
    stall_s: float = 0.0
    """The longest such wait."""
    reset_rate: float = 0.0
    """Share of the chunks at which the connection is reset."""


class Relay:
    """Passes TCP connections on to `address`, badly.

    Args:
        address: host:port.
        weather: What happens to them.
        seed: Of the chances.
    """

    def __init__(self, address: str, weather: Weather, seed: int = 0) -> None:
        self._host, _, port = address.rpartition(":")
        self._port = int(port)
        self._weather = weather
        self._rng = random.Random(seed)
        self._may_pass = asyncio.Event()
        self._may_pass.set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._server: asyncio.Server | None = None
        self.address = ""
        self.num_resets = 0
        self.num_stalls = 0

    async def __aenter__(self) -> Relay:
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        self.address = f"127.0.0.1:{self._server.sockets[0].getsockname()[1]}"
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        assert self._server is not None
        self._server.close()
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def freeze(self) -> None:
        """Pass nothing on any more, and close nothing: both ends are half open."""
        self._may_pass.clear()

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        writers = [writer]
        ways: list[asyncio.Task[None]] = []
        try:
            there = await asyncio.open_connection(self._host, self._port)
            writers.append(there[1])
            ways.append(asyncio.create_task(self._pass(reader, there[1])))
            ways.append(asyncio.create_task(self._pass(there[0], writer)))
            await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
        except OSError:
            pass
        finally:
            for way in ways:
                way.cancel()
            await asyncio.gather(*ways, return_exceptions=True)
            await asyncio.gather(*map(_reset, writers))
            self._tasks.discard(task)

    async def _pass(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One direction: chunks leave in order, each `delay_s` after it came."""
        loop = asyncio.get_running_loop()
        chunks: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue(1000)

        async def leave() -> None:
            while True:
                due_s, data = await chunks.get()
                await asyncio.sleep(due_s - loop.time())
                if self._rng.random() < self._weather.stall_rate:
                    self.num_stalls += 1
                    await asyncio.sleep(self._rng.uniform(0, self._weather.stall_s))
                await self._may_pass.wait()
                writer.write(data)
                await writer.drain()

        leaving = asyncio.create_task(leave())
        try:
            while data := await reader.read(_CHUNK):
                await self._may_pass.wait()
                if self._rng.random() < self._weather.reset_rate:
                    self.num_resets += 1
                    return
                await chunks.put((loop.time() + self._weather.delay_s, data))
        except OSError:
            return
        finally:
            leaving.cancel()
            await asyncio.gather(leaving, return_exceptions=True)


async def _reset(writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(OSError):
        found: Any = writer.get_extra_info("socket")
        found.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    writer.transport.abort()
    with contextlib.suppress(OSError):
        await writer.wait_closed()


class Link:
    """Two hosts and a cable: this one, and a network namespace with an address of its own.

    Attributes:
        address: IPv4 of the other host.
    """

    def __init__(self) -> None:
        number = os.getpid() % 16_000
        self._name = f"octopus{number}"
        self._ours, self._theirs = f"oc{number}a", f"oc{number}b"
        net = f"10.213.{number // 64}.{number % 64 * 4}".rpartition(".")
        self._here, self.address = (f"{net[0]}.{int(net[2]) + host}" for host in (1, 2))

    def __enter__(self) -> Link:
        try:
            _ip("netns", "add", self._name)
            _ip("link", "add", self._ours, "type", "veth", "peer", "name", self._theirs)
            _ip("link", "set", self._theirs, "netns", self._name)
            _ip("addr", "add", f"{self._here}/30", "dev", self._ours)
            _ip("link", "set", self._ours, "up")
            inside = ("netns", "exec", self._name, "ip")
            _ip(*inside, "addr", "add", f"{self.address}/30", "dev", self._theirs)
            _ip(*inside, "link", "set", self._theirs, "up")
            _ip(*inside, "link", "set", "lo", "up")
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *exc_info: object) -> None:
        for words in (("link", "del", self._ours), ("netns", "del", self._name)):
            subprocess.run(["ip", *words], capture_output=True, check=False)

    def cut(self) -> None:
        """Nothing passes, and neither host is told."""
        _ip("link", "set", self._ours, "down")

    def mend(self) -> None:
        """As before."""
        _ip("link", "set", self._ours, "up")

    def enter_in_child(self) -> None:
        """Move the calling process to the other host."""
        descriptor = os.open(f"/var/run/netns/{self._name}", os.O_RDONLY)
        try:
            if ctypes.CDLL(None, use_errno=True).setns(descriptor, _CLONE_NEWNET):
                raise OSError(ctypes.get_errno(), "setns")
        finally:
            os.close(descriptor)


def why_no_link() -> str:
    """What this machine lacks for a `Link`; empty where it lacks nothing."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    if shutil.which("ip") is None:
        return "network namespaces need iproute2"
    try:
        with Link():
            return ""
    except subprocess.CalledProcessError as error:
        return f"no network namespaces here: {error.stderr.decode().strip()}"


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], capture_output=True, check=True)


@contextlib.contextmanager
def forked(target: Any, *args: Any) -> Iterator[Any]:
    """`target(pipe, *args)` in a process of its own; yields this end of the pipe."""
    here, there = FORKSERVER.Pipe()
    process = FORKSERVER.Process(target=target, args=(there, *args), daemon=True)
    process.start()
    there.close()
    try:
        yield here
    finally:
        here.close()
        process.join(20)
        process.kill()
        process.join()


@dataclass(frozen=True, slots=True, kw_only=True)
class Host:
    """A rollout service with Valkey on the other host, and what it says of itself."""

    address: str
    pipe: Any

    async def tell(self) -> dict[str, Any]:
        """Its records as (episode, entry, stop reason), open episodes, residency, openings."""
        self.pipe.send("tell")
        return await asyncio.to_thread(self.pipe.recv)


@contextlib.asynccontextmanager
async def host_behind(link: Link, folder: Path) -> AsyncIterator[Host]:
    """Start the service on the other host."""
    with forked(_be_host, link, str(folder)) as pipe:
        address = await asyncio.to_thread(pipe.recv)
        yield Host(address=address, pipe=pipe)


def _be_host(pipe: Any, link: Link, folder: str) -> None:
    link.enter_in_child()
    asyncio.run(_serve_host(pipe, link, Path(folder)))


async def _serve_host(pipe: Any, link: Link, folder: Path) -> None:
    import redis.asyncio

    from harness_sdk import control
    from harness_sdk.record import record_from_bytes
    from rollout_service.rpc import serve
    from rollout_service.sessions import SessionOptions, Sessions
    from rollout_service.stream import EpisodeStream
    from tests.fuzz.dice import DiceEngine
    from tests.session_cases import CHAT
    from tests.valkey import embedded_valkey

    engine = DiceEngine(0)
    async with (
        embedded_valkey(folder / "valkey") as url,
        EpisodeStream(url, "r", trim_every=10**9) as stream,
        redis.asyncio.Redis.from_url(url) as client,
    ):
        sessions = Sessions(engine, CHAT, stream, SessionOptions(run="r"))
        server = await serve(sessions, host=link.address)
        pipe.send(server.address)
        while await _asked(pipe):
            entries: Any = await client.xrange(control.episodes_key("r"))
            status = sessions.status()
            records = [(record_from_bytes(f[b"record"]), e.decode()) for e, f in entries]
            pipe.send(
                {
                    "records": [(r.episode_id, entry, r.stop_reason) for r, entry in records],
                    "open": status.open_episodes,
                    "resident": status.resident_cursors,
                    "opened": status.metrics.get("episodes/opened", 0.0),
                }
            )
        await server.stop(0.5)


async def _asked(pipe: Any) -> bool:
    try:
        return bool(await asyncio.to_thread(pipe.recv))
    except EOFError:
        return False
