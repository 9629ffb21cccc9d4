"""A prompt of one token is computed, or refused where the engine process would die of it."""

from __future__ import annotations

import pytest

from harness_sdk.errors import InvalidRequest
from tests.vllm.conftest import BF16_FAMILIES, Served

pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.slow]


@pytest.mark.parametrize("family", ["qwen3", "granitemoehybrid"])
async def test_a_prompt_of_one_token_is_computed(served: Served) -> None:
    engine = served.engine
    first = await engine.extend(None, (7,), mounts=(), policy_version=0)
    second = await engine.extend(first, (8,), mounts=(), policy_version=0, score_from=0)
    alone = await engine.score((7, 8), policy_version=0)
    assert alone == pytest.approx(second.sampled_logprobs, abs=1e-5)
    await engine.release([first, second])


@pytest.mark.parametrize("family", BF16_FAMILIES)
async def test_a_prompt_of_one_token_is_refused_with_gated_delta_rules(served: Served) -> None:
    engine = served.engine
    with pytest.raises(InvalidRequest, match="no prompt of one token"):
        await engine.extend(None, (7,), mounts=(), policy_version=0)
    with pytest.raises(InvalidRequest, match="3 or more"):
        await engine.score((7, 8), policy_version=0)
    assert len(await engine.score((7, 8, 9), policy_version=0)) == 2
