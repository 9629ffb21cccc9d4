"""Scripted episodes of the relay, played through the real service as demonstrations.

They are right only part of the time: some roots guess without forking, some openers guess
without reading.
"""

from __future__ import annotations

import asyncio
import json
import random
from dataclasses import dataclass
from typing import Any, Literal

from harness_sdk.cli.demo.task import FINDER, OPENER, RelayTask, Vault, draw_numbers
from harness_sdk.types import Message, Turn

Strategy = Literal["relay", "guess_answer", "guess_code"]

SUBTASKS = {FINDER: "find the code", OPENER: "open the door"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Script:
    """What the actors of one episode do."""

    strategy: Strategy
    guess: str
    """Number that a guessing strategy invents."""


def draw_script(rng: random.Random, task: RelayTask, *, forks: float, reads: float) -> Script:
    """A strategy at random.

    Args:
        rng: Source of chance.
        task: Its numbers are never guessed.
        forks: Share of roots that fork.
        reads: Share of openers that read.
    """
    taken = (task.code, task.treasure, task.dust)
    guess = next(number for number in draw_numbers(rng, 4) if number not in taken)
    if rng.random() >= forks:
        return Script(strategy="guess_answer", guess=guess)
    if rng.random() >= reads:
        return Script(strategy="guess_code", guess=guess)
    return Script(strategy="relay", guess=guess)


async def play(episode: Any, task: RelayTask, script: Script) -> str:
    """Play `script` and return the root's answer.

    Args:
        episode: A `harness_sdk.episode.Episode`, or whatever has its threads' calls.
        task: The vault.
        script: What the actors do.
    """
    root = episode.root
    vault = Vault(task, lambda: episode.threads)
    if script.strategy == "guess_answer":
        await root.generate(
            task.question, tools=vault.tools, demonstration=call_text("done", answer=script.guess)
        )
        await root.done(script.guess)
        return script.guess
    await root.generate(
        task.question, tools=vault.tools, demonstration=call_text("fork", branches=SUBTASKS)
    )
    children = await root.fork(SUBTASKS)
    async with asyncio.TaskGroup() as group:
        group.create_task(_find(children[FINDER], vault, task))
        group.create_task(_open(children[OPENER], vault, task, script))
        await root.generate(demonstration=call_text("wait"))
        results = await root.wait()
    answer = next(result.answer for result in results if result.thread_id == OPENER)
    await _done(root, (), answer)
    return answer


async def _find(thread: Any, vault: Vault, task: RelayTask) -> None:
    turn = await thread.generate(demonstration=call_text("look"))
    shelf = await vault.look(thread.thread_id)
    await _done(thread, _observation(turn, shelf), task.code)
    vault.thread_ended(thread.thread_id)


async def _open(thread: Any, vault: Vault, task: RelayTask, script: Script) -> None:
    turn = await thread.generate(demonstration=call_text("look"))
    seen: Any = _observation(turn, await vault.look(thread.thread_id))
    code = script.guess
    if script.strategy == "relay":
        code = task.code
        demonstration = call_text("read_thread", branch=FINDER, steps=[1, 1])
        await thread.generate(seen, demonstration=demonstration)
        await thread.read_thread(FINDER, (1, 1))
        seen = ()
    turn = await thread.generate(seen, demonstration=call_text("open", code=code))
    result = vault.open(thread.thread_id, code)
    answer = task.treasure if script.strategy == "relay" else "none"
    await _done(thread, _observation(turn, result), answer)


async def _done(thread: Any, seen: Any, answer: str) -> None:
    await thread.generate(seen, demonstration=call_text("done", answer=answer))
    await thread.done(answer)


def call_text(name: str, **arguments: Any) -> str:
    """A turn that makes one call, as a model writes it.

    Example:
        `<tool_call>\\n{"name": "look", "arguments": {}}\\n</tool_call>`
    """
    body = json.dumps({"name": name, "arguments": arguments})
    return f"<tool_call>\n{body}\n</tool_call>"


def _observation(turn: Turn, content: str) -> Message:
    call = turn.tool_calls[0]
    return Message(role="tool", content=content, name=call.name, tool_call_id=call.call_id)
