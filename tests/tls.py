"""TLS for tests: certificates of a new authority, a relay that ends TLS, Valkey with users."""

from __future__ import annotations

import asyncio
import contextlib
import ssl
from collections.abc import AsyncIterator
from pathlib import Path

import redis.asyncio

from harness_sdk.cli.embedded import valkey_binary
from harness_sdk.cli.processes import free_port, spawn, stop


def server_context(folder: Path, name: str) -> ssl.SSLContext:
    """What a server with `NAME.pem` and `NAME.key` of `folder` speaks."""
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(folder / f"{name}.pem", folder / f"{name}.key")
    return context


@contextlib.asynccontextmanager
async def tls_relay(
    port: int, context: ssl.SSLContext, *, listen: tuple[str, int] = ("127.0.0.1", 0)
) -> AsyncIterator[int]:
    """End TLS in front of the loopback's `port`; yields the port to speak to."""
    streams: set[asyncio.StreamWriter] = set()

    async def pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(1 << 16):
                writer.write(data)
                await writer.drain()
        writer.close()

    async def relay(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        inner = await asyncio.open_connection("127.0.0.1", port)
        streams.update((writer, inner[1]))
        await asyncio.gather(pump(reader, inner[1]), pump(inner[0], writer))

    server = await asyncio.start_server(relay, *listen, ssl=context)
    try:
        yield server.sockets[0].getsockname()[1]
    finally:
        server.close()
        for stream in streams:
            stream.close()
        await asyncio.sleep(0)


@contextlib.asynccontextmanager
async def valkey_with_users(folder: Path) -> AsyncIterator[int]:
    """A Valkey server with `valkey.acl` of `folder`; yields its port."""
    port = free_port()
    process = await spawn(
        [valkey_binary(), "--port", str(port), "--bind", "127.0.0.1", "--dir", str(folder),
         "--aclfile", str(folder / "valkey.acl"), "--save", ""],
        log_path=folder / "valkey.log",
    )  # fmt: skip
    try:
        async with asyncio.timeout(20):
            while not await _answers(port):
                assert process.returncode is None, (folder / "valkey.log").read_text()
                await asyncio.sleep(0.02)
        yield port
    finally:
        await stop(process, 10)


async def _answers(port: int) -> bool:
    """As the health check of compose.yaml asks."""
    async with redis.asyncio.Redis(port=port, username="health", password="none") as client:
        try:
            return await client.ping()
        except redis.ConnectionError:
            return False
