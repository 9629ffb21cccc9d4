"""An adapter out of Redis, where the trainer stores it in chunks."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

from harness_sdk import control
from harness_sdk.errors import AdapterError


async def fetch_adapter(client: Any, run: str, version: int, folder: Path, max_bytes: int) -> None:
    """Write an adapter's two files to `folder`, one chunk in memory at a time.

    Raises:
        AdapterError: The version is not there, not whole, or larger than `max_bytes`.
        RedisError: Redis cannot be reached.
    """
    key = control.adapter_meta_key(run, version)
    meta = await client.hgetall(key)
    if not meta:
        raise AdapterError(f"adapter {version} is not in Redis", value=key)
    size = int(meta[b"num_bytes"])
    if size > max_bytes:
        raise AdapterError(
            f"adapter {version} is too large",
            value=f"{size} bytes",
            limit=f"{max_bytes} bytes",
            remedy="raise adapters.max_bytes or lower the rank",
        )
    written = 0
    path = folder / control.ADAPTER_FILE
    await asyncio.to_thread(path.write_bytes, b"")
    for index in range(int(meta[b"num_chunks"])):
        chunk_key = control.adapter_chunk_key(run, version, index)
        chunk = await client.get(chunk_key)
        if chunk is None or written + len(chunk) > size:
            raise AdapterError(f"adapter {version} is not whole in Redis", value=chunk_key)
        written += await asyncio.to_thread(_append, path, chunk)
    if written != size:
        raise AdapterError(
            f"adapter {version} is not whole in Redis", value=written, limit=f"{size} bytes"
        )
    config_path = folder / control.ADAPTER_CONFIG_FILE
    await asyncio.to_thread(config_path.write_bytes, meta[b"config"])


def _append(path: Path, data: bytes) -> int:
    with path.open("ab") as file:
        return file.write(data)
