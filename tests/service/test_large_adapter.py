"""An adapter far larger than any message travels from trainer to replica through Redis."""

from __future__ import annotations

import hashlib
from pathlib import Path

from harness_sdk import control
from rollout_service.stream import EpisodeStream
from tests.valkey import embedded_valkey
from trainer_service.run_keys import upload_adapter
from trainer_service.stream import RedisLink

SIZE = 300_000_000
RUN = "large"


async def test_adapter_of_300_mb_arrives_whole(tmp_path: Path) -> None:
    source, target = tmp_path / "source", tmp_path / "target"
    source.mkdir()
    target.mkdir()
    block = bytes(range(251)) * 4_000
    with (source / control.ADAPTER_FILE).open("wb") as file:
        for start in range(0, SIZE, len(block)):
            file.write(block[: SIZE - start])
    (source / control.ADAPTER_CONFIG_FILE).write_text('{"r": 64}')
    async with embedded_valkey(tmp_path / "valkey") as url:
        link = RedisLink(url)
        try:
            await upload_adapter(link, RUN, 1, source)
        finally:
            await link.close()
        async with EpisodeStream(url, RUN) as stream:
            await stream.fetch_adapter(1, target, max_bytes=SIZE)
    sent, got = (_sha256(folder / control.ADAPTER_FILE) for folder in (source, target))
    assert (target / control.ADAPTER_FILE).stat().st_size == SIZE
    assert got == sent


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
