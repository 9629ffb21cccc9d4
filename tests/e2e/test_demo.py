"""`octopus demo` as its users run it, with fewer steps: a whole run, and Ctrl-C in the middle."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from trainer_service.metrics import read_metrics

DEMO = [sys.executable, "-m", "harness_sdk.cli", "demo"]
KEYS = [
    "reward_first_quarter", "reward_last_quarter", "kl_max", "tokens_packed", "tokens_flat",
    "adapter_versions_served", "rollout_restarts", "rl_steps", "seconds", "engine",
]  # fmt: skip


@pytest.mark.slow
def test_short_demo_trains_serves_and_reports(tmp_path: Path) -> None:
    arguments = [
        "--steps", "2", "--warmup-steps", "1", "--seed", "5", "--groups-per-step", "2",
        "--json", "figures.json",
    ]  # fmt: skip
    done = subprocess.run(
        [*DEMO, *arguments], cwd=tmp_path, capture_output=True, text=True, timeout=280
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    figures = json.loads((tmp_path / "figures.json").read_text())
    assert list(figures) == KEYS
    assert 0 <= figures["kl_max"] < 1e-8
    assert 0 < figures["tokens_packed"] < figures["tokens_flat"]
    assert (figures["rl_steps"], figures["adapter_versions_served"]) == (2, 3)
    assert (figures["rollout_restarts"], figures["engine"]) == (0, "transformers")

    steps = read_metrics(tmp_path / "demo" / "run" / "metrics.jsonl")
    assert [step["objective"] for step in steps] == ["sft"] + ["dag_grpo"] * 2
    assert [step["policy/version"] for step in steps] == [1, 2, 3]
    # Compared with what the policy sampled: not a KL over nothing.
    assert all(step["divergence/num_tokens"] > 100 for step in steps[1:])
    assert all(step["batch/episodes"] == 16 for step in steps)
    assert figures["kl_max"] == max(step["divergence/kl_mean"] for step in steps[1:])

    for name, value in (("RL steps", "2"), ("LoRA versions served", "3")):
        assert re.search(rf"{name} +{value}\n", done.stdout)
    page = (tmp_path / "demo" / "report.html").read_text("utf-8")
    assert 'class="oct"' in page and 'class="chart"' in page
    assert (tmp_path / "demo" / "episode_early.html").is_file()
    assert _processes_of(tmp_path) == []


@pytest.mark.slow
def test_interrupted_demo_leaves_no_process_behind(tmp_path: Path) -> None:
    process = subprocess.Popen(
        [*DEMO, "--out", str(tmp_path / "out"), "--warmup-steps", "1", "--groups-per-step", "2"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONUNBUFFERED": "1"},
    )
    assert process.stdout is not None
    try:
        for line in process.stdout:
            # In the middle of the online phase, with episodes open.
            if "online RL" in line:
                break
        for line in process.stdout:
            if re.match(r" +1 ", line):
                break
        running = _processes_of(tmp_path)
        assert {name for _, name in running} >= {"rollout_service", "trainer_service", "valkey"}
        began = time.monotonic()
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 130
        assert time.monotonic() - began < 30
    finally:
        process.kill()
        _, errors = process.communicate()
    assert "Traceback" not in errors
    assert _processes_of(tmp_path) == []


@pytest.mark.slow
def test_lost_service_ends_the_demo_with_its_name(tmp_path: Path) -> None:
    process = subprocess.Popen(
        [*DEMO, "--out", str(tmp_path / "out")],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONUNBUFFERED": "1"},
    )
    assert process.stdout is not None
    try:
        next(line for line in process.stdout if "warm-up" in line)
        (rollout,) = [pid for pid, name in _processes_of(tmp_path) if name == "rollout_service"]
        os.kill(rollout, signal.SIGKILL)
        assert process.wait(60) == 1
    finally:
        process.kill()
        _, errors = process.communicate()
    assert errors.startswith("octopus demo: the rollout service ended; got status -9")
    assert "Traceback" not in errors
    assert _processes_of(tmp_path) == []


def test_vllm_is_refused_in_one_line() -> None:
    done = subprocess.run([*DEMO, "--engine", "vllm"], capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert done.stderr.startswith("octopus demo: the demo's model is not one for vLLM on the CPU")
    assert "run the demo with --engine transformers" in done.stderr
    assert done.stderr.count("\n") == 1


def test_folder_that_is_not_the_demos_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "thesis.txt").write_text("three years")
    done = subprocess.run(
        [*DEMO, "--out", str(tmp_path)], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 1
    assert "not the demo's own" in done.stderr
    assert (tmp_path / "run" / "thesis.txt").read_text() == "three years"


def _processes_of(folder: Path) -> list[tuple[int, str]]:
    """Pid and program of every process that mentions `folder` in its arguments or works in it."""
    return [
        (pid, name)
        for pid, words in _commands()
        if any(str(folder) in word for word in words)
        for name in ("rollout_service", "trainer_service", "valkey", "demo")
        if any(name in word for word in words)
    ]


def _commands() -> Iterator[tuple[int, list[str]]]:
    for path in Path("/proc").glob("[0-9]*"):
        try:
            words = (path / "cmdline").read_bytes().decode().split("\0")
            if (path / "stat").read_text().rsplit(")", 1)[1].split()[0] == "Z":
                continue
            yield int(path.name), [*words, str((path / "cwd").readlink())]
        except OSError:
            continue
