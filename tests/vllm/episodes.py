"""Scripted episodes: what agents do with cursors, at lengths around the edges of pages.

A script ends in heads; `suffixes` goes on from each by every length around the next page edges.
"""

from __future__ import annotations

import asyncio
import math
import random
import statistics
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from rollout_service.cursors import Cursor, Mount
from rollout_service.engine.base import Engine
from tests.engine_cases import Play, span


@dataclass(frozen=True, slots=True, kw_only=True)
class Head:
    """Where an episode goes on."""

    cursor: Cursor
    mounts: tuple[Mount, ...] = ()
    """What the next step sees beside what `cursor` sees."""

    @property
    def num_rows(self) -> int:
        """Rows in front of the next step's first token."""
        return self.cursor.num_visible + sum(mount.num_tokens for mount in self.mounts)


Script = Callable[[Play, int, int], Awaitable[list[Head]]]
"""Plays an episode up to its heads, with a prompt and a middle part of the given lengths."""

_REACH = 2
"""Tokens before and after an edge that are tried."""


async def fork(play: Play, prompt: int, middle: int) -> list[Head]:
    """Children of one step: after the observation, and after a sampled turn."""
    parent = await play.extend(await play.extend(None, prompt), middle)
    return [Head(cursor=parent), Head(cursor=await play.turn(parent, 5, seed=1))]


async def fork_of_fork(play: Play, prompt: int, middle: int) -> list[Head]:
    """Each generation begins on pages of the one before."""
    root = await play.extend(None, prompt)
    child = await play.extend(await play.turn(root, 3, seed=1), middle)
    grandchild = await play.turn(await play.extend(child, 1), 4, seed=2)
    return [Head(cursor=child), Head(cursor=grandchild)]


async def rewind(play: Play, prompt: int, middle: int) -> list[Head]:
    """A step is dropped and another taken in its place, twice."""
    kept = await play.extend(await play.extend(None, prompt), middle)
    dropped = await play.extend(await play.turn(kept, 6, seed=1), 9)
    again = await play.extend(kept, 4)
    await play.engine.evict([dropped])
    return [Head(cursor=kept), Head(cursor=again)]


