"""A few seconds of `make soak`: the service under faults, and what its report counts."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.soak import SoakOptions, SoakReport, soak
from tests.chat_tokenizers import VOCAB_SIZE, save_chat_tokenizer
from tests.tiny_models import save_tiny_model


@pytest.mark.slow
async def test_seconds_of_faults_lose_nothing_and_leave_nothing(tmp_path: Path) -> None:
    model = save_chat_tokenizer(
        save_tiny_model(tmp_path / "model", "qwen3_5", vocab_size=VOCAB_SIZE)
    )
    options = SoakOptions(
        seconds=3.0, episodes=24, clients=3, seed=1, cancelled=0.1, vanished=0.2, valkey_kill_s=1.0
    )
    report = await soak(options, tmp_path, model)
    assert report.valkey_kills and report.turns and report.failed["vanished"]
    assert set(report.failed) == {"vanished"}, report.failed
    assert (report.lost, report.duplicated) == (0, 0)
    assert not any(report.held.values()), report.held


def test_each_fault_is_named() -> None:
    good = SoakReport(
        seconds=60.0, episodes=9, turns=9000, failed={}, valkey_kills=1, turns_start=2000,
        turn_p50_start=0.1, turn_p99_start=0.4, turns_end=2000, turn_p50_end=0.1, turn_p99_end=0.5,
        client_lag_p99=0.01, memory_start={"service": 300.0, "agents": 90.0},
        memory_end={"service": 300.5, "agents": 90.0},
        memory_slope_per_min={"service": 0.5, "agents": 0.0, "valkey": 9.0},
        lost=0, duplicated=0, held={"cursors": 0},
    )  # fmt: skip
    assert not good.faults()
    for change in (
        {"lost": 1},
        {"duplicated": 1},
        {"held": {"cursors": 2}},
        {"memory_slope_per_min": {"service": 1.5, "agents": 0.0}},
        {"memory_slope_per_min": {"service": 0.5, "agents": 1.5}},
        {"turns_end": 900},
        {"turn_p99_end": 0.6},
    ):
        assert len(replace(good, **change).faults()) == 1, change  # type: ignore[arg-type]
