"""The agent-shaped load: what one episode does, whoever computes it.

A root takes a turn and forks; each branch searches and opens pages in turns, most go back two steps
once and do them again, each reads steps of its peers; the root takes a last turn.
"""

from __future__ import annotations

import asyncio
import dataclasses
import random
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

from benchmarks.vllm_engine.report import Report, say
from benchmarks.vllm_engine.scale import Load
from benchmarks.vllm_engine.shapes import Texts

_TELL_S = 10
_NUM_WARM_UP = 4
ROOT_TOKENS = 2048
"""Of a task with its instructions, before it is divided."""
_REWOUND_SHARE = 0.7
"""Branches that rewind once: 6.99 rewinds an episode of ten branches."""
_READ_AT = {2: 1, 3: 2}
"""Before which turn a branch reads which step of a peer: with the third reads of some branches
below, 23.9 reads an episode of ten branches."""


class Player(Protocol):
    """Whoever serves an episode's turns."""

    async def turn(self, thread: str, text: str, num_tokens: int) -> None:
        """Append an observation and sample."""
        ...

    async def fork(self, names: Sequence[str]) -> None:
        """Branch from the root."""
        ...

    async def rewind(self, thread: str, step: int) -> None:
        """Back to the end of `step`."""
        ...

    async def read(self, thread: str, peer: str, step: int) -> None:
        """See a step of a peer."""
        ...


@dataclass(slots=True)
class Tally:
    """What episodes did, and how long their turns took."""

    turns: int = 0
    forks: int = 0
    rewinds: int = 0
    reads: int = 0
    turn_s: list[float] = field(default_factory=list)
    episode_s: list[float] = field(default_factory=list)
    """From the wish to open an episode to its end, so waiting for admission is part of it."""


@asynccontextmanager
async def told(
    report: Report, name: str, tally: Tally, figures: Callable[[float], dict[str, Any]]
) -> AsyncIterator[None]:
    """Write every few seconds what has been played: a run that is cut short keeps it.

    Args:
        figures: What else to keep, from the seconds since the beginning.
    """
    begin = time.perf_counter()

    async def tell() -> None:
        while True:
            await asyncio.sleep(_TELL_S)
            seconds = time.perf_counter() - begin
            played = {"seconds": round(seconds, 2), "episodes": len(tally.episode_s)}
            say(f"{name}: {played | {'turns': tally.turns}}")
            report.put_detail(f"{name}_so_far", played | figures(seconds))

    telling = asyncio.create_task(tell())
    try:
        yield
    finally:
        telling.cancel()


@dataclass(frozen=True, slots=True)
class Script:
    """Texts of one episode, drawn before anything is timed."""

    prompt: str
    branches: list[list[str]]
    """Observations of each branch: those of its turns, then those that follow a rewind."""
    load: Load


def load_scripts(load: Load, texts: Texts) -> tuple[list[Script], list[Script]]:
    """Scripts of the load and of what warms an engine up before; the same for every engine."""
    few = dataclasses.replace(load, num_episodes=min(_NUM_WARM_UP, load.num_episodes))
    return write_scripts(load, texts.reseeded(1)), write_scripts(few, texts.reseeded(2))


def write_scripts(load: Load, texts: Texts) -> list[Script]:
    """One script an episode; the same for the same seed of `texts`."""
    search, page = load.observation_tokens
    count = load.num_turns + 2
    return [
        Script(
            prompt=texts.take(max(ROOT_TOKENS // load.divisor, 16)),
            branches=[
                ["", *(texts.take((search, page)[turn % 2]) for turn in range(count))]
                for _ in range(load.num_branches)
            ],
            load=load,
        )
        for _ in range(load.num_episodes)
    ]


async def play(script: Script, player: Player, tally: Tally, rng: random.Random) -> None:
    """Run one episode."""
    load = script.load
    clock = _Clock(player, tally, load.turn_tokens)
    await clock.turn("root", script.prompt)
    names = [f"branch-{number}" for number in range(load.num_branches)]
    await player.fork(names)
    tally.forks += len(names)
    rewound = {name: rng.random() < _REWOUND_SHARE for name in names}
    finished = {name: [asyncio.Event() for _ in range(load.num_turns + 1)] for name in names}
    async with asyncio.TaskGroup() as group:
        for number in range(len(names)):
            branch = _Branch(script, clock, names, number, finished, rewound[names[number]])
            group.create_task(branch.run())
    await clock.turn("root", "the branches have ended")


class _Clock:
    """A player whose turns are timed."""

    def __init__(self, player: Player, tally: Tally, num_tokens: int) -> None:
        self.player = player
        self.tally = tally
        self._num_tokens = num_tokens

    async def turn(self, thread: str, text: str) -> None:
        begin = time.perf_counter()
        await self.player.turn(thread, text, self._num_tokens)
        self.tally.turn_s.append(time.perf_counter() - begin)
        self.tally.turns += 1


class _Branch:
    """One branch of an episode."""

    def __init__(
        self,
        script: Script,
        clock: _Clock,
        names: list[str],
        number: int,
        finished: dict[str, list[asyncio.Event]],
        rewinds: bool,
    ) -> None:
        self._script = script
        self._clock = clock
        self._names = names
        self._number = number
        self._finished = finished
        self._rewinds = rewinds and script.load.num_turns > 2

    async def run(self) -> None:
        name, texts = self._names[self._number], self._script.branches[self._number]
        num_turns = self._script.load.num_turns
        for turn in range(num_turns):
            if turn in _READ_AT:
                await self._read(_READ_AT[turn], 2 * turn - 3)
            if turn == 3 and self._number % 5 < 2:
                await self._read(1, 2)
            await self._clock.turn(name, texts[turn])
            # Turn k + 1 brings the observation that finishes step k.
            self._finished[name][turn].set()
        if self._rewinds:
            # Back over the last two finished steps; they are taken again.
            await self._clock.player.rewind(name, num_turns - 2)
            self._clock.tally.rewinds += 1
            for text in texts[-2:]:
                await self._clock.turn(name, text)

    async def _read(self, step: int, distance: int) -> None:
        peer = self._names[(self._number + distance) % len(self._names)]
        if peer == self._names[self._number] or step >= self._script.load.num_turns:
            return
        await self._finished[peer][step].wait()
        await self._clock.player.read(self._names[self._number], peer, step)
        self._clock.tally.reads += 1
