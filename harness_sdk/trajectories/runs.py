"""A recorded run in one form, whatever wrote it: messages, outcome, and token ids where kept."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass

from harness_sdk.types import Role


@dataclass(frozen=True, slots=True, kw_only=True)
class RunMessage:
    """One message of a recorded conversation."""

    role: Role
    content: str
    copied: bool = False
    """A reply that another run produced and this one only carries in its history."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedTurn:
    """One model turn whose token ids the engine kept."""

    prompt_token_ids: tuple[int, ...]
    """The whole prompt, history included."""
    token_ids: tuple[int, ...]
    """What was sampled."""
    sampled_logprobs: tuple[float, ...]
    """Nats, one for each of `token_ids`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One recorded attempt at one task.

    Example:
        `Run(run_id="react.jsonl:3", task_id="Who ...?", messages=(user, assistant), reward=1.0)`
    """

    run_id: str
    """File and place in it."""
    task_id: str
    """Runs with the same id are merged into one tree."""
    messages: tuple[RunMessage, ...]
    reward: float | None = None
    """y in [0, 1]; None where the recording does not tell."""
    status: str = "done"
    """How the run ended: a value of `ThreadStatus`."""
    answer: str = ""
    recorded_turns: tuple[RecordedTurn, ...] = ()
    """Token ids of every model turn; empty where the text has to be rendered."""
    recorded_model: str = ""
    """Model whose vocabulary the recorded ids belong to."""


def task_key(text: str, *, context: str = "") -> str:
    """A task id for a task that is known by its text alone.

    Args:
        text: The question; the id begins with it.
        context: What else tells two tasks with one question apart.
    """
    folded = " ".join(text.split())
    if len(folded) <= 100 and not context:
        return folded
    digest = hashlib.sha256(f"{folded}\0{context}".encode()).hexdigest()
    return f"{folded[:80]} #{digest[:8]}"


def tool_call_text(name: str, arguments_json: str) -> str:
    """A call as Hermes-trained models write it."""
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments_json or "{}"}}}\n</tool_call>'


def tool_reply(results: Iterable[str]) -> RunMessage:
    """The observation that answers one turn's calls."""
    blocks = (f"<tool_response>\n{result}\n</tool_response>" for result in results)
    return RunMessage(role="tool", content="\n".join(blocks))


def tools_text(schemas: Iterable[str]) -> str:
    """The tool list as a part of the system message; each schema is one line of JSON."""
    return "# Tools\n\n<tools>\n" + "\n".join(schemas) + "\n</tools>"
