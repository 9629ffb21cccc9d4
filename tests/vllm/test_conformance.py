"""The vLLM engine against the transformers engine in float32, on the same scripted episodes."""

from __future__ import annotations

import asyncio
import itertools
import math
from collections.abc import Sequence
from typing import Any

import pytest

from rollout_service.cursors import Cursor
from rollout_service.engine.base import Engine
from tests.engine_cases import Play, span
from tests.vllm.episodes import (
    PLAIN,
    SCRIPTS,
    all_lengths,
    check_against,
    logprobs_of,
    rms,
    some_lengths,
    suffixes,
)

pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.slow]

RMS_LIMIT = 5e-6
"""Nats, root-mean-square over a case's tokens: rounding between two float32 builds."""
WORST_LIMIT = 3e-5
"""Nats, of a single token: a wrong row does not hide among a thousand right ones."""
DENSE = ("llama", "qwen3")
AT_A_TIME = 2
"""Episodes beside each other where all lengths are played."""


async def gaps_of_case(
    play: Play, oracle: Engine, name: str, lengths: tuple[int, int], *, num_edges: int
) -> list[float]:
    """Play a script and all suffixes; returns each scored token's distance from the oracle."""
    cursors = await suffixes(play, await SCRIPTS[name](play, *lengths), num_edges=num_edges)
    expected = await asyncio.gather(*(logprobs_of(oracle, cursor) for cursor in cursors))
    gaps = [
        one - other
        for cursor, row in zip(cursors, expected, strict=True)
        for one, other in zip(cursor.sampled_logprobs, row, strict=True)
    ]
    found, worst = math.hypot(*gaps) / math.sqrt(len(gaps)), max(map(abs, gaps))
    assert found <= RMS_LIMIT, f"{name} at prompt and middle {lengths}: {found}"
    assert worst <= WORST_LIMIT, f"{name} at prompt and middle {lengths}: a token by {worst}"
    return gaps


async def check_flat(play: Play, cursors: Sequence[Cursor]) -> None:
    """Steps and turns must be those of a flat run, bit for bit."""
    for step, turn in zip(cursors[::2], cursors[1::2], strict=True):
        tokens = [token for node in step.path() for token in node.token_ids]
        flat = await play.extend(None, tokens)
        assert step.sampled_logprobs == flat.sampled_logprobs[-len(step.token_ids) :]
        again = await play.turn(flat, 4, seed=len(step.token_ids))
        assert turn.token_ids == again.token_ids
        assert turn.sampled_logprobs == again.sampled_logprobs
        await play.engine.release([flat, again])


@pytest.mark.parametrize("name", SCRIPTS)
async def test_scripts_equal_the_transformers_engine(play: Play, oracle: Engine, name: str) -> None:
    (lengths,) = some_lengths(play.engine.info.page_tokens, 1, seed=list(SCRIPTS).index(name))
    await gaps_of_case(play, oracle, name, lengths, num_edges=1)


@pytest.mark.soak
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("name", SCRIPTS)
async def test_scripts_equal_the_transformers_engine_at_every_length(
    play: Play, oracle: Engine, name: str
) -> None:
    gaps: list[float] = []
    lengths = all_lengths(play.engine.info.page_tokens)
    for first in range(0, len(lengths), AT_A_TIME):
        batch = lengths[first : first + AT_A_TIME]
        cases = (gaps_of_case(play, oracle, name, chosen, num_edges=2) for chosen in batch)
        gaps += itertools.chain.from_iterable(await asyncio.gather(*cases))
        await play.engine.forget_all()  # type: ignore[attr-defined]
    found = math.hypot(*gaps) / math.sqrt(len(gaps))
    print(f"{play.family} {name}: {len(gaps)} tokens, root-mean-square {found:.2e}")
    print(f"  worst {max(map(abs, gaps)):.2e}")


@pytest.mark.parametrize("family", DENSE)
@pytest.mark.parametrize("name", PLAIN)
async def test_forks_are_bit_equal_to_flat_runs(play: Play, name: str) -> None:
    for lengths in some_lengths(play.engine.info.page_tokens, 2, seed=9):
        heads = await SCRIPTS[name](play, *lengths)
        await check_flat(play, await suffixes(play, heads, num_edges=2))


async def test_a_script_fails_where_a_mount_is_missed(play: Play, oracle: Engine) -> None:
    root = await play.extend(None, 20)
    producer, reader = await play.extend(root, 30), await play.extend(root, 5)
    mounted = await play.extend(reader, 12, span(producer))
    plain = await play.extend(reader, mounted.token_ids)
    assert rms(plain.sampled_logprobs, await logprobs_of(oracle, mounted)) > 100 * RMS_LIMIT


async def test_mount_recomputes_nothing(play: Play, oracle: Engine) -> None:
    root = await play.extend(None, 20)
    producer = await play.extend(root, 50)
    before = play.engine.stats()
    readers = [await play.extend(root, (1, 2, 3), span(producer, 0, 49)) for _ in range(3)]
    after = play.engine.stats()
    # Per reader: the root's last token to score the first one, and two tokens under the mount. The
    # producer had computed that one too.
    assert after.tokens_computed - before.tokens_computed == 3 * 3
    again = before.tokens_recomputed["last_token"] + 3
    assert after.tokens_recomputed == {**before.tokens_recomputed, "last_token": again}
    await check_against(oracle, *readers)


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


async def test_cancelled_requests_return_their_pages(play: Play, oracle: Engine) -> None:
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
    await check_against(oracle, await play.extend(root, 4))
