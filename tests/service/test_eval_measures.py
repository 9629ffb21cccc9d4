"""`octopus eval` with what its episodes' records tell, and without workers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import redis.asyncio

from harness_sdk import control
from harness_sdk.cli.processes import free_port
from harness_sdk.record import EpisodeRecord, record_to_bytes
from tests.service.sdk_service import calls, scripted
from tests.service.speaking import octopus
from tests.tiny_models import tiny_model
from tests.valkey import embedded_valkey

AGENT = """
from harness_sdk import Limits, SamplingOptions, Thread, ToolLoop

LIMITS = Limits(max_threads=10)
SAMPLING = SamplingOptions(max_tokens=400)

def tasks():
    return [{"id": "a"}, {"id": "b"}, {"id": "c"}]

async def run(thread: Thread, task: dict) -> None:
    await ToolLoop().run(thread, "split it")

def score(task: dict, answer: str) -> float:
    return float(answer == "split")
"""


def splitter(text: str) -> str:
    """Forks one branch, waits for it and answers; alone where it may not fork."""
    if "[branch" in text:
        return calls(("done", {"answer": "half"}))
    if "[wait]" in text:
        return calls(("done", {"answer": "split"}))
    if "error: " in text:
        return calls(("done", {"answer": "alone"}))
    return calls(("fork", {"branches": {"half": "Do half."}}), ("wait", {}))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    path = tmp_path / "splitter"
    path.mkdir()
    (path / "agent.py").write_text(AGENT)
    return path


async def test_eval_command_measures_the_records_of_its_episodes(
    folder: Path, tmp_path: Path
) -> None:
    figures, config = tmp_path / "figures.json", tmp_path / "config.json"
    config.write_text(json.dumps(tiny_model("llama").config.to_dict()))
    async with (
        embedded_valkey(tmp_path / "valkey") as url,
        redis.asyncio.Redis.from_url(url) as store,
        scripted(splitter) as service,
    ):
        written: list[EpisodeRecord] = []

        async def write(record: EpisodeRecord) -> str:
            written.append(record)
            fields: Any = {control.RECORD_FIELD: record_to_bytes(record)}
            entry: Any = await store.xadd(control.episodes_key(record.run), fields)
            if record.task_id == "c":
                # As a trainer's progress trims it.
                await store.xdel(control.episodes_key(record.run), entry)
            return entry.decode()

        service.records.write = write
        process = await octopus(
            *("eval", str(folder), "--address", service.address, "--redis-url", url),
            *("--cost-model", str(config), "--json", str(figures)),
        )
        out, err = await process.communicate()
    assert process.returncode == 0, err.decode()
    found = json.loads(figures.read_text())
    assert (found["episodes"], found["measured"], found["accuracy"]) == (3, 2, 1.0)
    first = next(record for record in written if record.task_id == "a")
    (result,) = [each for each in found["results"] if each["task_id"] == "a"]
    assert result["measures"]["explored_context"] == first.num_tokens == result["num_tokens"]
    assert result["measures"]["turns"] == result["num_turns"] == 3
    assert found["measures"]["workers"] == 1.0
    assert found["measures"]["fork_rate"] == 1.0
    assert found["measures"]["parallelism"] == 1.0, "the root waits for its only branch"
    assert found["measures"]["flops"] > 2 * 147_456 * first.num_tokens
    assert b"records   2 measured" in out
    assert b"children_per_worker" in out
    assert b"1 of 3 records are not in the stream" in err


async def test_eval_command_without_workers_refuses_forks_and_changes_no_prompt(
    folder: Path, tmp_path: Path
) -> None:
    records: list[EpisodeRecord] = []
    for number, limits in enumerate(((), ("--limits.max-threads", "0"))):
        figures = tmp_path / f"{number}.json"
        async with scripted(splitter) as service:
            process = await octopus(
                *("eval", str(folder), "--address", service.address, "--tasks", "1"),
                *("--json", str(figures), *limits),
            )
            _, err = await process.communicate()
        assert process.returncode == 0, err.decode()
        records += service.records.written
        found = json.loads(figures.read_text())
        assert (found["accuracy"], found["forks"]) == ((1.0, 1.0), (0.0, 0.0))[number]
        assert (found["measured"], found["measures"]) == (0, {})
    split, alone = records
    assert alone.answer == "alone"
    assert split.nodes[0].token_ids == alone.nodes[0].token_ids


async def test_a_stream_that_goes_away_leaves_the_scores(folder: Path, tmp_path: Path) -> None:
    away = f"redis://127.0.0.1:{free_port()}"
    async with scripted(splitter) as service:
        asked = ("eval", str(folder), "--address", service.address, "--redis-url")
        process = await octopus(*asked, away)
        out, err = await process.communicate()
        assert process.returncode == 1
        assert b"Redis cannot be read" in err
        assert not service.records.written, "it is known before the first episode"
        async with embedded_valkey(tmp_path / "valkey") as url:
            write, server = service.records.write, redis.asyncio.Redis.from_url(url)

            async def last_one(record: EpisodeRecord) -> str:
                if len(service.records.written) == 2:
                    await server.shutdown(nosave=True)
                return await write(record)

            service.records.write = last_one
            process = await octopus(*asked, url)
            out, err = await process.communicate()
            await server.aclose()
    assert process.returncode == 0, err.decode()
    assert b"the scores stand" in err
    assert b"accuracy  1.0000" in out


async def test_a_cost_without_records_is_refused(folder: Path) -> None:
    process = await octopus("eval", str(folder), "--cost-model", "x", "--address", "a:1")
    _, err = await process.communicate()
    assert process.returncode == 1
    assert b"give --redis-url" in err
