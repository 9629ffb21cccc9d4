"""A rollout process as its users start it, and an episode on it."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Sequence
from pathlib import Path

from harness_sdk.client import OctopusClient
from harness_sdk.types import SamplingOptions

ROLLOUT = [sys.executable, "-m", "rollout_service"]


async def until_listening(process: asyncio.subprocess.Process, port: int, log: Path) -> None:
    async with asyncio.timeout(120):
        while True:
            assert process.returncode is None, log.read_text()
            try:
                _, writer = await asyncio.open_connection("127.0.0.1", port)
                writer.close()
                return
            except OSError:
                await asyncio.sleep(0.1)


async def until_gone(pids: Sequence[int]) -> None:
    async with asyncio.timeout(15):
        while any(Path(f"/proc/{pid}").exists() for pid in pids):
            await asyncio.sleep(0.05)


async def play_episode(
    client: OctopusClient, episode_id: str, group_id: str = "g", reward: float = 1.0
) -> str:
    """Two sampled turns on two threads; returns the record's entry id."""
    async with client.episode(task_id="t", group_id=group_id, episode_id=episode_id) as episode:
        sampling = SamplingOptions(max_tokens=4, seed=1)
        await episode.root.generate("What is 6 times 7?", sampling=sampling)
        children = await episode.root.fork({"left": "six", "right": "seven"})
        await children["left"].generate("Go on.", sampling=sampling)
        await episode.root.done("42")
        return (await episode.close(reward=reward)).entry_id


def descendants(pid: int) -> list[int]:
    """Processes that `pid` started, and those that these started."""
    children: list[int] = []
    for thread in Path(f"/proc/{pid}/task").iterdir():
        children += [int(child) for child in (thread / "children").read_text().split()]
    return children + [below for child in children for below in descendants(child)]
