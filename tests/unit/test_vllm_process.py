"""The engine process watched, given up, tied to its parent; plain processes stand in for it."""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from harness_sdk.errors import ConfigError, EngineError, Unavailable
from rollout_service.engine.vllm import process
from rollout_service.engine.vllm.process import EngineProcess, launched

SPAWN = multiprocessing.get_context("spawn")


def _llm(core: BaseProcess) -> Any:
    """As much of vLLM's client as the watcher reads."""
    resources = SimpleNamespace(engine_manager=SimpleNamespace(processes=[core]), engine_dead=False)
    return SimpleNamespace(engine_core=SimpleNamespace(resources=resources))


def _closable(core: BaseProcess, done: list[str]) -> Any:
    """The same, and what closing it calls, which is written to `done`."""
    llm = _llm(core)
    llm.output_handler = None
    llm.dead_error = RuntimeError("dead")
    llm.output_processor = SimpleNamespace(propagate_error=lambda error: done.append(str(error)))
    llm.shutdown = lambda: done.append("shut down")
    llm.engine_core.resources.ctx = SimpleNamespace(destroy=lambda _: done.append("destroyed"))
    return llm


@pytest.fixture
async def core() -> AsyncIterator[BaseProcess]:
    """A process that only sleeps."""
    process = SPAWN.Process(target=time.sleep, args=(600,), daemon=True)
    process.start()
    yield process
    process.kill()
    process.join()


async def test_calls_end_with_the_process_and_its_end_is_told(core: BaseProcess) -> None:
    watched = EngineProcess(_llm(core))
    assert await watched.answer(asyncio.sleep(0, "reply")) == "reply"
    assert isinstance(watched.failure(ValueError("one request")), EngineError)
    waiting = asyncio.create_task(watched.answer(asyncio.Event().wait()))
    await asyncio.sleep(0)
    assert not watched.has_ended
    core.kill()
    async with asyncio.timeout(10):
        error = await watched.ended()
        with pytest.raises(Unavailable, match="the engine process has ended"):
            await waiting
    assert watched.has_ended and error.retryable and "memory is short" in error.value
    assert isinstance(watched.failure(ValueError("any request")), Unavailable)
    with pytest.raises(Unavailable):
        await watched.answer(asyncio.Event().wait())


async def test_calls_end_with_a_close(core: BaseProcess) -> None:
    watched = EngineProcess(_closable(core, []))
    waiting = asyncio.create_task(watched.answer(asyncio.Event().wait()))
    await asyncio.sleep(0)
    async with asyncio.timeout(10):
        await watched.close()
        with pytest.raises(Unavailable, match="the engine process has ended"):
            await waiting
        with pytest.raises(Unavailable):
            await watched.answer(asyncio.Event().wait())


async def test_call_that_fails_because_the_process_ends_says_so(core: BaseProcess) -> None:
    async def refused() -> None:
        raise RuntimeError("EngineDeadError")

    llm = _llm(core)
    watched = EngineProcess(llm)
    with pytest.raises(RuntimeError):
        await watched.answer(refused())
    # vLLM's own watch may know of the end first.
    llm.engine_core.resources.engine_dead = True
    with pytest.raises(Unavailable, match="the engine process has ended"):
        await watched.answer(refused())
    core.kill()
    async with asyncio.timeout(10):
        await watched.ended()


