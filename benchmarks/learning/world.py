"""The vault with long pages: a thread's budget holds one of them, so that branching pays.

A code lies on a shelf, and behind the door that it opens lies the treasure that is asked for. The
first look at the shelf may be a detour. A root that forks stays at home: worker `a` is at the
shelf, worker `b` at the door, and `b` can have the code only from `a`. A root that does not fork
does everything itself.
"""

from __future__ import annotations

import asyncio
import random
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass

from harness_sdk.cli.demo.task import FINDER, OPENER, QUESTIONS, VAULTS, draw_numbers
from harness_sdk.types import Limits, SamplingOptions

LIMITS = Limits(thread_budget=210, answer_reserve=24, max_threads=2, max_turns=4)
"""One long page fits, two do not. Four turns are what a worker needs: look, rewind, look and done,
or look, read_thread, open and done."""

SAMPLING = SamplingOptions(max_tokens=64)

LONG, SHORT = 24, 2
"""Useless numbers on a page; each takes four tokens."""

_SHARE = 2 / 3
"""Of detours, of long shelves and of long insides."""

_WAIT_S = 30.0


@dataclass(frozen=True, slots=True, kw_only=True)
class VaultTask:
    """One vault. Detour, long shelf and long inside are independent."""

    task_id: str
    question: str
    """What the root is asked."""
    code: str
    """On the shelf."""
    treasure: str
    """Behind the door; the right answer."""
    detour: bool
    """Whether the first look at the shelf finds a long page without the code."""
    shelf: str
    """The page with the code."""
    shelf_is_long: bool
    inside: str
    """The page with the treasure."""
    inside_is_long: bool
    detour_page: str


def draw_tasks(seed: int) -> Iterator[VaultTask]:
    """Tasks without end, the same ones for the same seed."""
    rng = random.Random(seed)
    index = 0
    while True:
        code, treasure = draw_numbers(rng, 2)
        detour, shelf_is_long, inside_is_long = (rng.random() < _SHARE for _ in range(3))
        shelf = _dust(rng, LONG if shelf_is_long else SHORT)
        shelf.insert(rng.randrange(len(shelf) + 1), f"code {code}")
        inside = [f"inside {treasure}", *_dust(rng, LONG if inside_is_long else SHORT)]
        yield VaultTask(
            task_id=f"vault-{seed}-{index}",
            question=rng.choice(QUESTIONS).format(rng.choice(VAULTS)),
            code=code,
            treasure=treasure,
            detour=detour,
            shelf=", ".join(shelf),
            shelf_is_long=shelf_is_long,
            inside=", ".join(inside),
            inside_is_long=inside_is_long,
            detour_page=", ".join([*_dust(rng, LONG), "no door"]),
        )
        index += 1


def score(task: VaultTask, answer: str) -> float:
    """Outcome y: 1 for the treasure, else 0."""
    return 1.0 if answer.strip() == task.treasure else 0.0


class World:
    """One episode's shelf and door.

    Args:
        task: The vault.
        threads: Ids of the episode's threads so far.
    """

    def __init__(self, task: VaultTask, threads: Callable[[], Collection[str]]) -> None:
        self._task = task
        self._threads = threads
        self._looks: defaultdict[str, int] = defaultdict(int)
        self._pages: defaultdict[str, list[str]] = defaultdict(list)
        self._finder_ended = asyncio.Event()

    def rewound(self, thread_id: str) -> None:
        """`thread_id` went back to its beginning: the pages are gone, the looks have been."""
        self._pages[thread_id].clear()

    def thread_ended(self, thread_id: str) -> None:
        """The opener need not wait any longer for this thread."""
        if thread_id == FINDER:
            self._finder_ended.set()

    async def look(self, thread_id: str) -> str:
        """What a thread sees; the opener sees it once the finder has ended."""
        if thread_id == OPENER:
            if FINDER in self._threads():
                async with asyncio.timeout(_WAIT_S):
                    await self._finder_ended.wait()
            return f"door, code is with {FINDER}"
        if not self._is_at_shelf(thread_id):
            return f"far away, fork {FINDER} and {OPENER}"
        self._looks[thread_id] += 1
        is_detour = self._task.detour and self._looks[thread_id] == 1
        page = self._task.detour_page if is_detour else self._task.shelf
        self._pages[thread_id].append(page)
        return page

    def open(self, thread_id: str, code: str) -> str:
        """What a code opens."""
        if thread_id != OPENER and not self._is_alone():
            return "no door"
        return self._task.inside if code.strip() == self._task.code else "wrong code"

    def copy(self, branch: str, steps: Sequence[int]) -> str:
        """The pages that `branch` saw in `steps`, first and last, as text."""
        first, last = min(steps, default=1), max(steps, default=1)
        return ", ".join(self._pages[branch][max(first, 1) - 1 : last]) or "wrong code"

    def _is_alone(self) -> bool:
        return len(self._threads()) == 1

    def _is_at_shelf(self, thread_id: str) -> bool:
        return thread_id == FINDER or self._is_alone()


def _dust(rng: random.Random, count: int) -> list[str]:
    return [f"dust {number}" for number in draw_numbers(rng, count)]
