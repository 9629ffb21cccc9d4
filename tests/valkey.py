"""A Valkey server for the length of a test."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator
from pathlib import Path

from harness_sdk.cli.embedded import ValkeyServer


@contextlib.asynccontextmanager
async def embedded_valkey(data_dir: Path, port: int = 0) -> AsyncGenerator[str]:
    """A Valkey server whose appends reach the disk before they are answered; yields its URL."""
    server = ValkeyServer(data_dir, port)
    await server.start()
    try:
        yield server.url
    finally:
        await server.stop()
