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
    meta_key = control.adapter_meta_key(run, version)
    size, num_chunks = await _announced_size(client, meta_key, version, max_bytes)
    written = 0
    path = folder / control.ADAPTER_FILE
    await asyncio.to_thread(path.write_bytes, b"")
    for index in range(num_chunks):
        key = control.adapter_chunk_key(run, version, index)
        # Asked before it is fetched: a chunk is in memory as a whole.
        length = await client.strlen(key)
        if not 0 < length <= min(control.ADAPTER_CHUNK_BYTES, size - written):
            raise AdapterError(f"adapter {version} is not whole in Redis", value=key)
        written += await asyncio.to_thread(_append, path, await client.get(key) or b"")
    if written != size:
        raise AdapterError(
            f"adapter {version} is not whole in Redis", value=written, limit=f"{size} bytes"
        )
    (config,) = await client.hmget(meta_key, "config")
    config_path = folder / control.ADAPTER_CONFIG_FILE
    await asyncio.to_thread(config_path.write_bytes, config or b"")


async def _announced_size(client: Any, key: str, version: int, max_bytes: int) -> tuple[int, int]:
    """Bytes and chunks of an adapter that is within bounds."""
    found = await client.hmget(key, "num_bytes", "num_chunks")
    if None in found:
        raise AdapterError(f"adapter {version} is not in Redis", value=key)
    try:
        size, num_chunks = (int(each) for each in found)
    except ValueError as error:
        raise AdapterError(
            f"the size of adapter {version} is no number",
            value=found,
            remedy="publish the version again",
        ) from error
    config_size = await client.hstrlen(key, "config")
    for what, value, limit in (
        (control.ADAPTER_FILE, size, max_bytes),
        (control.ADAPTER_CONFIG_FILE, config_size, control.MAX_ADAPTER_CONFIG_BYTES),
    ):
        if value > limit:
            raise AdapterError(
                f"{what} of adapter {version} is too large",
                value=f"{value} bytes",
                limit=f"{limit} bytes",
                remedy="raise adapters.max_bytes or lower the rank",
            )
    return size, num_chunks


def _append(path: Path, data: bytes) -> int:
    with path.open("ab") as file:
        return file.write(data)
