"""`octopus run --model smollm2`: a real model on real questions, trained to two versions."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_smollm2_answers_real_questions_and_is_trained_twice(tmp_path: Path) -> None:
    done = subprocess.run(
        [
            *(sys.executable, "-m", "harness_sdk.cli", "run", "examples/deep_search"),
            *("--model", "smollm2", "--folder", str(tmp_path), "--run", "deep"),
            *("--groups", "2", "--group-size", "2", "--concurrency", "2"),
            *("--sampling.max-tokens", "6"),
        ],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=880,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "versions  0, 1, 2 served now" in done.stdout
    assert "failed    none" in done.stdout
    assert "forks     2.00 per episode" in done.stdout
    assert "reads     1.00 per episode" in done.stdout
    lines = (tmp_path / "deep" / "metrics.jsonl").read_text().splitlines()
    steps = [json.loads(line) for line in lines if '"step"' in line]
    assert [step["policy/version"] for step in steps] == [1.0, 2.0]
    for step in steps:
        # Of tokens that the trained version itself sampled; older ones differ by what it learned.
        assert step.get("divergence_current/kl_max", 0.0) < 1e-8
        assert step["tokens/packed"] < step["tokens/flat"]
        assert step["publish/acknowledged"] == 1.0
