"""The gated-delta-rule hybrid in bfloat16: cursors add no noise to that of a flat run."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from typing import Any

import pytest

from rollout_service.cursors import Cursor
from tests.engine_cases import Play, span
from tests.reference import flat_logprobs
from tests.vllm.conftest import Served
from tests.vllm.models import servable_model

pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.slow]

NUM_CASES = 8
RATIO_LIMIT = 1.3
"""Of the noise of a flat run of the same tokens, medians over the cases."""


def rms(one: Sequence[float], other: Sequence[float]) -> float:
    return math.sqrt(statistics.fmean((a - b) ** 2 for a, b in zip(one, other, strict=True)))


def flat_oracle(model: Any, cursor: Cursor) -> list[float]:
    rows = flat_logprobs(model, cursor)[-len(cursor.token_ids) - 1 : -1]
    return [row[token].item() for row, token in zip(rows, cursor.token_ids, strict=True)]


async def test_forks_are_as_near_the_oracle_as_flat_runs(
    play_bf16: Play, served_bf16: Served
) -> None:
    play, model = play_bf16, servable_model(served_bf16.family)
    forked, flat = [], []
    for case in range(NUM_CASES):
        root = await play.extend(None, 60 + 7 * case)
        turn = await play.turn(await play.extend(root, 30 + case), 8, seed=case)
        fork = await play.extend(turn, 24)
        tokens = [token for node in fork.path() for token in node.token_ids]
        cold = await play.extend(None, tokens)
        expected = flat_oracle(model, fork)
        forked.append(rms(fork.sampled_logprobs, expected))
        flat.append(rms(cold.sampled_logprobs[-24:], expected))
    ratio = statistics.median(forked) / statistics.median(flat)
    assert ratio <= RATIO_LIMIT, f"forked {forked}, flat {flat}"


async def test_mounts_are_as_near_the_oracle_as_flat_runs(
    play_bf16: Play, served_bf16: Served
) -> None:
    play, model = play_bf16, servable_model(served_bf16.family)
    mounted, flat, effects = [], [], []
    page = play.engine.info.page_tokens
    for case in range(NUM_CASES):
        root = await play.extend(None, 40 + 9 * case)
        # Long enough to be mounted in a full page and two edges in some cases.
        producer = await play.extend(root, page + 40 * case)
        parent = await play.extend(root, 20)
        reader = await play.extend(parent, 24, span(producer, 3, len(producer.token_ids) - case))
        plain = await play.extend(parent, reader.token_ids)
        expected = play.reference.token_logprobs(reader)
        mounted.append(rms(reader.sampled_logprobs, expected))
        flat.append(rms(plain.sampled_logprobs, flat_oracle(model, plain)))
        effects.append(rms(expected, flat_oracle(model, plain)))
    ratio = statistics.median(mounted) / statistics.median(flat)
    assert ratio <= RATIO_LIMIT, f"mounted {mounted}, plain {flat}"
    # Not blind: what a mount changes is far above the noise.
    assert statistics.median(effects) > 4 * statistics.median(mounted), effects
