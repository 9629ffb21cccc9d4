"""Gated-delta-rule hybrids in bfloat16: cursors add no noise to that of a flat run."""

from __future__ import annotations

import asyncio
import statistics
from typing import Any

import pytest

from rollout_service.cursors import Cursor
from rollout_service.engine.base import Engine
from tests.engine_cases import Play, span
from tests.reference import flat_logprobs
from tests.vllm.conftest import BF16_FAMILIES
from tests.vllm.episodes import SCRIPTS, logprobs_of, rms, some_lengths, suffixes

pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.slow]

RATIO_LIMIT = 1.3
"""Of the noise of a flat run of the same tokens, median over the cases."""
NUM_CASES = 32
NUM_CASES_IN_SLICE = 9
"""One of each script."""
NUM_CURSORS = 4
"""Steps and turns of a case that are compared."""


def flat_oracle(model: Any, cursor: Cursor) -> list[float]:
    rows = flat_logprobs(model, cursor)[-len(cursor.token_ids) - 1 : -1]
    return [row[token].item() for row, token in zip(rows, cursor.token_ids, strict=True)]


async def noise_of_case(
    play: Play, oracle: Engine, name: str, lengths: tuple[int, int]
) -> tuple[float, float]:
    """Noise of a script's tokens, and of the same tokens without cursors and mounts."""
    heads = await SCRIPTS[name](play, *lengths)
    cursors = await suffixes(play, [play.rng.choice(heads)], num_edges=1)
    chosen = play.rng.sample(cursors, NUM_CURSORS)
    pairs = await asyncio.gather(*(noise_of_cursor(play, oracle, cursor) for cursor in chosen))
    await play.engine.forget_all()  # type: ignore[attr-defined]
    noise, flat_noise = zip(*pairs, strict=True)
    return statistics.fmean(noise), statistics.fmean(flat_noise)


async def noise_of_cursor(play: Play, oracle: Engine, cursor: Cursor) -> tuple[float, float]:
    count = len(cursor.sampled_logprobs)
    noise = rms(cursor.sampled_logprobs, await logprobs_of(oracle, cursor))
    tokens = [token for node in cursor.path() for token in node.token_ids]
    flat = await play.extend(None, tokens)
    await play.engine.release([flat])
    expected = await oracle.score(tokens, policy_version=0)
    return noise, rms(flat.sampled_logprobs[-count:], expected[-count:])


async def check_noise(play: Play, oracle: Engine, num_cases: int) -> str:
    """Play cases; returns their figures in words."""
    names, page = list(SCRIPTS), play.engine.info.page_tokens
    cases = [
        await noise_of_case(play, oracle, names[case % len(names)], lengths)
        for case, lengths in enumerate(some_lengths(page, num_cases, seed=1))
    ]
    ratio = statistics.median(noise / flat_noise for noise, flat_noise in cases)
    noise, flat_noise = (statistics.median(each) for each in zip(*cases, strict=True))
    told = f"cursors {noise:.4f}, flat {flat_noise:.4f}, median of the cases' ratios {ratio:.3f}"
    assert max(ratio, noise / flat_noise) <= RATIO_LIMIT, f"{told}: {cases}"
    return told


@pytest.mark.parametrize("family", BF16_FAMILIES)
async def test_scripts_are_as_near_the_oracle_as_flat_runs(play: Play, oracle: Engine) -> None:
    await check_noise(play, oracle, NUM_CASES_IN_SLICE)


@pytest.mark.parametrize("family", BF16_FAMILIES)
async def test_logits_of_a_bfloat16_model_are_float32(play: Play) -> None:
    info = play.engine.info
    assert (info.dtype, info.head_dtype) == ("bfloat16", "float32")


@pytest.mark.soak
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("family", BF16_FAMILIES)
async def test_32_cases_are_as_near_the_oracle_as_flat_runs(play: Play, oracle: Engine) -> None:
    print(f"{play.family}: {await check_noise(play, oracle, NUM_CASES)}")


@pytest.mark.parametrize("family", BF16_FAMILIES)
async def test_a_missed_mount_is_far_above_the_noise(play: Play, oracle: Engine) -> None:
    effects, noise = [], []
    for case in range(4):
        root = await play.extend(None, 40 + 9 * case)
        producer, reader = await play.extend(root, 70), await play.extend(root, 5)
        mounted = await play.extend(reader, 24, span(producer, 1))
        plain = await play.extend(reader, mounted.token_ids)
        expected = await logprobs_of(oracle, mounted)
        noise.append(rms(mounted.sampled_logprobs, expected))
        effects.append(rms(plain.sampled_logprobs, expected))
    assert statistics.median(effects) > 2 * statistics.median(noise), (effects, noise)
