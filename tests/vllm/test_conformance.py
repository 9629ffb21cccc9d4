"""The vLLM engine against a cold oracle in float32, through the Engine protocol alone."""

from __future__ import annotations

import asyncio
import math
from typing import Any

import pytest

from tests.engine_cases import Play, span
from tests.reference import flat_logprobs

# The same scripts that every engine plays.
from tests.service.test_engine_conformance import (
    test_cancelled_turn_leaves_the_parent_state_untouched,  # noqa: F401
    test_greedy_takes_the_likeliest_and_seeds_repeat,  # noqa: F401
    test_mixed_requests_equal_each_alone,  # noqa: F401
    test_mount_of_rewound_steps_stays_readable,  # noqa: F401
    test_mounts_equal_the_oracle,  # noqa: F401
    test_release_of_everything_returns_to_zero,  # noqa: F401
    test_requests_past_a_limit_are_refused_by_name,  # noqa: F401
    test_sampled_logprobs_equal_rescoring,  # noqa: F401
    test_single_token_nodes_equal_the_oracle,  # noqa: F401
    test_stop_strings_span_tokens,  # noqa: F401
    test_stops_end_a_turn_where_they_were_sampled,  # noqa: F401
    test_temperature_is_in_the_logprobs,  # noqa: F401
)
from tests.vllm.conftest import Served
from tests.vllm.models import servable_model

pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.slow]

RMS_LIMIT = 5e-6
"""Nats, root-mean-square over a cursor's tokens: rounding between two float32 builds."""


def rms(play: Play, *cursors: object) -> float:
    squares: list[float] = []
    for cursor in cursors:
        expected = play.reference.token_logprobs(cursor)  # type: ignore[arg-type]
        scored = cursor.sampled_logprobs  # type: ignore[attr-defined]
        assert scored
        pairs = zip(expected[-len(scored) :], scored, strict=True)
        squares += [(one - other) ** 2 for one, other in pairs]
    return math.sqrt(sum(squares) / len(squares))


async def test_forks_and_rewinds_equal_a_flat_cold_run(play: Play, served: Served) -> None:
    root = await play.extend(None, 83)
    left, right = await asyncio.gather(play.extend(root, 9), play.extend(root, 70))
    nested = await play.extend(left, 5)
    turn = await play.turn(nested, 6, seed=4)
    single = await play.extend(turn, 1)
    rewound = await play.extend(left, 12)
    for cursor in (root, left, right, nested, turn, single, rewound):
        rows = flat_logprobs(servable_model(served.family), cursor)[-len(cursor.token_ids) - 1 : -1]
        scored = cursor.sampled_logprobs
        for row, token, logprob in zip(
            rows[-len(scored) :], cursor.token_ids[-len(scored) :], scored, strict=True
        ):
            assert logprob == pytest.approx(row[token].item(), abs=2e-5)
    assert rms(play, root, left, right, nested, turn, single, rewound) <= RMS_LIMIT


@pytest.mark.parametrize("edge", [-1, 0, 1])
async def test_mounts_at_page_edges_equal_the_oracle(play: Play, edge: int) -> None:
    page = play.engine.info.page_tokens
    root = await play.extend(None, page + edge)
    producer = await play.extend(root, page + 7)
    parent = await play.extend(root, 5 - edge)
    own = len(root.token_ids)
    # Spans that begin and end a row before, on and after a page's edge.
    spans = [(0, 3), (2 * page - own - 1, page + 7), (1 - edge, page - 1), (0, page + 7)]
    readers = [await play.extend(parent, 4, span(producer, begin, end)) for begin, end in spans]
    onward = [await play.turn(reader, 3, seed=1) for reader in readers]
    plain = await play.extend(parent, readers[3].token_ids)
    assert rms(play, *readers, *onward) <= RMS_LIMIT
    # What is compared must depend on the mount: the last tokens move without it.
    moved = [
        abs(a - b)
        for a, b in zip(plain.sampled_logprobs[1:], readers[3].sampled_logprobs[1:], strict=True)
    ]
    assert max(moved) > 1e-3


async def test_forked_equals_flat_inside_the_engine(play: Play, served: Served) -> None:
    root = await play.extend(None, 45)
    turn = await play.turn(root, 9, seed=3)
    fork = await play.extend(turn, 20)
    tokens = [token for node in fork.path() for token in node.token_ids]
    flat = await play.extend(None, tokens)
    # Dense models compute a row alike whatever stands in its batch; a recurrence that is split
    # elsewhere rounds elsewhere.
    tolerance = 2e-5 if "hybrid" in served.family else 3e-6
    assert fork.sampled_logprobs == pytest.approx(flat.sampled_logprobs[-20:], abs=tolerance)


