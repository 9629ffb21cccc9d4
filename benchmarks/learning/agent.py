"""The vault driven by the model itself: what `Runner` runs while a variant learns."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

from benchmarks.learning.variants import Variant
from benchmarks.learning.world import LIMITS, SAMPLING, VaultTask, World, draw_tasks, score
from harness_sdk.agents import Agent
from harness_sdk.thread import Thread
from harness_sdk.tool_loop import LoopEvent, ToolLoop, current_thread
from harness_sdk.types import ROOT_THREAD


def vault_agent(variant: Variant, seed: int) -> Agent:
    """An agent whose tasks never end; the same ones for the same seed."""

    def tasks() -> Iterator[VaultTask]:
        return draw_tasks(seed)

    async def drive(root: Thread, task: VaultTask) -> str | None:
        return await _drive(variant, root, task)

    return Agent(
        name="vault",
        tasks=tasks,
        run=drive,
        score=score,
        limits=LIMITS,
        primitives=variant.primitives,
        sampling=SAMPLING,
    )


def world_tools(world: World, variant: Variant) -> list[Callable[..., Any]]:
    """The agent's own tools."""

    async def look() -> str:
        """Look around."""
        return await world.look(current_thread().thread_id)

    async def open(code: str) -> str:
        """Try a code at the door."""
        return world.open(current_thread().thread_id, code)

    async def read_thread(branch: str, steps: list[int]) -> str:
        """Read what a branch saw."""
        return world.copy(branch, steps)

    return [look, open, read_thread] if variant.copies_text else [look, open]


def number_in(text: str) -> str:
    """The last number of three digits in a reply without a call; empty where there is none."""
    found = re.findall(r"\d{3}", text)
    return found[-1] if found else ""


class _PlainReply(Exception):
    """The root's turn called nothing, and the variant ends the episode there."""


async def _drive(variant: Variant, root: Thread, task: VaultTask) -> str | None:
    """Let the model call tools and primitives in every thread until the root ends."""
    world = World(task, lambda: {ROOT_THREAD} | {c.thread_id for c in root.children.values()})

    def follow(event: LoopEvent) -> None:
        if event.status is not None:
            world.thread_ended(event.thread_id)
        if event.call is not None and event.call.name == "rewind" and not event.failed:
            world.rewound(event.thread_id)
        turn = event.turn
        if turn is not None and event.thread_id == ROOT_THREAD and not turn.tool_calls:
            root.report(plain_reply=1.0)
            if variant.ending != "prompt":
                raise _PlainReply(turn.text)

    try:
        await ToolLoop(world_tools(world, variant), on_event=follow).run(root, task.question)
    except _PlainReply as reply:
        return number_in(str(reply)) if variant.ending == "fallback" else ""
    return None
