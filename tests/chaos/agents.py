"""Episodes over a bad network: each closes, or fails by type, and none outlasts its deadlines."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from harness_sdk import OctopusClient, SamplingOptions
from harness_sdk.errors import HarnessError
from harness_sdk.options import Timeouts

CALL_S = 5.0
TIMEOUTS = Timeouts(
    connect_s=CALL_S, admission_s=CALL_S, call_s=CALL_S, generate_s=CALL_S, close_s=CALL_S
)
LONGEST_S = 9 * CALL_S + 10.0
"""Of an episode whose every call takes all of its deadline."""


@dataclass
class Played:
    """What the agent was told."""

    closed: dict[str, str] = field(default_factory=dict)
    """Entry of its record by episode."""
    failed: list[HarnessError] = field(default_factory=list)
    closed_at_s: list[float] = field(default_factory=list)
    """`time.monotonic` of each close."""


async def play_until(
    client: OctopusClient, played: Played, is_over: Callable[[], bool], *, pause_s: float = 0.05
) -> None:
    """One episode after the other; what is no `HarnessError` is raised."""
    while not is_over():
        began = time.monotonic()
        try:
            await _episode(client, played)
        except HarnessError as error:
            played.failed.append(error)
        took_s = time.monotonic() - began
        assert took_s < LONGEST_S, f"an episode took {took_s:.1f} s"
        await asyncio.sleep(pause_s)


async def _episode(client: OctopusClient, played: Played) -> None:
    sampling = SamplingOptions(max_tokens=8)
    async with client.episode(task_id="t", primitives=(), sampling=sampling) as episode:
        root = episode.root
        await root.generate("go")
        children = await root.fork({"a": "left", "b": "right"})
        for child in children.values():
            await child.generate()
            await child.done("seen")
        await root.generate("and now?")
        await root.done("42")
        result = await episode.close(reward=1.0)
    played.closed[episode.episode_id] = result.entry_id
    played.closed_at_s.append(time.monotonic())
