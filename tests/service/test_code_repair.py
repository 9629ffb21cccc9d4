"""The code repair example against the real service, by scripted models."""

from __future__ import annotations

from pathlib import Path

from examples.code_repair import agent
from examples.code_repair.tasks import TASKS, RepairTask
from harness_sdk import Limits, OctopusClient
from harness_sdk.agents import load_agent, task_id
from harness_sdk.runner import run_task
from tests.service.sdk_service import Running, Script, ScriptedEngine, calls, scripted
from tests.unit.test_code_repair import repaired

FOLDER = Path(agent.__file__).parent
# The scripted model's tokens are bytes.
LIMITS = Limits(thread_budget=16_384, answer_reserve=512, max_threads=4)
(TASK,) = (task for task in TASKS if task.id == "median")
(STUCK,) = (task for task in TASKS if task.id == "order")
GOOD, BAD = repaired(TASK), TASK.source.replace("sorted", "list")


async def played(script: Script, task: RepairTask = TASK) -> tuple[float, Running]:
    async with (
        scripted(script) as service,
        OctopusClient.connect(service.address) as client,
        client.episode(limits=LIMITS, task_id=task_id(task)) as episode,
    ):
        return await run_task(load_agent(FOLDER), episode, task), service


def own_part(text: str) -> str:
    return text.rsplit("[branch ", 1)[-1]


async def test_a_branch_for_each_hypothesis_and_the_passing_one_is_adopted() -> None:
    def script(text: str) -> str:
        own = own_part(text)
        if "[branch " in text:
            if "pass" in own:
                return calls(("done", {"answer": own.split(" pass")[0].rsplit("\n", 1)[-1]}))
            source = GOOD if own.startswith("even]") else BAD
            return calls(("write_file", {"path": "solution.py", "text": source}), ("run_tests", {}))
        if "[wait]" in text:
            assert "[wait] sorting done; answer: 0 of 2" in text
            assert "[wait] even done; answer: 2 of 2" in text
            return calls(("adopt", {"branch": "even"}), ("done", {"answer": "even lengths"}))
        if "1 of 2 pass" in text:
            branches = {"even": "The even case?", "sorting": "The sorting?"}
            return calls(("fork", {"branches": branches}), ("wait", {}))
        return calls(("read_file", {"path": "solution.py"}), ("run_tests", {}))

    reward, service = await played(script)
    assert reward == 1.0
    (record,) = service.records.written
    assert [thread.status for thread in record.threads] == ["done"] * 3
    assert (record.reward, record.answer) == (1.0, "even lengths")
    assert isinstance(service.engine, ScriptedEngine)
    assert any("median([1, 2, 3, 4]) gave 3, expected 2.5" in text for text in service.engine.seen)


async def test_without_the_adoption_the_branches_work_is_lost() -> None:
    def script(text: str) -> str:
        if "[branch " in text:
            return calls(
                ("write_file", {"path": "solution.py", "text": GOOD}), ("done", {"answer": "ok"})
            )
        if "[wait]" in text:
            return calls(("done", {"answer": "ok"}))
        return calls(("fork", {"branches": {"even": "Repair it."}}), ("wait", {}))

    reward, service = await played(script)
    assert reward == 0.0
    assert service.records.written[0].stop_reason == "done"


async def test_a_task_that_is_not_repaired_earns_nothing() -> None:
    seen: list[str] = []

    def script(text: str) -> str:
        seen.append(text)
        if "of 2 pass" in text:
            return calls(("done", {"answer": "no idea"}))
        return calls(
            ("read_file", {"path": "other.py"}),
            ("write_file", {"path": "/etc/passwd", "text": "x"}),
            ("adopt", {"branch": "nobody"}),
            ("run_tests", {}),
        )

    reward, _ = await played(script, STUCK)
    assert reward == 0.0
    for told in ("no file 'other.py'", "no file '/etc/passwd'", "no branch 'nobody'"):
        assert told in seen[-1]
    assert "1 of 2 pass" in seen[-1]
    assert "gave ValueError" in seen[-1]


async def test_a_rewind_restores_the_files_and_a_branch_keeps_those_of_its_fork() -> None:
    """Good files, a fork, bad files, a rewind to before them."""

    def script(text: str) -> str:
        if "[branch " in text:
            if "pass" not in own_part(text):
                return calls(("run_tests", {}))
            assert "2 of 2 pass" in own_part(text)
            return calls(("done", {"answer": "as forked"}))
        if "[rewind 1]" in text:
            return calls(("done", {"answer": "repaired"}))
        if "[wait]" in text:
            return calls(("rewind", {"step": 1, "note": "that was worse"}))
        if "lines now" not in text:
            return calls(("write_file", {"path": "solution.py", "text": GOOD}))
        return calls(
            ("fork", {"branches": {"check": "Test it."}}),
            ("write_file", {"path": "solution.py", "text": BAD}),
            ("wait", {}),
        )

    reward, service = await played(script)
    assert reward == 1.0
    (record,) = service.records.written
    assert record.threads[0].num_rewinds == 1
    assert record.threads[1].answer == "as forked"


async def test_a_root_without_done_earns_nothing() -> None:
    def script(text: str) -> str:
        if "lines now" in text:
            return "It is repaired."
        return calls(("write_file", {"path": "solution.py", "text": GOOD}))

    reward, service = await played(script)
    assert reward == 0.0
    assert service.records.written[0].stop_reason == "no_done"
