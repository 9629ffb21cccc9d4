"""Every token that is computed more than once has its cause."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest

from rollout_service.cursors import Cursor
from tests.engine_cases import Play, detokenize, span

pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.slow]


def num_distinct(cursors: Sequence[Cursor]) -> int:
    """Tokens that had to be computed: all but the last ones that nothing follows or mounts."""
    followed = {cursor.parent.cursor_id for cursor in cursors if cursor.parent is not None}
    for cursor in cursors:
        for mount in cursor.mounts:
            if mount.end == len(mount.source.token_ids):
                followed.add(mount.source.cursor_id)
    num_open = sum(cursor.cursor_id not in followed for cursor in cursors)
    return sum(len(cursor.token_ids) for cursor in cursors) - num_open


@pytest.mark.parametrize("family", ["qwen3", "granitemoehybrid"])
async def test_causes_sum_to_all_that_was_computed_again(play: Play) -> None:
    engine, before = play.engine, play.engine.stats()

    def again(*causes: str) -> int:
        now = engine.stats().tokens_recomputed
        return sum(now[cause] - before.tokens_recomputed[cause] for cause in causes or now)

    root = await play.extend(None, 80)
    made = [root, *await asyncio.gather(*(play.turn(root, 8, seed=n) for n in range(3)))]
    assert again() == again("last_token") == 2
    # Ended by a stop id, which a step ahead computes and throws away, and by a stop string.
    free = await play.turn(root, 8, seed=5)
    at = next(index for index in range(6, 11) if free.token_ids[index] not in free.token_ids[3:6])
    stop_id = frozenset({free.token_ids[at]})
    by_id = await play.turn(root, 30, seed=5, stop_token_ids=stop_id)
    text = detokenize(free.token_ids[3:])[2:6]
    by_string = await play.turn(root, 30, seed=5, stop=(text,))
    made += [free, by_id, by_string]
    made += [await play.turn(ended, 4, seed=6) for ended in (by_id, by_string)]
    # Its first token is scored: the row in front of the last one is wanted once more.
    made.append(await play.extend(by_string, 5))
    assert again("lead") == len(by_string.token_ids)
    rewound = await play.extend(root, 7)
    reader = await play.extend(rewound, 6, span(made[1]))
    other = await play.extend(made[2], 5, span(rewound, 0, 4), span(made[1], 2, 9))
    made += [rewound, reader, other, await play.turn(rewound, 5, seed=1)]
    assert again("eviction") == 0
    await engine.evict(made)
    heads = [reader, other, by_id, *made[1:4]]
    made += await asyncio.gather(*(play.turn(head, 4, seed=2) for head in heads))
    made.append(await play.extend(other, 3, span(by_id)))
    mounts = (span(rewound, 0, 4),)
    made.append(await engine.extend(root, play.tokens(5), mounts=mounts, policy_version=0))
    computed = engine.stats().tokens_computed - before.tokens_computed
    assert again("eviction") > 100
    assert again() == computed - num_distinct(made)
