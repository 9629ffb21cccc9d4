"""Agents of few lines that say what their task asks for, and the command that runs agents."""

from __future__ import annotations

import asyncio
import sys
from typing import Any

from harness_sdk import Thread
from harness_sdk.agents import Agent
from tests.service.sdk_service import calls


def speaker(text: str) -> str | None:
    """Says what it is asked to say; asked to hang, it does."""
    word = text.rsplit("say ", 1)[1].split("<")[0]
    return None if word == "hang" else calls(("done", {"answer": word}))


def agent(run: Any, *, tasks: Any = ("a", "b"), score: Any = None) -> Agent:
    """An agent without a folder."""
    return Agent(
        name="inline",
        tasks=lambda: [{"id": name} for name in tasks],
        run=run,
        score=score or (lambda task, answer: float(answer == task["id"])),
        primitives=(),
    )


async def say(thread: Thread, task: dict[str, str]) -> str:
    """One turn; its answer is what is returned."""
    await thread.generate(f"say {task['id']}")
    return task["id"]


async def octopus(*words: str, output: int = asyncio.subprocess.PIPE) -> asyncio.subprocess.Process:
    """The command with SIGINT ignored, as a script's `command &` starts it.

    Args:
        words: Behind `octopus`.
        output: File of what it writes; two pipes unless told otherwise.
    """
    return await asyncio.create_subprocess_exec(
        "sh",
        "-c",
        'trap "" INT; exec "$0" "$@"',
        sys.executable,
        "-m",
        "harness_sdk.cli",
        *words,
        stdout=output,
        stderr=output,
    )
