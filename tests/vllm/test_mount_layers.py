"""Mounts in some layers of attention-only models: the others never see a mounted row."""

from __future__ import annotations

import asyncio
import math
import random
from collections.abc import AsyncIterator, Awaitable, Sequence
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from harness_sdk.errors import ConfigError
from rollout_service.cursors import Cursor
from rollout_service.engine.transformers import TransformersEngine
from rollout_service.engine.vllm import VllmEngine
from rollout_service.engine.vllm.starting import StepUse
from tests.engine_cases import Play, span
from tests.reference import Reference
from tests.vllm.conftest import Served, serve
from tests.vllm.models import servable_model

pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.slow]

RMS_LIMIT = 5e-6
"""Nats, root-mean-square over all scored tokens: rounding between two float32 builds."""
LEAST_EFFECT = 1e-3
"""Nats, root-mean-square: what another set of mount layers must change, or the tests are blind."""
NUM_LAYERS = 4
CASES = {
    "middle quarter": ("llama", None, (1,), 1),
    "first and third": ("qwen3", (2, 0), (0, 2), 1),
    "first and third, two ranks": ("qwen3", (2, 0), (0, 2), 2),
    "all": ("llama", (0, 1, 2, 3), (0, 1, 2, 3), 1),
}
"""Family, what is configured, the layers that then read, and ranks that share the model."""


def _param(name: str) -> Any:
    """Ranks are processes of their own, which start slowly and wait busily."""
    return pytest.param(name, marks=pytest.mark.soak if CASES[name][3] > 1 else ())


@pytest_asyncio.fixture(scope="module", loop_scope="session", params=map(_param, CASES))
async def split(request: pytest.FixtureRequest, servable_folder: Path) -> AsyncIterator[Served]:
    """Prompts come in chunks that are smaller than two pages, beside decodes."""
    family, configured, layers, num_ranks = CASES[request.param]
    async for served in serve(
        servable_folder,
        family,
        mount_layers=configured,
        max_num_seqs=8,
        tensor_parallel_size=num_ranks,
        vllm_arguments={"max_num_batched_tokens": 48},
    ):
        assert served.engine.info.mount_layers == layers
        yield served


@pytest_asyncio.fixture(loop_scope="session")
async def play(split: Served) -> AsyncIterator[Play]:
    reference = Reference(servable_model(split.family), split.engine.info.mount_layers)
    yield Play(engine=split.engine, reference=reference, rng=random.Random(3))
    await split.engine.forget_all()
    assert split.engine.stats().tokens_resident == 0


async def test_episodes_equal_the_transformers_engine(play: Play, split: Served) -> None:
    page, cursors = play.engine.info.page_tokens, []
    for edge in (-1, 0, 1):
        cursors += await _episode(play, page, edge)
    layers = play.engine.info.mount_layers
    assert await _distance(split.folder, layers, cursors) <= RMS_LIMIT
    readers = [cursor for cursor in cursors if cursor.mounts]
    for others in ({(1,), (0, 2), (0, 1, 2, 3)} - {layers},):
        for other in others:
            assert await _distance(split.folder, other, readers) > LEAST_EFFECT


@pytest.mark.parametrize("edge", [-1, 0, 1])
async def test_every_length_around_a_page_edge_equals_the_oracle(play: Play, edge: int) -> None:
    page = play.engine.info.page_tokens
    root = await play.extend(None, page + edge)
    producer = await play.extend(root, 2 * page + 7)
    parent = await play.extend(root, 3)
    # Spans that begin and end a row before, on and after an edge; suffixes that end there, in
    # tables with the span's rows and in tables without: many at a time, no two hide alike.
    spans = [(0, 2), (1 - edge, page + 1), (page, 2 * page + 6), (0, 2 * page + 7)]
    readers = await asyncio.gather(
        *(
            play.extend(parent, max(page - 3 - edge - shift, 1) + by, span(producer, begin, end))
            for begin, end in spans
            for shift in (0, (end - begin) % page)
            for by in (-1, 0, 1)
            if max(page - 3 - edge - shift, 1) + by > 0
        )
    )
    turns = await asyncio.gather(*(play.turn(r, 3, seed=1) for r in readers[::3]))
    forks = await asyncio.gather(*(play.extend(t, 2) for t in turns))
    assert _rms(play, [*readers, *turns, *forks]) <= RMS_LIMIT


async def test_forked_equals_flat_bit_by_bit(play: Play) -> None:
    page = play.engine.info.page_tokens
    for length in (page - 1, page, page + 1, 2 * page + 5):
        root = await play.extend(None, length)
        turn = await play.turn(root, 9, seed=3)
        fork = await play.extend(turn, 20)
        nested = await play.extend(fork, 7)
        tokens = [token for node in nested.path() for token in node.token_ids]
        flat = await play.extend(None, tokens)
        assert fork.sampled_logprobs + nested.sampled_logprobs == flat.sampled_logprobs[-27:]


