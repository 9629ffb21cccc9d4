"""Scripted episodes: what agents do with cursors, at lengths around the edges of pages."""

from __future__ import annotations

import random
from collections.abc import Awaitable, Callable, Sequence

from rollout_service.cursors import Cursor
from rollout_service.engine.base import Engine
from tests.engine_cases import Play, span

Script = Callable[[Play, int, int], Awaitable[list[Cursor]]]
"""Plays one episode with a prompt and a middle part of the given lengths; returns what to check."""

_REACH = 2
"""Tokens before and after an edge that are tried."""


async def fork(play: Play, prompt: int, middle: int) -> list[Cursor]:
    """Three children of one step, two of which sample."""
    root = await play.extend(None, prompt)
    parent = await play.extend(root, middle)
    child = await play.extend(parent, 7)
    return [child, await play.turn(parent, 5, seed=1), await play.turn(child, 4, seed=2)]


async def fork_of_fork(play: Play, prompt: int, middle: int) -> list[Cursor]:
    """Each generation begins on pages of the one before."""
    root = await play.extend(None, prompt)
    child = await play.extend(await play.turn(root, 3, seed=1), middle)
    grandchild = await play.turn(await play.extend(child, 1), 4, seed=2)
    return [child, grandchild, await play.extend(grandchild, 5), await play.extend(child, 6)]


async def rewind(play: Play, prompt: int, middle: int) -> list[Cursor]:
    """A step is dropped and another taken in its place, twice."""
    kept = await play.extend(await play.extend(None, prompt), middle)
    dropped = await play.extend(await play.turn(kept, 6, seed=1), 9)
    again = await play.extend(kept, 4)
    await play.engine.evict([dropped])
    return [again, await play.turn(kept, 5, seed=2), await play.extend(again, 3)]


async def mount_ahead(play: Play, prompt: int, middle: int) -> list[Cursor]:
    """The producer has gone further than the reader, who jumps."""
    root = await play.extend(None, prompt)
    producer = await play.extend(root, middle)
    reader = await play.extend(root, 5)
    mounted = await play.extend(reader, 6, span(producer, middle // 3))
    assert mounted.position_start > reader.next_position or middle <= 5
    return [mounted, await play.turn(mounted, 4, seed=1)]


async def mount_behind(play: Play, prompt: int, middle: int) -> list[Cursor]:
    """The reader has gone further: no jump."""
    root = await play.extend(None, prompt)
    producer = await play.turn(root, 8, seed=1)
    reader = await play.extend(root, middle + len(producer.token_ids))
    mounted = await play.extend(reader, 5, span(producer, 2, 9))
    assert mounted.position_start == reader.next_position
    return [mounted, await play.extend(mounted, 3)]


async def transitive_mount(play: Play, prompt: int, middle: int) -> list[Cursor]:
    """What the producer had mounted comes along."""
    root = await play.extend(None, prompt)
    first = await play.extend(root, middle)
    second = await play.extend(await play.extend(root, 3), 9, span(first, 1))
    reader = await play.extend(root, 4)
    mounted = await play.extend(reader, 5, span(first, 1), span(second))
    return [mounted, await play.turn(mounted, 4, seed=1)]


async def two_mounts(play: Play, prompt: int, middle: int) -> list[Cursor]:
    """One after the other, the second beside what the first had made visible."""
    root = await play.extend(None, prompt)
    first, second = await play.extend(root, middle), await play.extend(root, middle + 3)
    once = await play.extend(root, 4, span(first, 0, (middle + 1) // 2))
    twice = await play.extend(await play.turn(once, 3, seed=1), 5, span(second, middle // 2))
    return [once, twice, await play.extend(once, 6)]


async def mount_after_rewind(play: Play, prompt: int, middle: int) -> list[Cursor]:
    """The producer has dropped the step that is read, and went on."""
    root = await play.extend(None, prompt)
    kept = await play.extend(root, 4)
    dropped = await play.extend(await play.turn(kept, 5, seed=1), middle)
    onward = await play.extend(kept, 7)
    mounted = await play.extend(root, 6, span(dropped))
    both = await play.extend(mounted, 4, span(onward, 1))
    return [onward, mounted, both]


async def mount_after_eviction(play: Play, prompt: int, middle: int) -> list[Cursor]:
    """Producer and reader are rebuilt, each under what it saw."""
    root = await play.extend(None, prompt)
    early = await play.extend(root, 5)
    producer = await play.extend(await play.extend(root, 3), middle, span(early, 1, 4))
    reader = await play.extend(root, 6)
    await play.engine.evict([root, early, producer, *producer.ancestors(), reader])
    mounted = await play.extend(reader, 5, span(producer, middle // 4))
    await play.engine.evict([producer, reader, mounted])
    return [mounted, await play.turn(mounted, 4, seed=1)]


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
    """Lengths of prompt and middle: every one around two edges, behind prompts around an edge."""
    prompts = (page // 2, page - 1, page, page + 1)
    return [
        (prompt, middle)
        for prompt in prompts
        for middle in edge_lengths(page, before=prompt, num_edges=2)
    ]


def some_lengths(page: int, count: int, seed: int) -> list[tuple[int, int]]:
    """A seeded choice among `all_lengths`."""
    return random.Random(seed).sample(all_lengths(page), count)


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
