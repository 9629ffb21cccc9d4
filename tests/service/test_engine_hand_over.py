"""A turn that loses its last token keeps its residency, on every engine."""

from __future__ import annotations

from rollout_service.cursors import Cursor, child_cursor
from tests.engine_cases import Play


async def test_a_turn_without_its_last_token_takes_its_residency_over(play: Play) -> None:
    root = await play.extend(None, 25)
    turns = [await play.turn(root, 6, temperature=1.0, seed=seed) for seed in range(3)]
    kept = [without_last(turn) for turn in turns]
    # One handed over at once, one after its last token was computed, one after an eviction.
    await play.extend(turns[1], (1,))
    await play.engine.evict([turns[2]])
    resident, before = play.engine.stats().resident_cursors, play.engine.stats()
    for turn, shorter in zip(turns, kept, strict=True):
        await play.engine.hand_over(turn, shorter)
    assert play.engine.stats().resident_cursors == resident - 1
    play.check(await play.extend(kept[0], (4, 5)))
    after = play.engine.stats()
    assert after.tokens_computed - before.tokens_computed == 2
    assert after.tokens_recomputed["eviction"] == 0
    play.check(await play.extend(kept[1], (4, 5)), await play.extend(kept[2], (4, 5)))
    assert play.engine.stats().tokens_recomputed["eviction"] == 2 * len(kept[1].token_ids)


def without_last(turn: Cursor) -> Cursor:
    return child_cursor(
        turn.parent,
        turn.token_ids[:-1],
        mounts=turn.mounts,
        policy_version=turn.policy_version,
        sampled=turn.sampled[:-1],
        sampled_logprobs=turn.sampled_logprobs[:-1],
    )
