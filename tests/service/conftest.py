"""Model folders, engines and servers shared by the service tests."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest

from harness_sdk.cli.embedded import ValkeyServer
from tests.chat_tokenizers import VOCAB_SIZE, save_chat_tokenizer
from tests.engine_cases import ENGINES, MakeEngine, Play, sharp_model
from tests.reference import Reference
from tests.tiny_models import FAMILIES, save_tiny_model


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Folder of a family's tiny model, written once."""
    folders: dict[str, Path] = {}

    def find(family: str) -> Path:
        if family not in folders:
            folders[family] = tmp_path_factory.mktemp(family) / family
            sharp_model(family).save_pretrained(str(folders[family]))
        return folders[family]

    return find


@pytest.fixture(scope="session")
def chat_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a tiny hybrid model with a ChatML tokenizer."""
    folder = save_tiny_model(tmp_path_factory.mktemp("chat"), "qwen3_5", vocab_size=VOCAB_SIZE)
    return save_chat_tokenizer(folder)


@pytest.fixture
async def valkey(tmp_path: Path) -> AsyncIterator[ValkeyServer]:
    """A server of the test's own, which it may stop and start again."""
    server = ValkeyServer(tmp_path / "valkey")
    await server.start()
    yield server
    await server.stop()


@pytest.fixture
def make_engine() -> MakeEngine:
    return ENGINES["transformers"]


@pytest.fixture(params=FAMILIES)
def family(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
async def play(
    make_engine: MakeEngine, family: str, model_folder: Callable[[str], Path]
) -> AsyncIterator[Play]:
    async for play in _played(make_engine, family, model_folder(family), seed=1):
        yield play


@pytest.fixture
async def hybrid(
    make_engine: MakeEngine, model_folder: Callable[[str], Path]
) -> AsyncIterator[Play]:
    async for play in _played(make_engine, "qwen3_5", model_folder("qwen3_5"), seed=2):
        yield play


async def _played(
    make_engine: MakeEngine, family: str, folder: Path, *, seed: int
) -> AsyncIterator[Play]:
    engine = make_engine(folder)
    await engine.start()
    reference = Reference(sharp_model(family), engine.info.mount_layers)
    yield Play(
        engine=engine,
        reference=reference,
        rng=random.Random(seed),
        family=family,
        folder=folder,
    )
    await engine.close()
