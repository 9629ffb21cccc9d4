"""`python -m benchmarks.deep_search`: all phases, and what it says where the trainer ends."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


async def _started(out: Path, *flags: str) -> asyncio.subprocess.Process:
    return await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "benchmarks.deep_search", "--model", "demo", "--out", str(out)),
        *("--questions", "2", "--passes", "1", "--concurrency", "4", "--seconds", "300"),
        *("--group-size", "2", "--groups-per-step", "1", *flags),
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )


@pytest.mark.parametrize(
    "warm_up", [pytest.param(0, marks=pytest.mark.slow), pytest.param(1, marks=pytest.mark.soak)]
)
async def test_scores_trains_and_scores_again(tmp_path: Path, warm_up: int) -> None:
    process = await _started(tmp_path, "--warm-up", str(warm_up), "--steps", "2")
    out, err = await process.communicate()
    assert process.returncode == 0, err.decode()[-4000:]
    report = json.loads((tmp_path / "report.json").read_text())
    assert [(row["when"], row["version"], row["scored"]) for row in report["rows"]] == [
        ("before", 0, 2),
        ("after", warm_up + 2, 2),
    ]
    steps = report["steps"]
    assert [step["objective"] for step in steps] == ["sft"] * warm_up + ["dag_grpo"] * 2
    assert [step["version"] for step in steps] == list(range(1, warm_up + 3))
    # Answers that were given are right; those of the held-out questions were not.
    assert all(step["reward"] == 1.0 for step in steps[:warm_up])
    assert all(step["kl"] < 1e-8 and step["tokens"] > 0 for step in steps)
    assert {len(each["after"]) for each in report["questions"]} == {1}
    assert report["compared"]["f1"]["questions"] == 2
    assert out.decode() == (tmp_path / "report.md").read_text()


@pytest.mark.soak
async def test_says_at_once_that_the_trainer_ended_and_keeps_the_first_scores(
    tmp_path: Path,
) -> None:
    process = await _training(tmp_path)
    (trainer,) = _running(tmp_path, "trainer_service")
    os.kill(trainer, signal.SIGKILL)
    told = await _until_ended(process, 1)
    assert b"the trainer service ended" in told
    assert b"status -9" in told
    assert b"after, pass" not in told
    report = json.loads((tmp_path / "report.json").read_text())
    assert [row["when"] for row in report["rows"]] == ["before"]
    assert report["steps"]
    assert _running(tmp_path) == []


@pytest.mark.soak
async def test_an_interrupt_leaves_no_process_behind(tmp_path: Path) -> None:
    process = await _training(tmp_path)
    assert len(_running(tmp_path, "rollout_service")) == 1
    assert len(_running(tmp_path, "trainer_service")) == 1
    assert len(_running(tmp_path, "valkey")) == 1
    process.send_signal(signal.SIGINT)
    await _until_ended(process, 130)
    assert _running(tmp_path) == []
    assert (tmp_path / "report.json").is_file()


async def _training(out: Path) -> asyncio.subprocess.Process:
    """A run whose trainer has made a step."""
    process = await _started(out)
    log = out / "deep-search" / "trainer.log"
    while not log.is_file() or b"step 1:" not in log.read_bytes():
        assert process.returncode is None
        await asyncio.sleep(0.1)
    return process


async def _until_ended(process: asyncio.subprocess.Process, status: int) -> bytes:
    async with asyncio.timeout(60):
        _, told = await process.communicate()
    assert process.returncode == status, told.decode()
    return told


def _running(out: Path, name: str = "") -> list[int]:
    """Processes with `name` among their arguments that were given something in `out`, or that work
    there as Valkey does; not the run's own."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            words = (folder / "cmdline").read_bytes().decode()
            place = os.readlink(folder / "cwd")
        except OSError:
            continue
        if name in words and str(out) in words + place and "benchmarks.deep_search" not in words:
            found.append(int(folder.name))
    return found
