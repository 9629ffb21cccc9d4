"""The vLLM engine against the transformers engine in float32, on the same scripted episodes."""

from __future__ import annotations

import asyncio
import math
from typing import Any

import pytest

from rollout_service.cursors import Cursor
from rollout_service.engine.base import Engine
from tests.engine_cases import Play, span
from tests.vllm.episodes import SCRIPTS, all_lengths, edge_lengths, logprobs_of, some_lengths

pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.slow]

RMS_LIMIT = 5e-6
"""Nats, root-mean-square over a script's tokens: rounding between two float32 builds."""
NUM_LENGTHS = 3
DENSE = ("llama", "qwen3")


async def rms(oracle: Engine, *cursors: Cursor) -> float:
    squares: list[float] = []
    for cursor in cursors:
        expected = await logprobs_of(oracle, cursor)
        squares += [
            (one - other) ** 2 for one, other in zip(expected, cursor.sampled_logprobs, strict=True)
        ]
    return math.sqrt(sum(squares) / len(squares))


async def check_script(play: Play, oracle: Engine, name: str, lengths: tuple[int, int]) -> float:
    checked = await SCRIPTS[name](play, *lengths)
    found = await rms(oracle, *checked)
    assert found <= RMS_LIMIT, f"{name} at prompt and middle {lengths}: {found}"
    await play.engine.forget_all()  # type: ignore[attr-defined]
    return found


@pytest.mark.parametrize("name", SCRIPTS)
async def test_scripts_equal_the_transformers_engine(play: Play, oracle: Engine, name: str) -> None:
    page = play.engine.info.page_tokens
    for lengths in some_lengths(page, NUM_LENGTHS, seed=list(SCRIPTS).index(name)):
        await check_script(play, oracle, name, lengths)


@pytest.mark.soak
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("name", SCRIPTS)
async def test_scripts_equal_the_transformers_engine_at_every_length(
    play: Play, oracle: Engine, name: str
) -> None:
    worst = 0.0
    for lengths in all_lengths(play.engine.info.page_tokens):
        worst = max(worst, await check_script(play, oracle, name, lengths))
    print(f"{play.family} {name}: worst root-mean-square {worst:.2e}")


async def test_a_script_fails_where_a_mount_is_missed(play: Play, oracle: Engine) -> None:
    root = await play.extend(None, 20)
    producer, reader = await play.extend(root, 30), await play.extend(root, 5)
    mounted = await play.extend(reader, 12, span(producer))
    plain = await play.extend(reader, mounted.token_ids)
    expected = await logprobs_of(oracle, mounted)
    squares = [(a - b) ** 2 for a, b in zip(plain.sampled_logprobs, expected, strict=True)]
    assert math.sqrt(sum(squares) / len(squares)) > 100 * RMS_LIMIT


@pytest.mark.parametrize("family", DENSE)
@pytest.mark.parametrize("prompt", [0.5, 1.0])
async def test_forks_are_bit_equal_to_flat_runs(play: Play, prompt: float) -> None:
    page = play.engine.info.page_tokens
    root = await play.extend(None, int(prompt * page))
    turn = await play.turn(root, 9, seed=3)
    for length in edge_lengths(page, before=turn.num_tokens, num_edges=2):
        fork = await play.extend(turn, length)
        tokens = [token for node in fork.path() for token in node.token_ids]
        flat = await play.extend(None, tokens)
        assert fork.sampled_logprobs == flat.sampled_logprobs[-length:]


async def test_mount_recomputes_nothing(play: Play, oracle: Engine) -> None:
    root = await play.extend(None, 20)
    producer = await play.extend(root, 50)
    before = play.engine.stats()
    readers = [await play.extend(root, (1, 2, 3), span(producer, 0, 49)) for _ in range(3)]
    after = play.engine.stats()
    # Per reader: the root's last token to score the first one, and two tokens under the mount.
    assert after.tokens_computed - before.tokens_computed == 3 * 3
    assert after.tokens_recomputed == before.tokens_recomputed
    assert await rms(oracle, *readers) <= RMS_LIMIT


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
    assert await rms(oracle, await play.extend(root, 4)) <= RMS_LIMIT
