"""The five primitives as a model calls them: checked arguments, then the thread's own methods."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from harness_sdk._arguments import coerce
from harness_sdk.errors import BudgetExhausted, InvalidRequest, StepNotFound, ThreadNotFound
from harness_sdk.thread import Thread
from harness_sdk.tools import as_text
from harness_sdk.types import ToolCall

POLICY_ERRORS = (InvalidRequest, StepNotFound, ThreadNotFound, BudgetExhausted)
"""What the model may do wrong: it is told. Everything else is the infrastructure's failure."""


@dataclass(frozen=True, slots=True)
class _Fork:
    branches: dict[str, str]


@dataclass(frozen=True, slots=True)
class _Rewind:
    step: int
    note: str = ""


@dataclass(frozen=True, slots=True)
class _ReadThread:
    branch: str
    steps: tuple[int, int]


@dataclass(frozen=True, slots=True)
class _Wait:
    branches: list[str] | None = None


@dataclass(frozen=True, slots=True)
class _Done:
    answer: str | int | float | bool | list[Any] | dict[str, Any]
    evidence: str | list[Any] | dict[str, Any] = ""


_ARGUMENTS: dict[str, type] = {
    "fork": _Fork,
    "rewind": _Rewind,
    "read_thread": _ReadThread,
    "wait": _Wait,
    "done": _Done,
}


async def call_primitive(thread: Thread, call: ToolCall, on_fork: Callable[[Thread], None]) -> bool:
    """Execute `call` on `thread`; the service tells the model what came of it.

    Args:
        thread: The caller's thread.
        call: A call of one of `harness_sdk.types.PRIMITIVES`.
        on_fork: Called with each new child.

    Returns:
        Whether the rest of the turn still stands: False after rewind and done.

    Raises:
        InvalidRequest, StepNotFound, ThreadNotFound, BudgetExhausted: The model's mistake.
    """
    arguments = coerce(_spelled_out(call), _ARGUMENTS[call.name], call.name)
    match arguments:
        case _Fork(branches):
            for child in (await thread.fork(branches)).values():
                on_fork(child)
        case _Wait(branches):
            await thread.wait(branches)
        case _ReadThread(branch, steps):
            await thread.read_thread(branch, steps)
        case _Rewind(step, note):
            await thread.rewind(step, note=note)
            return False
        case _Done(answer, evidence):
            await thread.done(as_text(answer), as_text(evidence))
            return False
        case _:
            raise AssertionError(f"no primitive: {call.name}")
    return True


def _spelled_out(call: ToolCall) -> dict[str, Any]:
    """The arguments with the short forms that models use written in full."""
    arguments = dict(call.arguments)
    branches, steps = arguments.get("branches"), arguments.get("steps")
    if call.name == "wait" and isinstance(branches, str) and not branches.startswith("["):
        arguments["branches"] = [branches]
    if call.name == "read_thread" and isinstance(steps, int):
        arguments["steps"] = [steps, steps]
    return arguments
