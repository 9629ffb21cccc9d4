"""float16 in place of bfloat16: three more bits of each number, through pages as well."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.engine_cases import span
from tests.vllm.conftest import cold_engine, new_play, serve
from tests.vllm.episodes import logprobs_of, rms

pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.slow]


async def noise_of(root: Path, family: str, dtype: str) -> float:
    """Difference to float32 over a fork that reads another and writes a turn."""
    found: list[float] = []
    expected: list[float] = []
    async for served in serve(root, family, dtype=dtype):
        assert served.engine.info.dtype == dtype
        play = new_play(served, seed=1)
        trunk = await play.extend(None, 60)
        producer, reader = await play.extend(trunk, 70), await play.extend(trunk, 5)
        mounted = await play.extend(reader, 24, span(producer, 1))
        turn = await play.turn(mounted, 40, seed=1)
        async for oracle in cold_engine(served):
            for cursor in (trunk, producer, mounted, turn):
                found += cursor.sampled_logprobs
                expected += await logprobs_of(oracle, cursor)
    return rms(found, expected)


@pytest.mark.parametrize("family", ["llama", "granitemoehybrid"])
async def test_float16_is_far_nearer_to_float32_than_bfloat16(
    servable_folder: Path, family: str
) -> None:
    coarse, fine = [
        await noise_of(servable_folder, family, dtype) for dtype in ("bfloat16", "float16")
    ]
    # A KL is the square: 16 times less at least, 64 times where nothing but rounding differs.
    assert coarse >= 4 * fine > 0, (coarse, fine)
