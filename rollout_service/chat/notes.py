"""Texts that the harness shows a model: fork, join, rewind, mount, roster, budget, termination.

Each is the content of a tagged tool response; none ever changes what was said before.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

from harness_sdk.types import BranchResult
from rollout_service.chat.tools import PRIMITIVE_SCHEMAS, Preamble, signature

_MAX_QUOTED_CHARS = 2000


def fork_note(branches: Sequence[str]) -> str:
    """For the parent: the branches that now run."""
    return f"[fork] {', '.join(branches)}"


def task_note(branch: str, prompt: str) -> str:
    """For the child: its name and sub-task."""
    return f"[branch {branch}] {prompt}"


def rewind_note(step: int, note: str) -> str:
    """For who went back: where it is and what it wanted to remember."""
    return f"[rewind {step}] {note}".rstrip()


def join_note(results: Sequence[BranchResult]) -> str:
    """How each awaited branch ended, one line each."""
    return "\n".join(_join_line(result) for result in results)


def read_stub(branch: str, first: int, last: int, num_tokens: int) -> str:
    """What a mount looks like: about 15 tokens."""
    return f"[read] {branch} steps {first}-{last}, {num_tokens} tokens"


def read_nothing_new(branch: str, first: int, last: int) -> str:
    """For a read of what was visible already."""
    return f"[read] {branch} steps {first}-{last} already visible"


def roster_note(steps: Mapping[str, int], *, with_schema: bool, preamble: Preamble) -> str:
    """The branches that can be read and how many steps each has finished.

    Args:
        steps: Branch to its last finished step.
        with_schema: Introduce `read_thread` itself; the first roster on a path does.
        preamble: How tools are described to this model.
    """
    roster = ", ".join(f"{branch} 1-{last}" for branch, last in steps.items())
    if not with_schema:
        return f"[readable] {roster}"
    schema = PRIMITIVE_SCHEMAS["read_thread"]
    if preamble == "compact":
        return f"[readable] {roster}; {signature(schema)}"
    return f"[readable] {roster}\nNew tool:\n{json.dumps(schema)}"


def reserve_note(tokens_left: int, preamble: Preamble) -> str:
    """The answer reserve is reached."""
    if preamble == "compact":
        return "[budget] only done"
    return f"[budget] {tokens_left} tokens left: every tool but done is refused now. Call done."


def termination_note(preamble: Preamble) -> str:
    """A turn called no tool."""
    if preamble == "compact":
        return "[end] call done"
    return "[end] No tool was called. If you have finished, call done with your answer now."


def _join_line(result: BranchResult) -> str:
    parts = [f"[wait] {result.thread_id} {result.status}"]
    if result.answer:
        parts.append(f"answer: {_quoted(result.answer)}")
    if result.evidence:
        parts.append(f"evidence: {_quoted(result.evidence)}")
    if result.steps:
        parts.append(f"steps 1-{result.steps[-1].step}")
    return "; ".join(parts)


def _quoted(text: str) -> str:
    if len(text) <= _MAX_QUOTED_CHARS:
        return text
    return f"{text[:_MAX_QUOTED_CHARS]}... ({len(text)} characters)"
