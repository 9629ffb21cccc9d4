"""The tutorial's training for real, as a reader types it: the reward rises."""

from __future__ import annotations

import contextlib
import io
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.pages import ROOT, blocks

_RUN_S = 1200


@pytest.mark.soak
@pytest.mark.timeout(_RUN_S + 60)
def test_the_tutorials_friends_learn_to_meet(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = blocks(ROOT / "docs" / "tutorial.md")
    (agent,) = [block for block in page if block.title == "meeting/agent.py"]
    train = next(block for block in page if block.text.startswith("octopus run meeting "))
    read = next(block for block in page if "metrics.jsonl" in block.text)
    (tmp_path / "meeting").mkdir()
    (tmp_path / agent.title).write_text(agent.text)
    environment = {
        **os.environ,
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'kernels'}",
    }
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", train.text],
        cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=_RUN_S, check=False,
    )  # fmt: skip
    sys.stdout.write(done.stdout)
    assert done.returncode == 0, done.stderr
    monkeypatch.chdir(tmp_path)
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(compile(read.text, read.place, "exec"), {})
    sys.stdout.write(printed.getvalue())
    lines = (tmp_path / "runs/meeting/metrics.jsonl").read_text().splitlines()
    rewards = [json.loads(line)["reward/mean"] for line in lines]
    assert (tmp_path / "runs/meeting/adapters" / str(len(rewards))).is_dir()
    assert sum(rewards[-3:]) / 3 > rewards[0] + 0.3
