"""Engines started again: within bounds, and nobody waits for one that never comes."""

from __future__ import annotations

import asyncio
import time
from collections import deque

import pytest

from harness_sdk.errors import ConfigError, EngineError, Unavailable
from rollout_service.engine.vllm.supervisor import RestartPolicy, Supervisor

QUICK = RestartPolicy(max_restarts=2, window_s=600, first_pause_s=0.001, max_pause_s=0.004)


class Engine:
    """One that ends when it is told to."""

    def __init__(self, before: Engine | None) -> None:
        self.number = 0 if before is None else before.number + 1
        self.is_closed = False
        self._ended = asyncio.get_running_loop().create_future()

    @property
    def has_ended(self) -> bool:
        return self._ended.done()

    def end(self) -> None:
        self._ended.set_result(None)

    async def ended(self) -> Unavailable:
        await asyncio.shield(self._ended)
        return Unavailable("the process has ended", value=f"exit code {self.number}")

    def last_lines(self) -> list[str]:
        return [f"line of {self.number}", "out of memory"]

    async def close(self) -> None:
        self.is_closed = True


class Starts:
    """Starts engines, or fails as the test wrote."""

    def __init__(self) -> None:
        self.failures: deque[Exception] = deque()
        self.gate = asyncio.Event()
        self.gate.set()
        self.times_s: list[float] = []

    async def __call__(self, before: Engine | None) -> Engine:
        self.times_s.append(time.monotonic())
        await self.gate.wait()
        if self.failures:
            raise self.failures.popleft()
        return Engine(before)


async def test_calls_wait_for_the_next_engine_and_its_end_is_logged(
    caplog: pytest.LogCaptureFixture,
) -> None:
    starts = Starts()
    supervisor = Supervisor(starts, QUICK)
    with pytest.raises(Unavailable, match="not running"):
        _ = supervisor.newest
    await supervisor.start()
    first = await supervisor.running()
    starts.gate.clear()
    first.end()
    assert not supervisor.is_serving and supervisor.newest is first
    waiting = [asyncio.create_task(supervisor.running()) for _ in range(3)]
    await asyncio.sleep(0.05)
    assert not any(task.done() for task in waiting)
    starts.gate.set()
    async with asyncio.timeout(5):
        found = await asyncio.gather(*waiting)
    assert {engine.number for engine in found} == {1}
    assert (supervisor.num_restarts, supervisor.is_serving) == (1, True)
    assert "its last lines:\nline of 0\nout of memory" in caplog.text
    await supervisor.close()
    assert found[0].is_closed
    with pytest.raises(Unavailable, match="not running"):
        await supervisor.running()


async def test_too_many_ends_and_failed_starts_end_it_and_whoever_waits_is_told() -> None:
    starts, told = Starts(), []
    supervisor = Supervisor(starts, QUICK, on_given_up=told.append)
    await supervisor.start()
    engine = await supervisor.running()
    starts.failures += [ConfigError("no memory"), ValueError("a fault of ours")]
    engine.end()
    async with asyncio.timeout(5):
        with pytest.raises(Unavailable) as caught:
            await supervisor.running()
    assert caught.value.retryable
    text = str(caught.value)
    assert "a fault of ours" in text and "3 times" in text and "2 restarts in 600 s" in text
    assert [str(error) for error in told] == [text]
    # The end, then two starts; the pauses grow.
    first, second, third = starts.times_s
    assert len(starts.times_s) == 3 and third - second >= 0.002 and second > first
    assert supervisor.newest is engine, "what is released is still taken back"
    await supervisor.close()