async def test_eviction_is_rebuilt_exactly_and_counted(play: Play) -> None:
    root = await play.extend(None, 40)
    peer = await play.turn(root, 10, seed=1)
    early = await play.extend(root, 7)
    late = await play.extend(early, 8, span(peer, 1, 12))
    before = await play.extend(late, (1, 2, 3))
    fresh = await play.extend(early, (9, 8))
    await play.engine.evict([root, peer, early, late])
    counted = play.engine.stats()
    after = await play.extend(late, (1, 2, 3))
    again = await play.extend(early, (9, 8))
    for old, new in ((before, after), (fresh, again)):
        assert new.sampled_logprobs == pytest.approx(old.sampled_logprobs, abs=2e-6)
    assert rms(play, after, again) <= RMS_LIMIT
    # Each rebuilt cursor is computed up to its last token, with its parent's last one in front;
    # `early` is computed to its end besides, because a mount follows it.
    rebuilt = (40 - 1) + 13 + 7 + (8 - 1)
    stats = play.engine.stats()
    assert stats.tokens_recomputed["eviction"] - counted.tokens_recomputed["eviction"] == rebuilt
    assert stats.tokens_computed - counted.tokens_computed == rebuilt + 1 + 3 + 2


async def test_mount_recomputes_nothing(play: Play) -> None:
    root = await play.extend(None, 20)
    producer = await play.extend(root, 50)
    before = play.engine.stats()
    readers = [await play.extend(root, (1, 2, 3), span(producer, 0, 49)) for _ in range(3)]
    after = play.engine.stats()
    # Per reader: the root's last token to score the first one, and two tokens under the mount.
    assert after.tokens_computed - before.tokens_computed == 3 * 3
    assert after.tokens_recomputed == before.tokens_recomputed
    assert rms(play, *readers) <= RMS_LIMIT


async def test_identical_roots_are_computed_once_and_shared(play: Play) -> None:
    engine, tokens = play.engine, play.tokens(300)
    before = engine.stats().tokens_computed
    roots = await asyncio.gather(
        *(engine.extend(None, tokens, mounts=(), policy_version=0) for _ in range(4))
    )
    roots.append(await engine.extend(None, tokens, mounts=(), policy_version=0))
    assert len({root.cursor_id for root in roots}) == 5
    assert engine.stats().tokens_computed - before == 299
    assert engine.stats().resident_cursors == 5
    resident = engine.stats().tokens_resident
    await engine.release(roots[:4])
    assert engine.stats().tokens_resident == resident
    child = await play.extend(roots[4], 5)
    assert rms(play, child) <= RMS_LIMIT
    assert engine.stats().tokens_computed - before == 299 + 5


async def test_truncated_turns_tell_the_logprobs_of_what_is_left(play: Play) -> None:
    root = await play.extend(None, 12)
    options: list[dict[str, Any]] = [
        {"temperature": 0.7, "top_k": 9},
        {"top_p": 0.8},
        {"temperature": 1.3, "top_k": 20, "top_p": 0.5},
        {"temperature": 0.0, "top_k": 3},
        {},
    ]
    turns = await asyncio.gather(*(play.turn(root, 12, seed=6, **chosen) for chosen in options))
    for chosen, turn in zip(options, turns, strict=True):
        rows = play.reference.logprobs(turn)[2:-1]
        expected = [
            _left(row, **chosen)[token].item()
            for row, token in zip(rows, turn.token_ids[3:], strict=True)
        ]
        assert turn.sampled_logprobs == pytest.approx(expected, abs=5e-5)


def _left(row: Any, temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0) -> Any:
    """Log-probabilities of the distribution sampled from, `[V]`; greedy tells the model's own."""
    if not temperature:
        return row
    row = (row / temperature).log_softmax(-1)
    if top_k:
        row = row.masked_fill(row < row.topk(top_k).values[-1], -math.inf).log_softmax(-1)
    # A token stays while those above it hold less than top_p.
    above = (row.exp()[None] * (row[None] > row[:, None])).sum(-1)
    return row.masked_fill(above >= top_p, -math.inf).log_softmax(-1)


async def test_cancelled_requests_return_their_pages(play: Play) -> None:
    engine = play.engine
    root = await play.extend(None, 20)
    baseline = engine.stats()
    turns = [asyncio.create_task(play.turn(root, 1500, seed=seed)) for seed in range(3)]
    while engine.stats().tokens_resident <= baseline.tokens_resident:
        await asyncio.sleep(0.01)
    extend = asyncio.create_task(play.extend(root, 1900))
    await asyncio.sleep(0)
    for task in (*turns, extend):
        task.cancel()
    for task in (*turns, extend):
        with pytest.raises(asyncio.CancelledError):
            await task
    stats = engine.stats()
    assert stats.running == 0
    assert stats.tokens_resident == baseline.tokens_resident
    assert stats.recurrent_slots == baseline.recurrent_slots
    assert stats.resident_cursors == baseline.resident_cursors
    assert rms(play, await play.extend(root, 4)) <= RMS_LIMIT