async def mount_ahead(play: Play, prompt: int, middle: int) -> list[Head]:
    """The producer has gone further than the reader, who jumps."""
    root = await play.extend(None, prompt - 7)
    producer = await play.extend(await play.extend(root, 7), middle)
    reader = await play.extend(root, 5)
    mount = span(producer, middle // 3)
    mounted = await play.extend(reader, 6, mount)
    assert mounted.position_start == producer.next_position > reader.next_position
    return [Head(cursor=reader, mounts=(mount,)), Head(cursor=mounted)]


async def mount_behind(play: Play, prompt: int, middle: int) -> list[Head]:
    """The reader has gone further: no jump."""
    root = await play.extend(None, prompt - 11)
    producer = await play.extend(await play.turn(root, 8, seed=1), middle)
    reader = await play.extend(root, 12 + middle)
    mount = span(producer, middle // 4)
    mounted = await play.extend(reader, 5, mount)
    assert mounted.position_start == reader.next_position > producer.next_position
    return [Head(cursor=reader, mounts=(mount,)), Head(cursor=mounted)]


async def transitive_mount(play: Play, prompt: int, middle: int) -> list[Head]:
    """What the producer had mounted comes along."""
    root = await play.extend(None, prompt)
    first = await play.extend(root, middle)
    second = await play.extend(await play.extend(root, 3), 9, span(first))
    reader = await play.extend(root, 4)
    mounts = (span(first), span(second, 1))
    return [
        Head(cursor=reader, mounts=mounts),
        Head(cursor=await play.turn(await play.extend(reader, 2, *mounts), 4, seed=1)),
    ]


async def two_mounts(play: Play, prompt: int, middle: int) -> list[Head]:
    """One after the other, the second beside what the first had made visible."""
    root = await play.extend(None, prompt)
    first, second = await play.extend(root, middle), await play.extend(root, middle + 3)
    once = await play.extend(root, 4, span(first, 0, (middle + 1) // 2))
    turn = await play.turn(once, 3, seed=1)
    return [
        Head(cursor=turn, mounts=(span(second, middle // 2),)),
        Head(cursor=await play.extend(turn, 5, span(second))),
    ]


async def mount_after_rewind(play: Play, prompt: int, middle: int) -> list[Head]:
    """The producer has dropped the step that is read, and went on."""
    root = await play.extend(None, prompt)
    kept = await play.extend(root, 4)
    dropped = await play.extend(await play.turn(kept, 5, seed=1), middle)
    onward = await play.extend(kept, 7)
    mounted = await play.extend(root, 6, span(dropped))
    return [
        Head(cursor=root, mounts=(span(dropped),)),
        Head(cursor=mounted, mounts=(span(onward, 1),)),
    ]


async def mount_after_eviction(play: Play, prompt: int, middle: int) -> list[Head]:
    """Producer and reader are rebuilt, each under what it saw."""
    root = await play.extend(None, prompt)
    early = await play.extend(root, 5)
    producer = await play.extend(await play.extend(root, 3), middle, span(early, 1, 4))
    reader = await play.extend(root, 6)
    mount = span(producer, middle // 4)
    everything = [root, early, producer, *producer.ancestors(), reader]
    await play.engine.evict(everything)
    mounted = await play.extend(reader, 5, mount)
    await play.engine.evict([*everything, mounted])
    return [Head(cursor=reader, mounts=(mount,)), Head(cursor=mounted)]


SCRIPTS: dict[str, Script] = {
    script.__name__: script
    for script in (
        fork,
        fork_of_fork,
        rewind,
        mount_ahead,
        mount_behind,
        transitive_mount,
        two_mounts,
        mount_after_rewind,
        mount_after_eviction,
    )
}
PLAIN = ("fork", "fork_of_fork", "rewind")
"""Those whose paths a flat run can take: nothing is mounted."""


def edge_lengths(page: int, *, before: int, num_edges: int) -> list[int]:
    """Lengths that end near one of the first `num_edges` page edges behind `before` tokens."""
    first = before // page + 1
    ends = [
        edge * page + reach
        for edge in range(first, first + num_edges)
        for reach in range(-_REACH, _REACH + 1)
    ]
    return [end - before for end in ends if end > before]


def all_lengths(page: int) -> list[tuple[int, int]]:
    """Lengths of prompt and middle: every one around an edge, behind prompts around an edge."""
    prompts = (page // 2, page - 2, page - 1, page, page + 1, page + 2)
    return [
        (prompt, middle)
        for prompt in prompts
        for middle in edge_lengths(page, before=prompt, num_edges=1)
    ]


def some_lengths(page: int, count: int, seed: int) -> list[tuple[int, int]]:
    """A seeded choice among `all_lengths`; they may repeat."""
    return random.Random(seed).choices(all_lengths(page), k=count)


async def suffixes(play: Play, heads: Sequence[Head], *, num_edges: int) -> list[Cursor]:
    """Steps from each head that end around its next page edges, and a turn behind each."""
    made: list[Cursor] = []
    for head in heads:
        page = play.engine.info.page_tokens
        lengths = edge_lengths(page, before=head.num_rows, num_edges=num_edges)
        # All at once: the steps of a batch read the same pages and copy the same partial one.
        pairs = await asyncio.gather(*(_step_and_turn(play, head, length) for length in lengths))
        made += [cursor for pair in pairs for cursor in pair]
    return made


async def _step_and_turn(play: Play, head: Head, length: int) -> tuple[Cursor, Cursor]:
    step = await play.extend(head.cursor, length, *head.mounts)
    turn = await play.turn(step, 4, seed=length)
    await play.engine.release([step, turn])
    return step, turn


def rms(one: Sequence[float], other: Sequence[float]) -> float:
    """Root-mean-square difference."""
    return math.sqrt(statistics.fmean((a - b) ** 2 for a, b in zip(one, other, strict=True)))


async def check_against(oracle: Engine, *cursors: Cursor, tolerance: float = 2e-5) -> None:
    """Scored tokens must have the oracle's log-probabilities."""
    for cursor in cursors:
        expected = await logprobs_of(oracle, cursor)
        pairs = zip(expected, cursor.sampled_logprobs, strict=True)
        worst = max(abs(one - other) for one, other in pairs)
        assert worst <= tolerance, f"{worst} nats from the oracle"


async def logprobs_of(oracle: Engine, cursor: Cursor) -> Sequence[float]:
    """What a cold engine says of a cursor's scored tokens; all that it sees is computed anew."""
    again = await oracle.extend(
        cursor.parent,
        cursor.token_ids,
        mounts=cursor.mounts,
        policy_version=cursor.policy_version,
        score_from=cursor.sampled.index(True),
    )
    assert again.position_start == cursor.position_start
    await oracle.release([again])
    return again.sampled_logprobs
