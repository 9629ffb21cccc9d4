"""The examples of both styles against the real rollout service."""

from __future__ import annotations

from examples import branching, early_cancel, tool_loop
from harness_sdk import ThreadStatus
from tests.service.sdk_service import ScriptedEngine, calls, scripted


async def test_branching_example_judges_in_branches_and_reads_them() -> None:
    def script(text: str) -> str:
        if "[branch cost]" in text:
            return "a bus is cheap"
        if "[branch risk]" in text:
            return "a bus is safe"
        return "take the bus" if "Choose one" in text else "bus, bike, toll"

    async with scripted(script) as service:
        assert await branching.decide(service.address, "How?") == "take the bus"
        assert isinstance(service.engine, ScriptedEngine)
        assert "a bus is cheap" in service.engine.seen[-1]
        assert "a bus is safe" in service.engine.seen[-1]
    (record,) = service.records.written
    assert (record.reward, record.answer, len(record.threads)) == (1.0, "take the bus", 3)


async def test_tool_loop_example_asks_in_branches_and_is_rewarded() -> None:
    def script(text: str) -> str:
        if "[branch" in text:
            city = text.rsplit("[branch ", 1)[1].split("]")[0]
            if "<tool_response>\n" in text and text.count("000") == 1:
                return calls(("done", {"answer": text.split("000")[0][-3:] + "000"}))
            return calls(("population", {"city": city}))
        if "[fork]" not in text:
            return calls(
                ("fork", {"branches": {"oslo": "How large?", "bergen": "How large?"}}),
                ("wait", {}),
            )
        assert "724000" in text
        assert "294000" in text
        return calls(("done", {"answer": "Oslo"}))

    async with scripted(script) as service:
        result = await tool_loop.answer(service.address, "Which is larger, Oslo or Bergen?")
        assert (result.status, result.answer) == (ThreadStatus.DONE, "Oslo")
        assert {child.answer for child in result.children.values()} == {"724000", "294000"}
    assert service.records.written[0].reward == 1.0


async def test_early_cancel_example_stops_a_call_while_it_is_written() -> None:
    def script(text: str) -> str:
        if "<tool_response>" in text:
            return calls(("done", {"answer": "there is room"}))
        command = "ls /tmp" if "Never use" in text else "rm -r /tmp; " + "echo so; " * 100
        return calls(("shell", {"command": command}))

    async with scripted(script) as service:
        assert isinstance(service.engine, ScriptedEngine)
        service.engine.pause_s = 0.002
        assert await early_cancel.work(service.address, "Make room in /tmp") == "there is room"
        assert service.engine.running_turns == 0
        assert len(service.engine.seen) == 3
    (record,) = service.records.written
    # The stopped turn left nothing behind.
    assert record.threads[0].num_turns == 2
    assert record.num_sampled < 250
