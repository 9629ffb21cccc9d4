"""What the trainer keeps in Redis beside the stream: the run's owner, permits and adapters."""

from __future__ import annotations

import asyncio
import hashlib
from pathlib import Path
from typing import Any

from harness_sdk import control
from harness_sdk.errors import ConfigError
from trainer_service.stream import RedisLink

MAX_STEPS = 4096
"""Steps whose figures Redis keeps, about 2 kB each."""


async def claim_run(link: RedisLink, run: str, owner: str, place: str) -> None:
    """Bind a run to the run folder `owner`: what a checkpoint has consumed is known there alone.

    Args:
        link: Connection.
        run: Run name.
        owner: Id of the folder.
        place: Where it is, for people.

    Raises:
        ConfigError: Another folder trains the run.
    """
    key = control.trainer_key(run)

    async def claim() -> bytes:
        await link.client.set(key, f"{owner} {place}", nx=True)
        return await link.client.get(key)

    found, _, found_place = (await link.call(claim)).decode().partition(" ")
    if found != owner:
        raise ConfigError(
            f"another run folder trains run {run}",
            value=place,
            limit=found_place,
            remedy=f"train in that folder, or use a new run name; if it is gone for good, the "
            f"keys octopus:{run}:* of Redis belong to it",
        )


async def grant_permits(
    link: RedisLink, run: str, granted: int, group_size: int, *, refills: int = 0
) -> None:
    """Allow `granted` groups since the run began; a lower number allows no less.

    Args:
        link: Connection.
        run: Run name.
        granted: Groups.
        group_size: Episodes of each.
        refills: Failed episodes of each that runners replace.
    """
    key, wake = control.permits_key(run), control.permits_wake_key(run)

    async def grant() -> None:
        before = await link.client.hget(key, "granted")
        async with link.client.pipeline(transaction=True) as pipe:
            pipe.hset(key, mapping={"group_size": group_size, "refills": refills})
            if before is None or int(before) < granted:
                pipe.hset(key, "granted", granted)
                pipe.lpush(wake, granted)
                pipe.ltrim(wake, 0, 15)
            await pipe.execute()

    await link.call(grant)


async def withhold_permits(link: RedisLink, run: str) -> None:
    """Take back what was granted and is not taken yet; the next grant gives it again."""
    key = control.permits_key(run)

    async def withhold(pipe: Any) -> None:
        granted, taken = (int(each or 0) for each in await pipe.hmget(key, "granted", "taken"))
        pipe.multi()
        if granted > taken:
            pipe.hset(key, "granted", taken)

    # Watched: a runner counts a permit as taken first and compares then, so either it sees the
    # lower number and gives its own back, or it was counted in. No script: nobody may send one.
    await link.call(lambda: link.client.transaction(withhold, key))


async def running_groups(link: RedisLink, run: str) -> int:
    """Groups that hold a permit and whose runner has not seen their end."""
    return int(await link.call(lambda: link.client.scard(control.running_key(run))))


async def forget_running_groups(link: RedisLink, run: str) -> None:
    """Give up the groups of runners that died."""
    await link.call(lambda: link.client.delete(control.running_key(run)))


async def permits(link: RedisLink, run: str) -> tuple[int, int]:
    """Groups `granted` and `taken` so far."""
    found = await link.call(lambda: link.client.hmget(control.permits_key(run), "granted", "taken"))
    return int(found[0] or 0), int(found[1] or 0)


async def send_figures(link: RedisLink, run: str, figures: str) -> None:
    """Append a step's figures, as `metrics.report` returns them, for whoever watches the run."""
    fields = {control.FIGURES_FIELD: figures}
    await link.call(
        lambda: link.client.xadd(control.steps_key(run), fields, maxlen=MAX_STEPS, approximate=True)
    )


async def upload_adapter(link: RedisLink, run: str, version: int, folder: Path) -> str:
    """Store a PEFT adapter folder in chunks; its hash appears last, so readers see it whole.

    Returns:
        The `redis:` address of the announcement.
    """
    data = await asyncio.to_thread((folder / control.ADAPTER_FILE).read_bytes)
    size = control.ADAPTER_CHUNK_BYTES
    chunks = [data[start : start + size] for start in range(0, len(data), size)]
    for index, chunk in enumerate(chunks):
        key = control.adapter_chunk_key(run, version, index)
        await link.call(lambda key=key, chunk=chunk: link.client.set(key, chunk))
    meta = {
        "num_chunks": len(chunks),
        "num_bytes": len(data),
        "sha256": await asyncio.to_thread(lambda: hashlib.sha256(data).hexdigest()),
        "config": await asyncio.to_thread((folder / control.ADAPTER_CONFIG_FILE).read_text),
    }
    key = control.adapter_meta_key(run, version)
    await link.call(lambda: link.client.hset(key, mapping=meta))
    return f"redis:{control.adapter_key(run, version)}"


async def delete_adapter(link: RedisLink, run: str, version: int) -> None:
    """Remove a version's chunks; nothing happens where there are none."""
    meta = control.adapter_meta_key(run, version)
    count = await link.call(lambda: link.client.hget(meta, "num_chunks"))
    keys = [control.adapter_chunk_key(run, version, index) for index in range(int(count or 0))]
    await link.call(lambda: link.client.delete(meta, *keys))