async def test_a_mount_takes_pages_of_no_layer(play: Play, split: Served) -> None:
    engine, page = split.engine, split.engine.info.page_tokens
    num_groups = {1: 4, 2: 2, 4: 1}[len(engine.info.mount_layers)]
    root = await play.extend(None, page + 1)
    producer = await play.extend(root, 5 * page + 1)
    parent = await play.extend(root, 2)
    # Four whole pages, and an edge of two rows on each side.
    mount = span(producer, page - 3, 5 * page + 1)
    reader = await play.extend(parent, 2, mount)
    # One page in each group: the parent's partial one, the edges and the new rows fit in there.
    assert await _taken(engine, play.extend(parent, 2)) == num_groups
    assert await _taken(engine, play.extend(parent, 2, mount)) == num_groups
    assert await _taken(engine, play.extend(reader, 2)) == num_groups
    # Nor while it runs: a mount-free table has no room for rows that it never gets.
    assert await _taken(engine, play.turn(reader, 9), at_most=True) == num_groups


async def test_eviction_rebuilds_what_was_mounted(play: Play) -> None:
    page = play.engine.info.page_tokens
    root = await play.extend(None, page + 3)
    peer = await play.turn(root, page, seed=1)
    early = await play.extend(root, 7)
    late = await play.extend(early, 8, span(peer, 1, page))
    before = await play.extend(late, (1, 2, 3))
    await play.engine.evict([root, peer, early, late])
    after = await play.extend(late, (1, 2, 3))
    assert after.sampled_logprobs == pytest.approx(before.sampled_logprobs, abs=2e-6)
    assert _rms(play, [after]) <= RMS_LIMIT


async def test_part_of_a_hybrids_attention_is_refused_by_name(servable_folder: Path) -> None:
    engine = VllmEngine(str(servable_folder / "granitemoehybrid"), mount_layers=(3,))
    with pytest.raises(ConfigError, match=r"attention layers of a hybrid; got \[3\].*\[1, 3\]"):
        await engine.start()
    engine = VllmEngine(str(servable_folder / "llama"), mount_layers=(1, 4))
    with pytest.raises(ConfigError, match=r"without attention; got \[4\]; allowed: \[0, 1, 2, 3\]"):
        await engine.start()


async def _episode(play: Play, page: int, edge: int) -> list[Cursor]:
    """Forks, rewinds and mounts of every kind, around a page's edge; cursors with scores."""
    root = await play.extend(None, page + edge)
    near, far = await asyncio.gather(play.extend(root, 8), play.extend(root, 2 * page + 1))
    fork = await play.extend(await play.turn(near, 5, seed=4), 3)
    rewound = await play.extend(near, page)
    dropped = await play.turn(near, 8, seed=2)
    ahead = await play.extend(near, 5, span(far, 3, 2 * page))
    behind = await play.extend(far, page - 4, span(near, 1, 7))
    onward = await play.turn(await play.extend(ahead, 1), 5, seed=1)
    transitive = await play.extend(near, page - 1, span(behind), span(near, 0, 1))
    two = await play.extend(root, 6, span(far, 10, page + 20), span(onward, 2, 6))
    again = await play.extend(two, page + 4, span(behind, 0, 2))
    after_rewind = await play.extend(rewound, 4, span(dropped, 2, 11))
    turns = await asyncio.gather(*(play.turn(c, 4, seed=5) for c in (fork, again, after_rewind)))
    made = [near, far, fork, rewound, dropped, ahead, behind, onward, transitive, two]
    return [*made, again, after_rewind, *turns]


async def _distance(folder: Path, layers: tuple[int, ...], cursors: Sequence[Cursor]) -> float:
    """Root-mean-square difference to the transformers engine that mounts into `layers`."""
    engine = TransformersEngine(str(folder), mount_layers=layers)
    await engine.start()
    squares: list[float] = []
    for cursor in cursors:
        scored = cursor.sampled_logprobs
        again = await engine.extend(
            cursor.parent,
            cursor.token_ids,
            mounts=cursor.mounts,
            policy_version=0,
            score_from=len(cursor.token_ids) - len(scored),
        )
        pairs = zip(scored, again.sampled_logprobs, strict=True)
        squares += [(one - other) ** 2 for one, other in pairs]
    await engine.close()
    return math.sqrt(sum(squares) / len(squares))


def _rms(play: Play, cursors: Sequence[Cursor]) -> float:
    """Root-mean-square difference to the cold oracle."""
    squares: list[float] = []
    for cursor in cursors:
        scored = cursor.sampled_logprobs
        expected = play.reference.token_logprobs(cursor)[-len(scored) :]
        squares += [(one - other) ** 2 for one, other in zip(expected, scored, strict=True)]
    return math.sqrt(sum(squares) / len(squares))


async def _taken(engine: VllmEngine, call: Awaitable[object], *, at_most: bool = False) -> int:
    """Blocks that a call leaves taken, or the most that it ever takes."""
    client, lowest = engine._newest().client, []
    told = asyncio.Event()

    def on_step(_: StepUse, kv_use: float) -> None:
        lowest.append(round(client.use.total * (1 - kv_use)))
        told.set()

    await client.command("usage")
    before = client.use.free
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(StepUse, "__call__", on_step)
        await call
        # A step is told of behind what it gives out.
        async with asyncio.timeout(10):
            await told.wait()
    await client.command("usage")
    return before - (min(lowest) if at_most else client.use.free)
