"""Ranks share a model: every group's blocks are sharded alike, and cursors do not notice."""

from __future__ import annotations

import asyncio
import hashlib
import random
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio
from safetensors.torch import load_file

from tests.engine_cases import Play, save_adapter, span
from tests.reference import Reference
from tests.vllm.conftest import Served, serve
from tests.vllm.models import servable_model

pytestmark = [
    pytest.mark.asyncio(loop_scope="session"),
    pytest.mark.slow,
    # PEFT 0.21 reads a property that transformers has renamed.
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated"),
]


@pytest_asyncio.fixture(
    scope="module",
    loop_scope="session",
    params=[
        ("granitemoehybrid", 2),
        pytest.param(("granitemoehybrid", 4), marks=pytest.mark.soak),
        pytest.param(("qwen3_5", 2), marks=pytest.mark.soak),
    ],
    ids=lambda param: f"{param[0]}-{param[1]}",
)
async def shared(request: pytest.FixtureRequest, servable_folder: Path) -> AsyncIterator[Served]:
    """A hybrid over ranks with one key and value head each; of four, two have the same."""
    family, num_ranks = request.param
    async for served in serve(
        servable_folder,
        family,
        tensor_parallel_size=num_ranks,
        max_adapters=1,
        max_lora_rank=8,
    ):
        yield served


async def test_cursors_over_ranks_equal_the_oracle(shared: Served) -> None:
    engine = shared.engine
    reference = Reference(servable_model(shared.family), engine.info.mount_layers)
    play = Play(engine=engine, reference=reference, rng=random.Random(21))
    page = engine.info.page_tokens
    root = await play.extend(None, page + 3)
    producer = await play.extend(root, 2 * page + 5)
    turn = await play.turn(root, 12, seed=1)
    stop = turn.token_ids[9]
    stopped = await play.turn(root, 12, seed=1, stop_token_ids=frozenset({stop}))
    assert len(stopped.token_ids) < len(turn.token_ids)
    forks = await asyncio.gather(*(play.extend(stopped, 4 + index) for index in range(3)))
    mounted = await play.extend(forks[0], 6, span(producer, 2, 2 * page + 1))
    onward = await play.turn(mounted, 6, seed=2)
    rewound = await play.extend(root, 7)
    tolerance = 2e-5 if shared.family == "granitemoehybrid" else 0.5
    play.check(root, turn, stopped, *forks, mounted, onward, rewound, tolerance=tolerance)
    await engine.forget_all()
    stats = engine.stats()
    assert (stats.resident_cursors, stats.recurrent_slots, stats.tokens_resident) == (0, 0, 0)


async def test_an_adapters_shards_are_read_back_as_one(shared: Served, tmp_path: Path) -> None:
    engine = shared.engine
    model = save_adapter(tmp_path, shared.folder, shared.family)
    expected = {
        name: hashlib.sha256(tensor.float().numpy().astype("<f4").tobytes()).hexdigest()
        for name, tensor in load_file(tmp_path / "adapter_model.safetensors").items()
    }
    await engine.load_adapter(1, str(tmp_path))
    assert await engine.adapter_checksums(1) == expected
    oracle = Reference(model.base_model.model.float(), engine.info.mount_layers)
    play = Play(engine=engine, reference=oracle, rng=random.Random(22), version=1)
    root = await play.extend(None, 30)
    # One rank alone is up to 2e-4 from the oracle with adapters this large.
    tolerance = 4e-4 if shared.family == "granitemoehybrid" else 0.5
    play.check(root, await play.turn(root, 8, seed=1), tolerance=tolerance)
    await engine.unload_adapter(1)
