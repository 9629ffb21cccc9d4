"""The transformers engine on a GPU against itself on the CPU in float32."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from rollout_service.cursors import Cursor, child_cursor
from rollout_service.engine.transformers import TransformersEngine
from tests.engine_cases import Play, sharp_model, span
from tests.reference import Reference
from tests.tiny_models import FAMILIES

pytestmark = pytest.mark.gpu

# bf16 keeps 8 bits: a few percent of the logits' spread, a nat wide at most in these models.
TOLERANCE = {"float32": 1e-3, "bfloat16": 0.2}


@pytest.mark.parametrize("dtype", sorted(TOLERANCE))
@pytest.mark.parametrize("family", FAMILIES)
async def test_gpu_equals_cpu(family: str, dtype: str, tmp_path: Path) -> None:
    sharp_model(family).save_pretrained(str(tmp_path))
    engine = TransformersEngine(str(tmp_path), device="cuda", dtype=dtype)
    oracle = TransformersEngine(str(tmp_path))
    for one in (engine, oracle):
        await one.start()
    play = Play(
        engine=engine,
        reference=Reference(sharp_model(family), engine.info.mount_layers),
        rng=random.Random(1),
    )
    root = await play.extend(None, 130)
    peer = await play.turn(root, 12, seed=1)
    reader = await play.extend(root, 9, span(peer, 1, 14))
    turn = await play.turn(reader, 12, seed=2)
    await engine.evict([root, peer, reader, turn])
    tail = await play.extend(turn, 30)
    assert engine.stats().tokens_recomputed["eviction"] > 100
    worst = 0.0
    for cursor in (root, peer, reader, turn, tail):
        expected = await rescored(oracle, cursor)
        worst = max(worst, largest(cursor.sampled_logprobs, expected.sampled_logprobs))
    assert worst <= TOLERANCE[dtype]
    for one in (engine, oracle):
        await one.close()
    torch.cuda.empty_cache()


async def rescored(oracle: TransformersEngine, cursor: Cursor) -> Cursor:
    """The same cursor computed by `oracle`, its ancestors and mounts too."""
    again = child_cursor(cursor.parent, cursor.token_ids, mounts=cursor.mounts, policy_version=0)
    first = len(cursor.token_ids) - len(cursor.sampled_logprobs)
    return await oracle.extend(
        again.parent, again.token_ids, mounts=again.mounts, policy_version=0, score_from=first
    )


def largest(one: Sequence[float], other: Sequence[float]) -> float:
    """Largest difference, in nats."""
    return max(abs(a - b) for a, b in zip(one, other, strict=True))
