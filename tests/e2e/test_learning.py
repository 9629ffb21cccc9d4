"""The learning study end to end: its own trainer, one step of each phase, one row."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from benchmarks.learning.study import Plan, learn
from benchmarks.learning.variants import VARIANTS


@pytest.mark.soak
async def test_a_run_on_longest_paths_warms_up_learns_and_writes_a_row_a_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    small = dataclasses.replace(VARIANTS["longest_path"], groups_per_step=1)
    monkeypatch.setitem(VARIANTS, "longest_path", small)
    plan = Plan(variant="longest_path", seed=1, warmup_steps=1, demonstrations_per_step=4, steps=2)
    await learn(plan, tmp_path / "run", tmp_path / "rows.jsonl")
    rows = [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows[:2]] == [1, 2]
    assert 0 < rows[0]["generated_tokens"] < rows[1]["generated_tokens"]
    metrics = (tmp_path / "run" / "longest_path-1" / "metrics.jsonl").read_text().splitlines()
    steps = [json.loads(line) for line in metrics]
    assert [step["objective"] for step in steps] == ["sft", "path_average", "path_average"]
    assert all(step["divergence/kl_mean"] < 1e-8 for step in steps)
