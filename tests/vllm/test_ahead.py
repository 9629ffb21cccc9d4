"""Scheduling ahead: whatever ends a turn, what is kept of it is what a cold run computes."""

from __future__ import annotations

import asyncio
import statistics
from collections.abc import Sequence

import pytest

from harness_sdk.types import SamplingOptions
from rollout_service.cursors import Cursor, child_cursor
from tests.engine_cases import VOCAB, Play, detokenize
from tests.vllm.conftest import Served
from tests.vllm.episodes import rms
from tests.vllm.models import servable_model
from tests.vllm.test_hybrid_noise import RATIO_LIMIT, flat_oracle

pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.slow]

SEED = 8
NUM_FREE = 30


on_both = pytest.mark.parametrize("family", ["granitemoehybrid", "qwen3"])
"""With recurrent states and without; the core is a step ahead of the worker."""


async def turn_ended_by(play: Play, parent: Cursor, cause: str) -> Cursor:
    """The same turn cut short in three ways, or at its end."""
    free = await play.turn(parent, NUM_FREE, seed=SEED)
    sampled = free.token_ids[3:]
    await play.engine.release([free])
    at = next(i for i in range(6, NUM_FREE) if sampled[i] not in sampled[:i])
    options: dict[str, object] = {"seed": SEED}
    if cause == "stop id":
        options["stop_token_ids"] = frozenset({sampled[at], min(set(range(VOCAB)) - {*sampled})})
    elif cause == "stop string":
        # Three tokens hold it; the last one alone would not do.
        text = detokenize(sampled)
        at = text.index(text[at - 2 : at + 1]) + 2
        options["stop"] = ("never said", text[at - 2 : at + 1])
    max_tokens = at + 1 if cause == "length" else NUM_FREE
    turn = await play.sample(parent, max_tokens, **options)  # type: ignore[arg-type]
    assert turn.finish_reason == ("length" if cause == "length" else "stop")
    assert turn.cursor.token_ids[3:] == sampled[: at + 1]
    return turn.cursor


async def unscored(play: Play, parent: Cursor, tokens: Sequence[int]) -> tuple[Cursor, int]:
    """Append tokens; returns how many were computed for it."""
    before = play.engine.stats().tokens_computed
    cursor = await play.engine.extend(parent, tokens, mounts=parent.mounts, policy_version=0)
    return cursor, play.engine.stats().tokens_computed - before


@on_both
@pytest.mark.parametrize(("cause", "num_lead"), [("stop id", 1), ("length", 1), ("stop string", 0)])
async def test_what_follows_a_turn_equals_a_cold_run(play: Play, cause: str, num_lead: int) -> None:
    root = await play.extend(None, 40)
    turn = await turn_ended_by(play, root, cause)
    # Behind a stop string the step ahead has computed the last token, which stays; a stop id may
    # go, so that no state has seen it.
    children = [await unscored(play, turn, play.tokens(size)) for size in (1, 9, 33)]
    assert [computed for _, computed in children] == [size - 1 + num_lead for size in (1, 9, 33)]
    followers = [await play.turn(child, 5, seed=2) for child, _ in children]
    forks = await asyncio.gather(*(play.turn(turn, 6, seed=seed) for seed in range(3)))
    rewound = await play.extend(root, 7)
    play.check(turn, *followers, *forks, rewound)
    # A score from the first token on needs the turn without its last one.
    play.check(await play.extend(turn, 4), await play.turn(turn, 3, prompt=()))


@on_both
async def test_a_stop_id_can_be_dropped_without_computing_anything_again(play: Play) -> None:
    root = await play.extend(None, 40)
    turn = await turn_ended_by(play, root, "stop id")
    shorter = child_cursor(
        root,
        turn.token_ids[:-1],
        mounts=(),
        policy_version=0,
        sampled=turn.sampled[:-1],
        sampled_logprobs=turn.sampled_logprobs[:-1],
    )
    await play.engine.hand_over(turn, shorter)
    child, computed = await unscored(play, shorter, (4, 5, 6))
    assert computed == 2
    play.check(await play.turn(child, 5, seed=3), await play.turn(shorter, 5, seed=3))


@on_both
async def test_a_cancelled_turn_leaves_its_parent_as_it_was(play: Play) -> None:
    root = await play.extend(None, 40)
    parent = await play.turn(root, 8, seed=1)
    before = await play.extend(parent, (1, 2, 3))
    resident = play.engine.stats().tokens_resident
    stream = play.engine.generate(
        parent, (9,), SamplingOptions(max_tokens=900), stop_token_ids=frozenset(), policy_version=0
    )
    for _ in range(4):
        await anext(stream)
    await stream.aclose()  # type: ignore[attr-defined]
    assert play.engine.stats().tokens_resident == resident
    after = await play.extend(parent, (1, 2, 3))
    assert after.sampled_logprobs == pytest.approx(before.sampled_logprobs, abs=2e-6)
    play.check(after, await play.turn(parent, 5, seed=4), await play.extend(root, 5))


@on_both
async def test_turns_that_end_among_others_leave_their_own_state(play: Play) -> None:
    root = await play.extend(None, 40)
    parents = [await play.extend(root, 5 + index) for index in range(6)]
    free = [await play.turn(parent, NUM_FREE, seed=index) for index, parent in enumerate(parents)]
    turns = await asyncio.gather(
        *(
            play.turn(parent, NUM_FREE, seed=index, stop_token_ids=frozenset({stop.token_ids[-7]}))
            for index, (parent, stop) in enumerate(zip(parents, free, strict=True))
        ),
        *(play.turn(parent, NUM_FREE, seed=20) for parent in parents),
    )
    for turn, whole in zip(turns, free, strict=False):
        assert turn.token_ids == whole.token_ids[: len(turn.token_ids)] != whole.token_ids
    play.check(*await asyncio.gather(*(play.turn(turn, 4, seed=1) for turn in turns)))


async def test_gated_delta_states_do_not_see_a_stop_id(
    play_bf16: Play, served_bf16: Served
) -> None:
    play, model = play_bf16, servable_model(served_bf16.family)
    forked, flat = [], []
    for case in range(6):
        root = await play.extend(None, 60 + 7 * case)
        turn = await turn_ended_by(play, root, "stop id")
        child, _ = await unscored(play, turn, play.tokens(3))
        fork = await play.turn(child, 16, seed=case)
        tokens = [token for node in fork.path() for token in node.token_ids]
        cold = await play.extend(None, tokens)
        expected = flat_oracle(model, fork)[-16:]
        forked.append(rms(fork.sampled_logprobs, expected))
        flat.append(rms(cold.sampled_logprobs[-16:], expected))
    ratio = statistics.median(forked) / statistics.median(flat)
    assert ratio <= RATIO_LIMIT, f"forked {forked}, flat {flat}"
