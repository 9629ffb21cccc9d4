"""The model-driven loop in trees of any depth: clean ends, and a stack that does not grow."""

from __future__ import annotations

import inspect
import re

from harness_sdk import Limits, LoopResult, OctopusClient, ThreadStatus, ToolLoop
from harness_sdk.measures import measure
from rollout_service.sessions.threads import Thread
from tests.service.sdk_service import calls, scripted

DEPTH = 50
LIMITS = Limits(thread_budget=4_096, answer_reserve=128, max_threads=DEPTH)


def depth_of(text: str) -> int:
    return len(re.findall(r"\[branch ", text))


def digger(text: str) -> str:
    """Looks once, then forks one branch and waits; the deepest answers, each above adds one."""
    own = text.rsplit("[branch ", 1)[-1]
    answers = re.findall(r"\[wait\] d\d+ done; answer: (\d+)", own)
    if answers:
        return calls(("done", {"answer": str(int(answers[-1]) + 1)}))
    if "<tool_response>\nseen" not in own:
        return calls(("look", {}))
    depth = depth_of(text)
    if depth == DEPTH:
        return calls(("done", {"answer": "0"}))
    return calls(("fork", {"branches": {f"d{depth + 1}": "dig"}}), ("wait", {}))


async def test_fifty_forks_below_each_other_end_and_keep_the_stack() -> None:
    stacks: list[int] = []

    async def look() -> str:
        """Look around."""
        stacks.append(len(inspect.stack(0)))
        return "seen"

    async with (
        scripted(digger) as service,
        OctopusClient.connect(service.address) as client,
        client.episode(limits=LIMITS) as episode,
    ):
        result = await ToolLoop([look]).run(episode.root, "dig")
        await episode.close(reward=1.0)
    assert (result.status, result.answer) == (ThreadStatus.DONE, str(DEPTH))
    assert len(stacks) == DEPTH + 1
    assert len(set(stacks[1:])) == 1, "the root runs in its caller, every branch in a task"
    (record,) = service.records.written
    assert {thread.status for thread in record.threads} == {"done"}
    assert [thread.depth for thread in record.threads] == list(range(DEPTH + 1))
    found = measure(record)
    assert (found.depth, found.workers, found.worker_children) == (DEPTH, DEPTH, DEPTH - 1)
    assert found.critical_path == found.generated, "each level waits for the one below"
    level: LoopResult = result
    for depth in range(1, DEPTH + 1):
        (level,) = level.children.values()
        assert (level.thread_id, level.status) == (f"d{depth}", ThreadStatus.DONE)
    assert not level.children


async def test_a_root_that_leaves_ends_every_level_below() -> None:
    def leaver(text: str) -> str | None:
        depth = depth_of(text)
        if depth == 5:
            return None
        if not depth and "[fork]" in text:
            return calls(("done", {"answer": "gone"}))
        wait = () if not depth else (("wait", {}),)
        return calls(("fork", {"branches": {f"d{depth + 1}": "dig"}}), *wait)

    async with (
        scripted(leaver) as service,
        OctopusClient.connect(service.address) as client,
        client.episode(limits=LIMITS) as episode,
    ):
        result = await ToolLoop().run(episode.root, "dig")
        await episode.close(reward=0.0)
    assert result.answer == "gone"
    (record,) = service.records.written
    assert [thread.status for thread in record.threads] == [
        "done",
        *["cancelled"] * (len(record.threads) - 1),
    ]
    assert service.engine.stats().resident_cursors == 0


def test_descendants_of_a_deep_tree_come_before_their_children() -> None:
    root = Thread("root", parent=None, base=None, head_id=0, policy_version=0)
    last, expected = root, []
    for number in range(3_000):
        child, side = (
            Thread(name, parent=last, base=None, head_id=0, policy_version=0)
            for name in (f"t{number}", f"s{number}")
        )
        last.children += [child, side]
        last = child
        expected.append(f"t{number}")
    found = [thread.thread_id for thread in root.descendants()]
    assert found[:3_000] == expected
    assert found[3_000:] == [f"s{number}" for number in reversed(range(3_000))]
