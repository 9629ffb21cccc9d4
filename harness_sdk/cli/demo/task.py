"""The relay: one worker finds a code, another needs it at the door, the root wants what is inside.

Worker `b` can know the code only by reading worker `a`; the root sees neither shelf nor door.
"""

from __future__ import annotations

import asyncio
import contextvars
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from harness_sdk.tool_loop import LoopEvent
from harness_sdk.types import PRIMITIVES

DEMO_PRIMITIVES = tuple(name for name in PRIMITIVES if name != "rewind")
"""What the demo's model is offered."""

FINDER, OPENER = "a", "b"
"""Names of the two workers."""

VAULTS = (
    "amber", "basalt", "cedar", "delta", "ember", "fjord", "garnet", "heron",
    "iris", "jade", "kelp", "larch", "mica", "nickel", "onyx", "pearl",
)  # fmt: skip

QUESTIONS = ("Open vault {}.", "What is in vault {}?", "Vault {}: what is inside?")

SHELVES = ("code {code}, dust {dust}", "dust {dust}, code {code}")

_DIGITS = 3
_WAIT_S = 30.0

_thread_id: contextvars.ContextVar[str] = contextvars.ContextVar("thread_id", default="")


@dataclass(frozen=True, slots=True, kw_only=True)
class RelayTask:
    """One vault."""

    task_id: str
    question: str
    """What the root is asked."""
    code: str
    """On the shelf, for `a` alone."""
    treasure: str
    """Behind the door; the right answer."""
    dust: str
    """A number on the shelf that is of no use."""
    shelf: str
    """What `a` sees."""


def draw_tasks(seed: int) -> Iterator[RelayTask]:
    """Tasks without end, the same ones for the same seed."""
    rng = random.Random(seed)
    index = 0
    while True:
        code, treasure, dust = draw_numbers(rng, 3)
        yield RelayTask(
            task_id=f"relay-{seed}-{index}",
            question=rng.choice(QUESTIONS).format(rng.choice(VAULTS)),
            code=code,
            treasure=treasure,
            dust=dust,
            shelf=rng.choice(SHELVES).format(code=code, dust=dust),
        )
        index += 1


def draw_numbers(rng: random.Random, count: int) -> list[str]:
    """Different numbers, as they are written."""
    return [str(n) for n in rng.sample(range(10 ** (_DIGITS - 1), 10**_DIGITS), count)]


def score(task: RelayTask, answer: str) -> float:
    """Outcome y: 1 for the treasure, else 0."""
    return 1.0 if answer.strip() == task.treasure else 0.0


class Vault:
    """The world of one episode: what each thread's `look` and `open` find.

    `b`'s look answers once `a` has ended, so that there is something to read.

    Args:
        task: The vault's numbers.
        threads: Ids of the episode's threads so far.
    """

    def __init__(self, task: RelayTask, threads: Callable[[], Any]) -> None:
        self._task = task
        self._threads = threads
        self._finder_ended = asyncio.Event()

    @property
    def tools(self) -> list[Callable[..., Any]]:
        """The agent's own tools."""

        async def look() -> str:
            """Look around."""
            return await self.look(_thread_id.get())

        async def open(code: str) -> str:
            """Try a code at the door."""
            return self.open(_thread_id.get(), code)

        return [look, open]

    def follow(self, event: LoopEvent) -> None:
        """Learn from the loop which thread calls, and when `a` ends."""
        _thread_id.set(event.thread_id)
        if event.status is not None:
            self.thread_ended(event.thread_id)

    def thread_ended(self, thread_id: str) -> None:
        """`b` need not wait any longer for this thread."""
        if thread_id == FINDER:
            self._finder_ended.set()

    async def look(self, thread_id: str) -> str:
        """What a thread sees."""
        if thread_id == FINDER:
            return self._task.shelf
        if thread_id == OPENER:
            await self._wait_for_finder()
            return f"door, code is with {FINDER}"
        return f"far away, fork {FINDER} and {OPENER}"

    def open(self, thread_id: str, code: str) -> str:
        """What a code opens."""
        if thread_id != OPENER:
            return "no door"
        return f"inside {self._task.treasure}" if code.strip() == self._task.code else "wrong code"

    async def _wait_for_finder(self) -> None:
        if FINDER not in self._threads():
            return
        async with asyncio.timeout(_WAIT_S):
            await self._finder_ended.wait()
