"""The relay driven by the model itself: what `Runner` runs in the demo's online phase."""

from __future__ import annotations

from collections.abc import Iterator

from harness_sdk.agents import Agent
from harness_sdk.cli.demo.task import DEMO_PRIMITIVES, RelayTask, Vault, draw_tasks, score
from harness_sdk.thread import Thread
from harness_sdk.tool_loop import ToolLoop
from harness_sdk.types import Limits, SamplingOptions

LIMITS = Limits(thread_budget=1024, answer_reserve=128, max_threads=4, max_turns=8)
"""Four times what a relay needs: a policy that wanders ends soon, within the model's positions."""

SAMPLING = SamplingOptions(max_tokens=96)


def relay_agent(seed: int) -> Agent:
    """An agent whose tasks never end; the same ones for the same seed."""

    def tasks() -> Iterator[RelayTask]:
        return draw_tasks(seed)

    return Agent(
        name="relay",
        tasks=tasks,
        run=_drive,
        score=score,
        limits=LIMITS,
        primitives=DEMO_PRIMITIVES,
        sampling=SAMPLING,
    )


async def _drive(root: Thread, task: RelayTask) -> None:
    """Let the model call tools and primitives in every thread until the root ends."""
    vault = Vault(task, lambda: {child.thread_id for child in root.children.values()})
    await ToolLoop(vault.tools, on_event=vault.follow).run(root, task.question)
