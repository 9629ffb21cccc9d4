"""Deep search by a single agent (ReAct): it searches, opens pages and answers on one thread."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from harness_sdk import Limits, Thread

from ..agent import eval_tasks, metrics, score, tasks
from ..browser import browse

__all__ = ["LIMITS", "PRIMITIVES", "eval_tasks", "metrics", "run", "score", "tasks"]

LIMITS = Limits(max_turns=100)
PRIMITIVES = ("done",)

_SYSTEM = (
    "Answer questions by searching Wikipedia passages, one step after the other. Then call done "
    "with an answer of a few words, without a sentence around it, and the ids of the passages "
    "that it rests on as evidence."
)


async def run(thread: Thread, task: Mapping[str, Any]) -> None:
    """Let the model answer `task` on `thread`."""
    await browse(thread, task, _SYSTEM)
