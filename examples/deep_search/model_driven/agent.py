"""Deep search, model-driven: the model itself searches, forks, reads, waits and answers.

For models that write tool calls (Qwen3 1.7B and larger); the folder above serves smaller ones.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from harness_sdk import Limits, Message, Thread, ToolLoop

from ..agent import metrics, score, tasks
from ..corpus import shipped_corpus

__all__ = ["LIMITS", "metrics", "run", "score", "tasks"]

LIMITS = Limits(thread_budget=8_192, answer_reserve=512, max_turns=24)

_SYSTEM = (
    "Answer questions by searching Wikipedia passages. Split the question and fork a branch for "
    "each part that can be looked up by itself; a branch that needs another's result may read "
    "that branch instead of searching again. Wait for your branches, then call done with an "
    "answer of a few words, without a sentence around it."
)


async def run(thread: Thread, task: Mapping[str, Any]) -> None:
    """Let the model answer `task` on `thread`."""
    corpus = shipped_corpus()
    messages = [
        Message(role="system", content=_SYSTEM),
        Message(role="user", content=task["question"]),
    ]
    await ToolLoop([corpus.search, corpus.open_page]).run(thread, messages)
