"""Threads beside a busy loop, in a service's process."""

from __future__ import annotations

import sys
import threading
import time

import pytest
import torch

from rollout_service.engine.transformers.adapters import tensor_checksums
from rollout_service.interpreter import quickly_switched


def test_threads_get_the_interpreter_from_a_busy_loop() -> None:
    """Hashing 400 tensors waits for it more than 800 times: 4 s of Python's 5 ms."""
    tensors = list(torch.randn(400, 4096).bfloat16())
    ended = threading.Event()

    def hash_all() -> None:
        tensor_checksums(tensors)
        ended.set()

    before = sys.getswitchinterval()
    with pytest.raises(ValueError, match="loop"), quickly_switched():
        threading.Thread(target=hash_all).start()
        begin = time.perf_counter()
        while not ended.is_set():
            pass
        assert time.perf_counter() - begin < 2
        raise ValueError("the loop failed")
    assert sys.getswitchinterval() == before
