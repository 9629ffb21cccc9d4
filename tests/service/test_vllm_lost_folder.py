"""A version whose folder is gone when its engine process is started again."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from harness_sdk.errors import AdapterError
from rollout_service.engine.vllm import core


async def test_no_model_is_loaded_for_an_adapter_that_is_gone(
    model_folder: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def launched(*_: Any) -> None:
        raise AssertionError("a model was loaded")

    monkeypatch.setattr(core, "launched_llm", launched)
    options: Any = SimpleNamespace(
        model_path=str(model_folder("llama")), max_adapters=2, max_lora_rank=8
    )
    facts: Any = SimpleNamespace(model_hash="f" * 64, has_experts=False)
    with pytest.raises(AdapterError, match="cannot read the adapter"):
        await core.start_core(options, facts, None, {3: str(tmp_path / "gone")})
