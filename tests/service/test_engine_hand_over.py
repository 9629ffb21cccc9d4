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
    # The second's last token was computed: only vLLM holds a state in front of it still.
    dropped = play.expected(transformers=1, vllm=0)
    assert play.engine.stats().resident_cursors == resident - dropped
    play.check(await play.turn(kept[0], 2))
    after = play.engine.stats()
    # The prompt and the first of two tokens.
    assert after.tokens_computed - before.tokens_computed == 3 + 1
    evicted = before.tokens_recomputed["eviction"]
    assert after.tokens_recomputed["eviction"] == evicted
    play.check(await play.turn(kept[1], 2), await play.turn(kept[2], 2))
    again = (1 + dropped) * len(kept[1].token_ids)
    assert play.engine.stats().tokens_recomputed["eviction"] - evicted == again


def without_last(turn: Cursor) -> Cursor:
    return child_cursor(
        turn.parent,
        turn.token_ids[:-1],
        mounts=turn.mounts,
        policy_version=turn.policy_version,
        sampled=turn.sampled[:-1],
        sampled_logprobs=turn.sampled_logprobs[:-1],
    )
