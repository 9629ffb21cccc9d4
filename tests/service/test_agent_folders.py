"""Agents in folders: loaded, and run by `octopus run` and `octopus eval` on the real service."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import pty
import re
import signal
import sys
import termios
import urllib.request
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from harness_sdk import Limits, OctopusClient, SamplingOptions
from harness_sdk.agents import load_agent
from harness_sdk.errors import ConfigError
from harness_sdk.replicas import Replicas
from harness_sdk.runner import Runner, RunOptions
from tests.service.sdk_service import Running, scripted
from tests.service.speaking import octopus, speaker
from tests.unit.scripted_server import until

AGENT = """
from answers import ANSWERS
from harness_sdk import Limits, SamplingOptions, Thread, ToolLoop

LIMITS = Limits(max_turns=4)
SAMPLING = SamplingOptions(max_tokens=200)

def tasks():
    for name in ANSWERS:
        yield {"id": name, "question": f"say {name}"}

async def run(thread: Thread, task: dict) -> None:
    await ToolLoop().run(thread, task["question"])

def score(task: dict, answer: str) -> float:
    return float(answer == ANSWERS[task["id"]])

def metrics(task: dict, answer: str) -> dict[str, float]:
    return {"length": float(len(answer))}
"""


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    """An agent folder with a sibling module; nothing of it stays imported."""
    path = tmp_path / "speaker"
    path.mkdir()
    (path / "agent.py").write_text(AGENT)
    (path / "answers.py").write_text('ANSWERS = {"a": "a", "b": "b", "c": "not c"}\n')
    before, modules = list(sys.path), set(sys.modules)
    yield path
    sys.path[:] = before
    for name in set(sys.modules) - modules:
        del sys.modules[name]


@pytest.fixture
async def service() -> AsyncIterator[Running]:
    async with scripted(speaker) as service:
        yield service


async def test_groups_share_a_task_and_their_records_carry_rewards(
    service: Running, folder: Path
) -> None:
    ended: list[str] = []
    async with OctopusClient.connect(service.address) as client:
        runner = Runner(
            Replicas([client]),
            load_agent(folder),
            RunOptions(group_size=2, num_groups=4, concurrency=3),
            on_group=lambda group: ended.append(group.task_id),
        )
        groups = await runner.run()
    assert sorted(ended) == ["a", "a", "b", "c"]
    assert [group.rewards for group in groups] == [[1, 1], [1, 1], [0, 0], [1, 1]]
    assert len({group.group_id for group in groups}) == 4
    records = service.records.written
    assert len(records) == 8
    for group in groups:
        mine = [record for record in records if record.group_id == group.group_id]
        assert [record.reward for record in mine] == group.rewards
        assert {record.task_id for record in mine} == {group.task_id}
    assert groups[0].episodes[0].metrics == {"length": 1.0}


async def test_agent_folder_brings_its_limits_and_sampling(folder: Path) -> None:
    loaded = load_agent(folder)
    assert loaded.name == "speaker"
    assert loaded.limits == Limits(max_turns=4)
    assert loaded.sampling == SamplingOptions(max_tokens=200)
    assert "fork" in loaded.primitives


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "folder with agent.py"),
        ("def tasks(): ...\nasync def run(t, k): ...\n", r"does not define score\(\)"),
        ("def tasks(): ...\ndef run(t, k): ...\ndef score(k, a): ...\n", "not async"),
        (
            "SAMPLING = {}\ndef tasks(): ...\nasync def run(t, k): ...\ndef score(k, a): ...\n",
            r"SAMPLING .*got dict .*harness_sdk\.SamplingOptions",
        ),
        ("x = (\n", r"imported; got SyntaxError.*agent\.py:1"),
        ("\nimport no_such_module\n", r"imported; got ModuleNotFoundError.*agent\.py:2"),
    ],
)
def test_folder_that_is_no_agent_is_refused(tmp_path: Path, text: str | None, message: str) -> None:
    if text is not None:
        (tmp_path / "agent.py").write_text(text)
    with pytest.raises(ConfigError, match=message):
        load_agent(tmp_path)


async def test_eval_command_scores_each_task_once_and_writes_figures(
    service: Running, folder: Path, tmp_path: Path
) -> None:
    figures = tmp_path / "made" / "figures.json"
    process = await octopus(
        "eval", str(folder), "--address", service.address, "--json", str(figures)
    )
    out, err = await process.communicate()
    assert process.returncode == 0, err.decode()
    found = json.loads(figures.read_text())
    assert found["accuracy"] == pytest.approx(2 / 3)
    assert found["stderr"] == pytest.approx(1 / 3)
    assert (found["tasks"], found["episodes"], found["turns"]) == (3, 3, 1.0)
    assert found["metrics"] == {"length": 1.0}
    assert {result["task_id"] for result in found["results"]} == {"a", "b", "c"}
    assert b"accuracy  0.6667 +- 0.3333 over 3 tasks" in out
    assert {record.group_id for record in service.records.written} == {""}


async def test_eval_command_takes_the_tasks_that_are_for_it(
    service: Running, folder: Path, tmp_path: Path
) -> None:
    with (folder / "agent.py").open("a") as file:
        file.write('\n\ndef eval_tasks():\n    return [t for t in tasks() if t["id"] == "b"]\n')
    figures = tmp_path / "figures.json"
    for words in (
        ("run", str(folder), "--address", service.address, "--group-size", "1"),
        ("eval", str(folder), "--address", service.address, "--json", str(figures)),
    ):
        process = await octopus(*words)
        _, err = await process.communicate()
        assert process.returncode == 0, err.decode()
    assert [result["task_id"] for result in json.loads(figures.read_text())["results"]] == ["b"]
    assert sorted(record.task_id for record in service.records.written) == ["a", "b", "b", "c"]


async def test_run_command_prints_groups_and_a_summary(service: Running, folder: Path) -> None:
    process = await octopus(
        "run", str(folder), "--address", service.address, "--group-size", "2", "--groups", "5"
    )
    out, err = await process.communicate()
    assert process.returncode == 0, err.decode()
    assert out.count(b"group ") == 5
    assert b"10 episodes" in out
    assert len(service.records.written) == 10


def shown(terminal: int) -> str:
    """What is written to a terminal until nobody has it open."""
    found = b""
    with contextlib.suppress(OSError):
        while part := os.read(terminal, 4096):
            found += part
    os.close(terminal)
    return found.decode()


@pytest.mark.parametrize(
    ("command", "bar", "line"),
    [
        (("eval", "--tasks", "2"), "2/2", "b  1.000  b"),
        (("run", "--group-size", "2", "--groups", "3"), "6/6", "group 3  c  reward 0.000"),
        # The agent makes its tasks one by one: how many there are shows at the end.
        (("eval",), "3episode", "c  0.000  c"),
    ],
)
async def test_a_terminal_sees_a_bar_below_the_lines(
    service: Running,
    folder: Path,
    command: tuple[str, ...],
    bar: str,
    line: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # Commands that other tests ran in this process had no terminal.
    monkeypatch.delenv("TQDM_DISABLE", raising=False)
    ours, theirs = pty.openpty()
    termios.tcsetwinsize(theirs, (24, 100))
    name, *words = command
    process = await octopus(
        *(name, str(folder), "--address", service.address, "--concurrency", "1", *words),
        output=theirs,
    )
    os.close(theirs)
    told = await asyncio.to_thread(shown, ours)
    assert await process.wait() == 0, told
    # A bar is written over and over in its row; lines begin rows of their own.
    *_, last = (row for row in told.split("\r") if "episode/s" in row or "s/episode" in row)
    assert bar in last and re.search(r"reward [01]\.\d{3}, 0 failed", last)
    assert any(row.startswith(line) for row in re.split("[\r\n]+", told)), told
    assert "accuracy" in told[told.rindex(last) :]


async def test_run_command_tells_prometheus_how_far_it_is(service: Running, folder: Path) -> None:
    (folder / "answers.py").write_text('ANSWERS = {"a": "a", "c": "not c", "hang": ""}\n')
    process = await octopus(
        *("run", str(folder), "--address", service.address, "--group-size", "1"),
        *("--groups", "3", "--metrics.port", "0"),
    )
    assert process.stdout is not None and process.stderr is not None
    address = None
    while address is None:
        address = re.search(rb"figures at (http\S+)", await process.stderr.readline())
    for _ in range(2):
        await process.stdout.readline()
    with urllib.request.urlopen(address[1].decode(), timeout=10) as answer:
        lines = answer.read().decode().splitlines()
    process.send_signal(signal.SIGINT)
    await process.communicate()
    told = dict(line.rsplit(" ", 1) for line in lines if line[0] != "#")
    wait = float(told.pop('octopus_run_permits_wait_s{run="default"}'))
    assert 0 <= wait < 10
    assert told == {
        'octopus_run_episodes_ended_total{outcome="failed",run="default"}': "0.0",
        'octopus_run_episodes_ended_total{outcome="scored",run="default"}': "2.0",
        'octopus_run_episodes_running{run="default"}': "1.0",
        'octopus_run_groups_ended{run="default"}': "2.0",
        'octopus_run_reward_sum{run="default"}': "1.0",
    }


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
async def test_run_command_stops_cleanly_at_a_signal(
    service: Running, folder: Path, number: signal.Signals
) -> None:
    (folder / "answers.py").write_text('ANSWERS = {"a": "a", "hang": ""}\n')
    process = await octopus(
        "run", str(folder), "--address", service.address, "--group-size", "1", "--groups", "2"
    )
    assert process.stdout is not None
    await process.stdout.readline()
    process.send_signal(number)
    out, err = await process.communicate()
    assert process.returncode == 130, err.decode()
    assert b"accuracy  1.0000" in out
    assert b"Traceback" not in err
    await until(lambda: len(service.records.written) == 2)
    assert service.records.written[1].stop_reason == "cancelled"


async def test_command_without_a_service_says_what_to_give(folder: Path) -> None:
    process = await octopus("run", str(folder))
    _, err = await process.communicate()
    assert process.returncode == 1
    assert b"give --address host:port" in err


async def test_command_takes_a_model_or_an_address(folder: Path) -> None:
    process = await octopus("run", str(folder), "--address", "localhost:1", "--model", "smollm2")
    _, err = await process.communicate()
    assert process.returncode == 1
    assert b"got model smollm2 and address localhost:1; give one of them" in err
