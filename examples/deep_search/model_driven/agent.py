"""Deep search, model-driven: the model itself searches, forks, reads, waits and answers.

For models that write tool calls (Qwen3 1.7B and larger); the folder above serves smaller ones.
With `--limits.max-threads 0` the same model with the same prompts is refused every fork.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from harness_sdk import Limits, Thread

from ..agent import eval_tasks, metrics, score, tasks
from ..browser import browse

__all__ = ["LIMITS", "eval_tasks", "metrics", "run", "score", "tasks"]

LIMITS = Limits(max_threads=10, max_turns=50)
"""Ten workers an episode, at any depth."""

_SYSTEM = (
    "Answer questions by searching Wikipedia passages. Split the question and fork a branch for "
    "each part that can be looked up by itself; a branch that needs another's result may read "
    "that branch instead of searching again. Wait for your branches, then call done with an "
    "answer of a few words, without a sentence around it, and the ids of the passages that it "
    "rests on as evidence."
)


async def run(thread: Thread, task: Mapping[str, Any]) -> None:
    """Let the model answer `task` on `thread`."""
    await browse(thread, task, _SYSTEM)