async def test_a_core_that_told_of_its_failure_and_does_not_end_is_killed(
    core: BaseProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(process, "_DYING_S", 0.05)
    llm = _llm(core)
    watched = EngineProcess(llm)
    llm.engine_core.resources.engine_dead = True
    assert watched.has_ended and core.is_alive()
    async with asyncio.timeout(10):
        await watched.ended()
    core.join()
    assert core.exitcode == -signal.SIGKILL


async def test_close_that_is_cancelled_goes_on_and_is_waited_for(core: BaseProcess) -> None:
    done: list[str] = []
    told = asyncio.Event()
    llm = _closable(core, done)
    llm.output_handler = asyncio.create_task(told.wait())
    watched = EngineProcess(llm)
    core.kill()
    async with asyncio.timeout(10):
        await watched.ended()
        first = asyncio.create_task(watched.close())
        await asyncio.sleep(0)
        first.cancel()
        with pytest.raises(asyncio.CancelledError):
            await first
        second = asyncio.create_task(watched.close())
        await asyncio.sleep(0)
        assert not second.done() and not done
        told.set()
        await second
    assert done == ["dead", "shut down", "destroyed"]


async def test_start_that_is_cancelled_kills_what_it_started() -> None:
    started: list[BaseProcess] = []

    def launch() -> None:
        process = SPAWN.Process(target=time.sleep, args=(600,), daemon=True)
        process.start()
        started.append(process)
        process.join()
        raise RuntimeError("the engine core did not start")

    starting = asyncio.create_task(launched(launch))
    async with asyncio.timeout(30):
        while not started:
            await asyncio.sleep(0.01)
        starting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await starting
    assert started[0].exitcode == -signal.SIGKILL


async def test_start_that_fails_says_so_in_one_line() -> None:
    def launch() -> None:
        raise RuntimeError("Engine core initialization failed.\nSee above.")

    with pytest.raises(ConfigError, match=r"^vLLM did not start: .* failed\.; see vLLM's own"):
        await launched(launch)


TREE = """
import multiprocessing, os, sys, time
from rollout_service.engine.vllm.lifeline import Lifeline

def grow(depth, lifeline):
    print(depth, os.getpid(), os.getsid(0), flush=True)
    if depth:
        method = multiprocessing.get_context(sys.argv[1])
        method.Process(target=grow, args=(depth - 1, lifeline)).start()
    time.sleep(600)

if __name__ == "__main__":
    grow(2, {"nested": [Lifeline()]})
"""


@contextmanager
def _tree(script: Path, method: str = "spawn", *, lifeline: str = "Lifeline()") -> Iterator[Any]:
    """Three processes, each of which starts the next; the first is given, with its output."""
    script.write_text(TREE.replace("Lifeline()", lifeline))
    command = [sys.executable, str(script), method]
    root = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert root.stdout is not None
    try:
        yield root
    finally:
        root.kill()
        root.wait()
        root.stdout.close()


def _until(is_so: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + 10
    while not is_so():
        assert time.monotonic() < deadline_s
        time.sleep(0.02)


@pytest.mark.parametrize("method", ["spawn", "forkserver"])
@pytest.mark.parametrize("killed", [0, 1])
def test_tied_processes_leave_the_terminal_and_end_with_their_parents(
    killed: int, method: str, tmp_path: Path
) -> None:
    with _tree(tmp_path / "tree.py", method) as root:
        lines = [next(root.stdout).split() for _ in range(3)]
        pids = [int(pid) for _, pid, _ in lines]
        assert [int(session) for _, _, session in lines] == [os.getsid(0), pids[1], pids[2]]
        os.kill(pids[killed], signal.SIGKILL)
        _until(lambda: not any(_runs(pid) for pid in pids[killed:]))


def test_a_killed_process_leaves_no_folder_of_sockets(tmp_path: Path) -> None:
    folder = tmp_path / "sockets"
    folder.mkdir()
    (folder / "socket").touch()
    with _tree(tmp_path / "tree.py", lifeline=f"Lifeline(None, {str(folder)!r})") as root:
        for _ in range(3):
            next(root.stdout)
        assert (folder / "socket").exists()
        root.kill()
        _until(lambda: not folder.exists())


SHARING = """
import multiprocessing, os, time
from multiprocessing.shared_memory import SharedMemory
from rollout_service.engine.vllm.engine_log import EngineLog
from rollout_service.engine.vllm.lifeline import Lifeline
from rollout_service.engine.vllm.shared_memory import family, free, shared_files

def share(lifeline):
    memory = SharedMemory(create=True, size=4096)
    print("shared", memory.name, flush=True)
    os.write(2, "out of m\\xe9mory\\n".encode("latin-1"))
    time.sleep(600)

if __name__ == "__main__":
    log = EngineLog()
    child = multiprocessing.get_context("spawn").Process(target=share, args=(Lifeline(log.output),))
    child.start()
    while len(log._lines) < 2:
        time.sleep(0.01)
    _, name = log._lines[0].split()
    shared = shared_files(family(os.getpid()))
    assert [each.name for each in shared] == [name]
    child.kill()
    child.join()
    print(*log.last_lines(), sep="|")
    assert os.path.exists(f"/dev/shm/{name}"), "nothing else frees it"
    free(shared)
    assert not os.path.exists(f"/dev/shm/{name}")
"""


def test_what_a_killed_process_shared_is_freed_and_what_it_said_is_kept(tmp_path: Path) -> None:
    script = tmp_path / "sharing.py"
    script.write_text(SHARING)
    done = subprocess.run(
        [sys.executable, str(script)], capture_output=True, text=True, timeout=60, check=True
    )
    first, second, *_ = done.stdout.strip().split("|")
    assert first.startswith("shared psm_") and second == "out of m\ufffdmory"
    # Its own output is the log's alone.
    assert "out of m" not in done.stderr


def _runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_sockets_of_vllm_go_with_the_process_that_prepared_for_them() -> None:
    script = """
import os, pathlib, sys
from rollout_service.engine.vllm.launch import prepare_environment

for _ in range(2):
    prepare_environment()
folder = pathlib.Path(os.environ["VLLM_RPC_BASE_PATH"])
(folder / "socket").touch()
assert len(sys.path) == len(set(sys.path)), sys.path
print(folder)
"""
    environment = {k: v for k, v in os.environ.items() if k != "VLLM_RPC_BASE_PATH"}
    ran = subprocess.run(
        [sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=True
    )
    folder = Path(ran.stdout.strip())
    assert folder.name.startswith("octopus-") and not folder.exists()
