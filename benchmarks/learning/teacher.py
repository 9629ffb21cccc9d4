"""Scripted episodes, played through the real service as demonstrations for the warm-up.

They show the best that a variant's primitives allow, and right beside it what does not work: roots
that guess, openers that do not read, finders that do not go back from a detour.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.learning.agent import number_in, world_tools
from benchmarks.learning.variants import Variant
from benchmarks.learning.world import VaultTask, World
from harness_sdk.cli.demo.task import FINDER, OPENER, draw_numbers
from harness_sdk.cli.demo.teacher import SUBTASKS, call_text
from harness_sdk.errors import BudgetExhausted
from harness_sdk.types import Message, Turn

FORKS, READS, WALKS, GOES_BACK = 0.5, 0.75, 0.5, 0.75
"""Shares of the scripts whose root forks; of those whose opener reads, and of the others whose root
goes and looks; and of all those that go back where it helps. Branches that mostly fail would lose
to walking before the policy has learned what makes them succeed."""

STEPS = (1, 2)
"""What an opener reads of the finder: its surviving pages, whether it went back or not."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Script:
    """What the actors of one episode do."""

    forks: bool
    guesses: bool
    """A root that does not fork answers at once; an opener does not read."""
    goes_back: bool
    """After a detour, or with a code in hand before a second long page."""
    replies_plainly: bool
    """The root that forked answers without a call."""
    guess: str
    """Number that a guesser invents."""


def draw_script(rng: random.Random, task: VaultTask, variant: Variant) -> Script:
    """A strategy at random, where the variant leaves a choice."""
    taken = (task.code, task.treasure)
    forks = variant.forks and rng.random() < FORKS
    return Script(
        forks=forks,
        guesses=rng.random() >= (READS if forks else WALKS),
        goes_back=variant.rewinds and rng.random() < GOES_BACK,
        replies_plainly=rng.random() < variant.plain_replies,
        guess=next(number for number in draw_numbers(rng, 3) if number not in taken),
    )


async def play(episode: Any, task: VaultTask, script: Script, variant: Variant) -> str:
    """Play `script`; the root's answer, empty where its budget ended before.

    Args:
        episode: A `harness_sdk.episode.Episode`, or whatever has its threads' calls.
        task: The vault.
        script: What the actors do.
        variant: What they can do.
    """
    world = World(task, lambda: episode.threads)
    root = _Actor(episode.root, world, variant)
    root.told(task.question, world_tools(world, variant))
    try:
        if script.forks:
            return await _lead(root, task, script)
        if script.guesses:
            return await root.done(script.guess)
        return await _walk(root, task, script)
    except BudgetExhausted:
        return ""


async def _lead(root: _Actor, task: VaultTask, script: Script) -> str:
    await root.turn("fork", branches=SUBTASKS)
    children = await root.thread.fork(SUBTASKS)
    finder, opener = (root.worker(children[name]) for name in (FINDER, OPENER))
    async with asyncio.TaskGroup() as group:
        group.create_task(_find(finder, task, script))
        opening = group.create_task(_open(opener, task, script))
        await root.turn("wait")
        await root.thread.wait()
    answer = opening.result()
    if not script.replies_plainly:
        return await root.done(answer)
    return await root.reply(f"inside {answer}", answer)


async def _find(finder: _Actor, task: VaultTask, script: Script) -> None:
    try:
        await finder.look()
        if task.detour:
            if script.goes_back:
                await finder.rewind()
            await finder.look()
        await finder.done(task.code)
    except BudgetExhausted:
        await finder.thread.cancel("the second page does not fit")
    finally:
        finder.world.thread_ended(FINDER)


async def _open(opener: _Actor, task: VaultTask, script: Script) -> str:
    try:
        await opener.look()
        if not script.guesses:
            await opener.read(FINDER)
            if task.detour and task.shelf_is_long and not script.goes_back:
                return await opener.done("none")
        result = await opener.open(script.guess if script.guesses else task.code)
        return await opener.done(task.treasure if result == task.inside else "none")
    except BudgetExhausted:
        await opener.thread.cancel("the page does not fit")
        return "none"


async def _walk(root: _Actor, task: VaultTask, script: Script) -> str:
    """One thread does it all; with a detour no turn is left to go back."""
    await root.look()
    if task.detour:
        await root.look()
    elif script.goes_back and task.shelf_is_long and task.inside_is_long:
        await root.rewind(f"code {task.code}")
    await root.open(task.code)
    return await root.done(task.treasure)


class _Actor:
    """One thread: takes what it sees into its next scripted turn."""

    def __init__(self, thread: Any, world: World, variant: Variant) -> None:
        self.thread = thread
        self.world = world
        self.variant = variant
        self._messages: Message | str | Sequence[Message] = ()
        self._tools: Any = None

    def worker(self, thread: Any) -> _Actor:
        """An actor for a child."""
        return _Actor(thread, self.world, self.variant)

    def told(self, question: str, tools: Any) -> None:
        """What the root begins with."""
        self._messages, self._tools = question, tools

    async def turn(self, name: str, **arguments: Any) -> Turn:
        """Call something."""
        return await self._say(call_text(name, **arguments))

    async def look(self) -> None:
        """Look and see."""
        turn = await self.turn("look")
        self._see(turn, await self.world.look(self.thread.thread_id))

    async def open(self, code: str) -> str:
        """Try a code; what it opens."""
        turn = await self.turn("open", code=code)
        result = self.world.open(self.thread.thread_id, code)
        self._see(turn, result)
        return result

    async def read(self, branch: str) -> None:
        """Mount or copy what a branch saw."""
        turn = await self.turn("read_thread", branch=branch, steps=list(STEPS))
        if self.variant.copies_text:
            self._see(turn, self.world.copy(branch, STEPS))
        else:
            await self.thread.read_thread(branch, STEPS)

    async def rewind(self, note: str = "") -> None:
        """Go back to the beginning."""
        await self.turn("rewind", step=0, **({"note": note} if note else {}))
        await self.thread.rewind(0, note=note)
        self.world.rewound(self.thread.thread_id)

    async def reply(self, text: str, answer: str) -> str:
        """Answer without a call, and call `done` where the variant asks for it."""
        await self._say(text)
        match self.variant.ending:
            case "prompt":
                return await self.done(answer)
            case "fallback":
                await self.thread.done(number_in(text))
                return number_in(text)
            case "strict":
                await self.thread.done("")
                return ""

    async def done(self, answer: str) -> str:
        """End with an answer."""
        await self.turn("done", answer=answer)
        await self.thread.done(answer)
        return answer

    async def _say(self, text: str) -> Turn:
        turn = await self.thread.generate(self._messages, tools=self._tools, demonstration=text)
        self._messages, self._tools = (), None
        return turn

    def _see(self, turn: Turn, content: str) -> None:
        call = turn.tool_calls[0]
        self._messages = Message(
            role="tool", content=content, name=call.name, tool_call_id=call.call_id
        )
