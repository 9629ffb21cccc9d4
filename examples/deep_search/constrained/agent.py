"""Deep search by a model that cannot write calls unaided: a grammar makes each turn one call.

What is called, and with what, is the model's own choice among the calls that can succeed, `done`
after another one. With `--primitives done` it is a single agent, with `--limits.max-threads 0` one
whose forks are refused.
For evaluation on vLLM alone: the service needs `--limits.allow-truncated-sampling true`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from harness_sdk import Limits, SamplingOptions, Thread, ToolLoopOptions

from ..agent import eval_tasks, metrics, score, tasks
from ..browser import Browser, browse
from ..corpus import shipped_corpus
from .grammar import one_call

__all__ = ["LIMITS", "PRIMITIVES", "eval_tasks", "metrics", "run", "score", "tasks"]

LIMITS = Limits(thread_budget=2_560, answer_reserve=256, max_threads=4, max_turns=8)
PRIMITIVES = ("fork", "read_thread", "wait", "done")
# A call of two texts of 100 characters takes some 90 tokens.
_MAX_TOKENS, _TEMPERATURE = 128, 0.5
_NUM_HITS, _HIT_WORDS = 3, 40

_SYSTEM = "Answer questions by calls, one at a time. search lists passages; done ends with an"
_SYSTEM += " answer of a few words, and the titles that it rests on as evidence."
_BRANCHING = " fork gives two parts of a question to two branches, and wait their answers."


async def run(thread: Thread, task: Mapping[str, Any]) -> None:
    """Let the model answer `task` on `thread`."""
    browser = Browser(shipped_corpus(), num_hits=_NUM_HITS, hit_words=_HIT_WORDS)
    system = _SYSTEM + _BRANCHING * ("fork" in thread.primitives)
    await browse(thread, task, system, browser, ToolLoopOptions(sampling=_one_call))


def _one_call(thread: Thread) -> SamplingOptions:
    """A turn of `thread`: one of the calls that may succeed; with the last turn it answers."""
    return SamplingOptions(
        max_tokens=_MAX_TOKENS,
        temperature=_TEMPERATURE,
        structured=one_call(_possible(thread)),
    )


def _possible(thread: Thread) -> list[str]:
    budget = thread.budget
    if budget is not None and (budget.reserve_reached or budget.turns_left <= 1):
        return ["done"]
    # Else it answers at once, without having looked.
    looked = thread.step > 0
    possible = {"search": True, "open_page": looked, "done": looked}
    if "fork" in thread.primitives:
        children = list(thread.children.values())
        peers = list(thread.parent.children.values()) if thread.parent is not None else []
        possible |= {
            "fork": _threads_left(thread) > 1,
            "wait": any(not child.ended for child in children),
            "read_thread": any(each is not thread and each.step for each in children + peers),
        }
    return [name for name, can in possible.items() if can]


def _threads_left(thread: Thread) -> int:
    """As of the last call of `thread`, or of the parent that forked it."""
    for each in (thread, thread.parent):
        if each is not None and each.budget is not None:
            return each.budget.threads_left
    # Two are asked for: that none may be started is learnt by trying.
    return 2
