"""The README's harness runs as it is printed, against the real rollout service."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from harness_sdk import OctopusClient
from harness_sdk.agents import each_task, load_agent
from harness_sdk.runner import run_task
from tests.service.sdk_service import ScriptedEngine, scripted

README = (Path(__file__).parents[2] / "README.md").read_text()


def _blocks() -> list[str]:
    return re.findall(r"```python\n(.*?)```", README, flags=re.DOTALL)


async def test_readme_harness_earns_its_reward() -> None:
    harness = _blocks()[0]
    names: dict[str, Any] = {}
    exec(compile(harness, "README.md", "exec"), names)

    def script(text: str) -> str:
        if "[branch bold]" in text:
            return "ban all cars"
        if "[branch safe]" in text:
            return "more buses"
        return "take the bus" if "Decide." in text else "cars, buses, bikes"

    async with scripted(script) as service:
        assert await names["choose"](service.address, "How to cut traffic?", "bus") == 1.0
        assert isinstance(service.engine, ScriptedEngine)
        decided = next(seen for seen in service.engine.seen if "Decide." in seen)
        # Once in the join note, and once more where it was mounted.
        assert decided.count("ban all cars") == 2
        assert decided.count("more buses") == 1
    (record,) = service.records.written
    assert (record.reward, len(record.threads)) == (1.0, 3)


async def test_readme_agent_answers_and_is_scored(tmp_path: Path) -> None:
    (tmp_path / "agent.py").write_text(_blocks()[2])
    agent = load_agent(tmp_path)
    task = [task async for task in each_task(agent)][3]
    async with (
        scripted(lambda text: "6" if "What is 3+3?" in text else "no") as service,
        OctopusClient.connect(service.address) as client,
        client.episode(primitives=agent.primitives, sampling=agent.sampling) as episode,
    ):
        assert await run_task(agent, episode, task) == 1.0


def test_readme_names_only_commands_that_exist() -> None:
    from harness_sdk.cli.__main__ import COMMANDS

    (listed,) = re.findall(r"Commands: `octopus ([a-z |]+)`", README)
    assert listed.split(" | ") == list(COMMANDS)
    assert "asyncio.run(choose(" in _blocks()[1]