async def test_ends_of_long_ago_count_no_more() -> None:
    policy = RestartPolicy(max_restarts=1, window_s=0.2, first_pause_s=0.001)
    supervisor = Supervisor(Starts(), policy)
    await supervisor.start()
    for number in range(3):
        engine = await supervisor.running()
        assert engine.number == number
        engine.end()
        async with asyncio.timeout(5):
            await supervisor.running()
        await asyncio.sleep(0.25)
    (await supervisor.running()).end()
    (await supervisor.running()).end()
    async with asyncio.timeout(5):
        with pytest.raises(Unavailable, match="not started again"):
            await supervisor.running()
    await supervisor.close()


async def test_starts_that_fail_slowly_end_it_too(caplog: pytest.LogCaptureFixture) -> None:
    policy = RestartPolicy(max_restarts=3, window_s=0.001, first_pause_s=0.06, max_pause_s=0.06)
    starts = Starts()
    supervisor = Supervisor(starts, policy)
    await supervisor.start()
    starts.failures += [ConfigError("no memory") for _ in range(9)]
    (await supervisor.running()).end()
    async with asyncio.timeout(5):
        with pytest.raises(Unavailable, match=r"no memory.*4 times"):
            await supervisor.running()
    assert len(starts.times_s) == 4
    assert caplog.text.count("started again in 0.1 s") == 3, "the pauses grow no further"
    await supervisor.close()


async def test_a_call_under_which_engines_end_is_served_no_fourth_time() -> None:
    policy = RestartPolicy(max_restarts=50, first_pause_s=0.001, max_pause_s=0.001)
    supervisor = Supervisor(Starts(), policy)
    await supervisor.start()
    served: list[int] = []

    async def poison(engine: Engine) -> None:
        served.append(engine.number)
        engine.end()
        raise await engine.ended()

    async with asyncio.timeout(5):
        with pytest.raises(EngineError, match="3 times") as caught:
            await supervisor.served(poison)
        assert not caught.value.retryable and served == [0, 1, 2]

        # Others are served by the next, and told what is no end.
        async def innocent(engine: Engine) -> int:
            if engine.number < 4:
                engine.end()
                raise await engine.ended()
            return engine.number

        assert await supervisor.served(innocent) == 4

        async def refused(engine: Engine) -> None:
            raise Unavailable("not now")

        with pytest.raises(Unavailable, match="not now"):
            await supervisor.served(refused)
    await supervisor.close()


@pytest.mark.parametrize("ends", [False, True])
async def test_a_fault_of_the_watcher_is_told_and_ends_it(
    ends: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Where the engine has ended, and where it runs on: nobody would notice its end."""
    starts, told, broken = Starts(), [], asyncio.Event()

    async def ended(_: Engine) -> Unavailable:
        await broken.wait()
        raise KeyError("nobody thought of it")

    monkeypatch.setattr(Engine, "ended", ended)
    supervisor = Supervisor(starts, QUICK, on_given_up=told.append)
    await supervisor.start()
    engine = await supervisor.running()
    if ends:
        engine.end()
    waiting = asyncio.create_task(supervisor.running())
    await asyncio.sleep(0)
    assert waiting.done() != ends
    broken.set()
    async with asyncio.timeout(5):
        while not told:
            await asyncio.sleep(0.001)
        for call in [*([waiting] if ends else []), supervisor.running()]:
            with pytest.raises(Unavailable, match=r"not watched any more; got .*nobody thought"):
                await call
    assert not supervisor.is_serving and len(starts.times_s) == 1
    assert "watching the engine failed\nTraceback" in caplog.text
    await supervisor.close()
    assert engine.is_closed


async def test_closing_ends_a_start_and_tells_who_waits_for_it() -> None:
    starts = Starts()
    supervisor = Supervisor(starts, QUICK)
    await supervisor.start()
    starts.gate.clear()
    engine = await supervisor.running()
    engine.end()
    waiting = asyncio.create_task(supervisor.running())
    while len(starts.times_s) < 2:
        await asyncio.sleep(0.001)
    async with asyncio.timeout(5):
        await supervisor.close()
        with pytest.raises(Unavailable, match="not running"):
            await waiting
    assert engine.is_closed
