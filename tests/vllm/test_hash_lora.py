"""A version's buffers are hashed beside the engine's steps."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import pytest

from rollout_service.engine.vllm import worker as module
from rollout_service.engine.vllm.worker import CursorWorker


def test_steps_wait_for_copies_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    copied, may_end = threading.Event(), threading.Event()

    def copies(*_: Any) -> dict[str, Any]:
        copied.set()
        return {"module": ("a", "b")}

    def hashes(served: dict[str, Any]) -> dict[str, Any]:
        assert may_end.wait(10)
        return served

    monkeypatch.setattr(module, "served_tensors", copies)
    monkeypatch.setattr(module, "served_checksums", hashes)
    manager = SimpleNamespace(lora_index_to_id=[], modules={}, packed_modules={})
    worker = CursorWorker()
    worker.model_runner = SimpleNamespace(lora_manager=SimpleNamespace(_adapter_manager=manager))
    worker.octopus_hash_lora(3, [])
    # What serves was taken before the call came back: it may change from now on.
    assert copied.is_set()
    may_end.set()
    assert worker.octopus_lora_checksums(3) == {"module": ("a", "b")}
    with pytest.raises(KeyError):
        worker.octopus_lora_checksums(3)
