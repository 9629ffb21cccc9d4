"""`octopus run --model`: one command starts everything, runs an agent and trains it."""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path

import pytest

from harness_sdk.cli.step_columns import step_cells
from tests.chat_tokenizers import save_chat_tokenizer
from tests.tiny_models import save_tiny_model
from tests.watched import watcher
from trainer_service.metrics import read_metrics

AGENT = """
from harness_sdk import Limits, SamplingOptions, Thread

PRIMITIVES = ()
LIMITS = Limits(thread_budget=400, answer_reserve=50)
SAMPLING = SamplingOptions(max_tokens=8)

def tasks():
    return [{"id": "t0"}, {"id": "t1"}]

async def run(thread: Thread, task: dict) -> str:
    await thread.generate(f"hello {task['id']}")
    await thread.fork({f"{task['id']}-a": "left", f"{task['id']}-b": "right"}, run=branch)
    first, second = await thread.wait()
    await thread.read_thread(first.thread_id, (1, 1))
    turn = await thread.generate("end")
    return turn.raw_text

async def branch(thread: Thread) -> None:
    turn = await thread.generate()
    await thread.done(turn.raw_text)

def score(task: dict, answer: str) -> float:
    return sum(map(ord, answer)) % 97 / 96
"""


@pytest.mark.slow
async def test_one_command_trains_an_agent_into_two_served_versions(tmp_path: Path) -> None:
    model, agent = tmp_path / "model", tmp_path / "agent"
    for folder in (model, agent):
        folder.mkdir()
    save_tiny_model(model, "qwen3_5")
    save_chat_tokenizer(model)
    (agent / "agent.py").write_text(AGENT)
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "harness_sdk.cli", "run", str(agent), "--model", str(model)),
        *("--group-size", "2", "--groups", "2", "--trainer.batch.groups-per-step", "1"),
        cwd=tmp_path,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    assert process.stdout is not None
    named, url = (await process.stdout.readline()).split()
    assert named == b"page"
    async with watcher(url.decode()) as page:
        await page.until(lambda p: p.panes["steps"] and p.tile("KV use") != "-", timeout_s=60)
        await page.until(lambda p: len(p.episodes) >= 2)
    out, err = await process.communicate()
    assert process.returncode == 0, err.decode()[-4000:]
    assert out.count(b"group ") == 2
    assert b"failed    none" in out
    assert b"versions  0, 1, 2 served now" in out
    first = read_metrics(tmp_path / "runs" / "local" / "metrics.jsonl")[0]
    assert page.panes["steps"][-1]["cells"] == ["dag_grpo", *step_cells(first)]
    assert f"{first['reward/mean']:.3f}" == page.panes["steps"][-1]["cells"][3]
    assert page.panes["groups"][-1]["cells"][3] == f"{first['reward/mean']:.3f}"
