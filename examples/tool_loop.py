"""The model-driven style: the model calls the tools, forks, reads and ends by itself.

python -m examples.tool_loop 127.0.0.1:7040 "Which is larger, Oslo or Bergen?"
"""

from __future__ import annotations

import asyncio
import sys

from harness_sdk import (
    LoopEvent,
    LoopResult,
    OctopusClient,
    SamplingOptions,
    ToolLoop,
    ToolLoopOptions,
)

POPULATION = {"oslo": 724_000, "bergen": 294_000, "trondheim": 216_000}


async def population(city: str) -> int:
    """How many people live in a city.

    Args:
        city: Its name, as "Oslo".
    """
    return POPULATION[city.lower()]


def show(event: LoopEvent) -> None:
    """Trace what the model does, and in which thread."""
    if event.call is not None:
        result = "" if event.observation is None else f" -> {event.observation}"
        line = f"{event.thread_id}: {event.call.name} {dict(event.call.arguments)}{result}\n"
        sys.stderr.write(line)


async def answer(address: str, question: str) -> LoopResult:
    """Let the model work until it calls `done`; it may fork a branch for each city."""
    loop = ToolLoop(
        [population], ToolLoopOptions(sampling=SamplingOptions(max_tokens=256)), on_event=show
    )
    async with (
        OctopusClient.connect(address) as client,
        client.episode(task_id="tool-loop") as episode,
    ):
        result = await loop.run(episode.root, question)
        await episode.close(reward=float("oslo" in result.answer.lower()))
        return result


if __name__ == "__main__":
    found = asyncio.run(answer(*sys.argv[1:3]))
    sys.stdout.write(f"{found.status}: {found.answer}\n")
