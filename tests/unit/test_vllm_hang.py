"""A process that runs and does not answer is killed; one that answers late, or whose watcher was
held up itself, is not. A plain process stands in for the engine's."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import multiprocessing
import os
import signal
import subprocess
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rollout_service.engine.vllm import process
from rollout_service.engine.vllm.engine_log import EngineLog
from rollout_service.engine.vllm.hang import HangWatch
from rollout_service.engine.vllm.lifeline import Lifeline
from rollout_service.engine.vllm.process import EngineProcess
from rollout_service.engine.vllm.shared_memory import family

SPAWN = multiprocessing.get_context("spawn")
TIMEOUT_S = 0.2


class Asked:
    """Counts how often it is asked, and answers as the test says."""

    def __init__(self, answer: Callable[[int], Awaitable[object]]) -> None:
        self.count = 0
        self._answer = answer

    async def __call__(self) -> None:
        self.count += 1
        await self._answer(self.count)


async def watched(answer: Callable[[int], Awaitable[object]], *, num_asked: int) -> bool:
    """Whether a watch takes it for hung before it has asked `num_asked` times."""
    hung, asked = asyncio.Event(), Asked(answer)

    async def on_hung() -> None:
        hung.set()

    watch = HangWatch(asked, on_hung, TIMEOUT_S)
    async with asyncio.timeout(30):
        while asked.count < num_asked and not hung.is_set():
            await asyncio.sleep(0.01)
    watch.cancel()
    return hung.is_set()


async def test_no_answer_is_told_once_and_ends_the_watch() -> None:
    async def answer(number: int) -> None:
        if number == 3:
            await asyncio.Event().wait()

    began_s = time.monotonic()
    assert await watched(answer, num_asked=4)
    assert time.monotonic() - began_s > TIMEOUT_S


async def test_late_answers_and_errors_are_answers(caplog: pytest.LogCaptureFixture) -> None:
    async def answer(number: int) -> None:
        await asyncio.sleep(TIMEOUT_S / 4)
        raise RuntimeError(f"refused {number}")

    assert not await watched(answer, num_asked=4)
    gc.collect()
    assert not caplog.records


async def test_a_watcher_that_was_held_up_itself_waits_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("rollout_service.engine.vllm.hang._LATE_S", TIMEOUT_S)

    async def answer(number: int) -> None:
        if number == 1:
            asyncio.get_running_loop().call_later(0.01, time.sleep, 3 * TIMEOUT_S)
            await asyncio.sleep(3.5 * TIMEOUT_S)

    assert not await watched(answer, num_asked=2)


def hang(lifeline: Lifeline) -> None:
    """What an engine that hangs is found in."""
    time.sleep(600)


def hang_over_a_rank(lifeline: Lifeline) -> None:
    """The same, above a process of its own."""
    subprocess.run(["sleep", "600"], check=False)


@pytest.fixture
async def core() -> AsyncIterator[tuple[BaseProcess, EngineLog]]:
    """A process that is tied to this one as the engine's is, and does nothing."""
    log = EngineLog()
    process = SPAWN.Process(target=hang, args=(Lifeline(log.output),), daemon=True)
    process.start()
    yield process, log
    process.kill()
    process.join()
    log.seal()


def _llm(core: BaseProcess) -> Any:
    async def never(*_: object) -> None:
        await asyncio.Event().wait()

    resources = SimpleNamespace(engine_manager=SimpleNamespace(processes=[core]), engine_dead=False)
    return SimpleNamespace(
        engine_core=SimpleNamespace(resources=resources, call_utility_async=never)
    )


async def test_a_process_that_hangs_says_where_and_is_killed(
    core: tuple[BaseProcess, EngineLog], caplog: pytest.LogCaptureFixture
) -> None:
    process, log = core
    caplog.set_level(logging.INFO)
    assert process.pid is not None
    while os.getsid(process.pid) == os.getsid(0):
        await asyncio.sleep(0.01)
    engine = EngineProcess(_llm(process), hang_timeout_s=TIMEOUT_S)
    async with asyncio.timeout(30):
        error = await engine.ended()
    assert process.exitcode == -signal.SIGKILL
    assert error.value == "killed because it had not answered for 0.2 s" and error.retryable
    assert "engine.vllm.hang_timeout_s" in (error.remedy or "")
    lines = await asyncio.to_thread(log.last_lines)
    assert any("test_vllm_hang.py" in line and " in hang" in line for line in lines)
    assert "has not answered for 0.2 s and is killed" in caplog.text


async def test_a_process_that_has_ended_is_asked_no_more(
    core: tuple[BaseProcess, EngineLog],
) -> None:
    async def answer(_: int) -> None:
        pass

    asked = Asked(answer)
    llm = _llm(core[0])
    llm.engine_core.call_utility_async = lambda *_: asked()
    engine = EngineProcess(llm, hang_timeout_s=0.02)
    async with asyncio.timeout(30):
        while asked.count < 3:
            await asyncio.sleep(0.01)
        core[0].kill()
        await engine.ended()
    # One that it was just asked.
    await asyncio.sleep(0)
    count = asked.count
    await asyncio.sleep(0.1)
    assert asked.count == count


async def test_ranks_that_are_stopped_go_with_the_core() -> None:
    core = SPAWN.Process(target=hang_over_a_rank, args=(Lifeline(),), daemon=True)
    core.start()
    assert core.pid is not None
    while len(pids := family(core.pid)) == 1:
        await asyncio.sleep(0.01)
    (rank,) = pids[1:]
    os.kill(rank, signal.SIGSTOP)
    engine = EngineProcess(_llm(core), hang_timeout_s=TIMEOUT_S)
    try:
        async with asyncio.timeout(30):
            await engine.ended()
            while _runs(rank):
                await asyncio.sleep(0.01)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(rank, signal.SIGKILL)
    core.join()


def _runs(pid: int) -> bool:
    """Whether it is there, and no more than waits for whoever inherited it to look."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


async def test_a_process_that_cannot_be_killed_is_given_up(
    core: tuple[BaseProcess, EngineLog], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(process, "_DYING_S", 0.05)
    monkeypatch.setattr(EngineProcess, "_signal", lambda *_: None)
    engine = EngineProcess(_llm(core[0]), hang_timeout_s=TIMEOUT_S)
    async with asyncio.timeout(30):
        error = await engine.ended()
    assert core[0].is_alive() and "had not answered" in error.value
