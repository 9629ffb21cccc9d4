"""Random operations, many at a time, in a pool that is too small: every turn stays exact."""

from __future__ import annotations

import asyncio
import random
import string
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from rollout_service.cursors import Cursor, Mount
from tests.engine_cases import VOCAB, Play
from tests.reference import Reference
from tests.vllm.conftest import Served, serve
from tests.vllm.models import HYBRIDS, servable_model

pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.slow]

NUM_ROUNDS = 40
OPERATIONS_AT_A_TIME = 4
MAX_VISIBLE = 160
LETTERS = string.ascii_lowercase
TOLERANCE = 3e-5


@pytest_asyncio.fixture(scope="module", loop_scope="session", params=["llama", "granitemoehybrid"])
async def crowded(request: pytest.FixtureRequest, servable_folder: Path) -> AsyncIterator[Served]:
    """Room for a part of what the operations leave."""
    page = 256 if request.param in HYBRIDS else 32
    async for served in serve(
        servable_folder, request.param, max_tokens=64 * page, max_states=40, max_num_seqs=3
    ):
        yield served


@dataclass(slots=True)
class Forest:
    """Cursors made so far, and what a reader may mount."""

    play: Play
    rng: random.Random
    cursors: list[Cursor] = field(default_factory=list)

    async def step(self) -> None:
        """One random operation."""
        rng, engine = self.rng, self.play.engine
        kind = rng.choices(
            ("root", "extend", "mount", "turn", "cancel", "evict"), (1, 4, 4, 4, 2, 1)
        )[0]
        if kind == "root" or not self.cursors:
            self.cursors.append(await self.play.extend(None, rng.randint(2, 50)))
            return
        parent = rng.choice([c for c in self.cursors[-20:] if c.num_visible < MAX_VISIBLE])
        if kind == "extend":
            self.cursors.append(await self.play.extend(parent, rng.choice((1, 2, 9, 33))))
        elif kind == "mount":
            mounts = self._mounts(parent)
            self.cursors.append(await self.play.extend(parent, rng.choice((1, 3, 8)), *mounts))
        elif kind == "turn":
            options = self._ends()
            self.cursors.append(await self.play.turn(parent, rng.randint(1, 12), **options))
        elif kind == "cancel":
            task = asyncio.create_task(self.play.turn(parent, 60, seed=1))
            await asyncio.sleep(rng.random() * 0.1)
            task.cancel()
            await asyncio.wait([task])
            if not task.cancelled():
                self.cursors.append(task.result())
        else:
            await engine.evict(rng.sample(self.cursors, min(3, len(self.cursors))))

    def _ends(self) -> dict[str, Any]:
        """A seed, and what may end a turn before its length does: both kinds hit about half."""
        rng = self.rng
        ends: list[dict[str, Any]] = [
            {},
            {"stop_token_ids": frozenset(rng.sample(range(VOCAB), 30))},
            {"stop": (rng.choice(LETTERS), rng.choice(LETTERS) + rng.choice(LETTERS))},
        ]
        return rng.choice(ends) | {"seed": rng.randrange(1000)}

    def _mounts(self, parent: Cursor) -> list[Mount]:
        """Up to two spans of cursors that `parent` sees nothing of."""
        seen = {cursor.cursor_id for cursor in parent.ancestors()}
        seen |= {mount.source.cursor_id for mount in parent.mounts}
        others = [cursor for cursor in self.cursors if cursor.cursor_id not in seen]
        mounts = []
        for source in self.rng.sample(others, min(len(others), self.rng.randint(1, 2))):
            begin = self.rng.randrange(len(source.token_ids))
            end = self.rng.randint(begin + 1, len(source.token_ids))
            mounts.append(Mount(source=source, begin=begin, end=end))
        return mounts


async def test_random_operations_stay_exact_and_leak_nothing(crowded: Served) -> None:
    engine = crowded.engine
    reference = Reference(servable_model(crowded.family), engine.info.mount_layers)
    rng = random.Random(7)
    forest = Forest(play=Play(engine=engine, reference=reference, rng=rng), rng=rng)
    for _ in range(NUM_ROUNDS):
        async with asyncio.timeout(60):
            await asyncio.gather(*(forest.step() for _ in range(OPERATIONS_AT_A_TIME)))
    stats = engine.stats()
    assert stats.running == 0
    assert stats.tokens_recomputed["eviction"] > 0
    scored = [cursor for cursor in forest.cursors if cursor.sampled_logprobs]
    forest.play.check(*rng.sample(scored, 40), tolerance=TOLERANCE)
    await engine.release(forest.cursors)
    stats = engine.stats()
    assert (stats.resident_cursors, stats.recurrent_slots, stats.tokens_resident) == (0, 0, 0)
