"""Code repair, model-driven: read, edit and test a broken module; a branch for each hypothesis.

The tools work on the calling thread's own files, and tests run in a sandbox. The reward is 1 where
the root calls done and its module passes every test, the hidden ones too.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

from harness_sdk import Limits, Message, Thread, ThreadStatus, ToolLoop, current_thread

from .sandbox import Evaluated, SandboxLimits, evaluate
from .tasks import TASKS, RepairTask, Tests
from .workspaces import Workspaces

LIMITS = Limits(max_threads=6, max_turns=30)

_SYSTEM = (
    "Repair solution.py. Run the tests, read the file, write it whole with your change, and run "
    "the tests again. Hidden tests check the description too. Where several causes are possible, "
    "fork a branch for each: it has files of its own. Wait for your branches, adopt the files of "
    "one that passes, then call done."
)
_PATH = "solution.py"


def tasks() -> Sequence[RepairTask]:
    """The shipped tasks."""
    return TASKS


async def run(thread: Thread, task: RepairTask) -> str | None:
    """Let the model repair `task` on `thread`; returns the root's module, which is scored."""
    workspaces = Workspaces(thread, task.source)
    messages = [
        Message(role="system", content=_SYSTEM),
        Message(role="user", content=f"{_PATH} shall have {task.description}"),
    ]
    await ToolLoop(tools(workspaces, task), on_event=workspaces.observe).run(thread, messages)
    return workspaces.read(thread.thread_id) if thread.status is ThreadStatus.DONE else None


async def score(task: RepairTask, source: str) -> float:
    """1.0 where `source` passes every test of `task`, else 0.0."""
    return float(not await failures(source, (*task.visible, *task.hidden)))


def tools(
    workspaces: Workspaces, task: RepairTask
) -> list[Callable[..., Coroutine[Any, Any, str]]]:
    """The tools of one episode."""

    async def read_file(path: str) -> str:
        """Read a file.

        Args:
            path: Its name, as "solution.py".
        """
        return workspaces.read(current_thread().thread_id) if path == _PATH else _unknown(path)

    async def write_file(path: str, text: str) -> str:
        """Replace a file.

        Args:
            path: Its name, as "solution.py".
            text: All that it shall hold.
        """
        if path != _PATH:
            return _unknown(path)
        workspaces.write(current_thread().thread_id, text)
        return f"{_PATH} has {len(text.splitlines())} lines now"

    async def run_tests() -> str:
        """Run the tests on the files as they are."""
        found = await failures(workspaces.read(current_thread().thread_id), task.visible)
        return "\n".join([f"{len(task.visible) - len(found)} of {len(task.visible)} pass", *found])

    async def adopt(branch: str) -> str:
        """Take over the files of another branch.

        Args:
            branch: Its name.
        """
        try:
            workspaces.write(current_thread().thread_id, workspaces.read(branch))
        except KeyError:
            return f"no branch {branch!r}"
        return f"{_PATH} is that of {branch} now"

    return [read_file, write_file, run_tests, adopt]


async def failures(source: str, tests: Tests, limits: SandboxLimits | None = None) -> list[str]:
    """A line for each of `tests` that `source` fails."""
    results = await evaluate(source, [expression for expression, _ in tests], limits)
    return [
        f"{expression} gave {result.value or result.error}, expected {expected!r}"
        for (expression, expected), result in zip(tests, results, strict=True)
        if not _equals(result, expected)
    ]


def _equals(result: Evaluated, expected: Any) -> bool:
    if result.value is None:
        return False
    try:
        return ast.literal_eval(result.value) == expected
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        return False


def _unknown(path: str) -> str:
    return f"no file {path!r}: the only one is {_PATH}"
