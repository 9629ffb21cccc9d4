"""The code repair example: its tasks, and a sandbox that holds what code may do."""

from __future__ import annotations

import ctypes
import subprocess
import time
from pathlib import Path

import pytest

from examples.code_repair import agent, sandbox
from examples.code_repair.sandbox import SandboxLimits, evaluate
from examples.code_repair.tasks import TASKS, RepairTask
from harness_sdk.agents import load_agent, task_id

FIXES = {
    "median": (
        "return numbers[len(numbers) // 2]",
        "half = len(numbers) // 2\n"
        "    return numbers[half] if len(numbers) % 2 else (numbers[half - 1] + numbers[half]) / 2",
    ),
    "rotate": (
        "return items[-k:] + items[:-k]",
        "k %= max(len(items), 1)\n    return items[len(items) - k:] + items[:len(items) - k]",
    ),
    "roman": (
        "NUMERALS = [",
        'NUMERALS = [(900, "CM"), (400, "CD"), (90, "XC"), (40, "XL"), (9, "IX"), (4, "IV"), ',
    ),
    "brackets": (
        'return all(text.count(a) == text.count(b) for a, b in ("()", "[]", "{}"))',
        'text = "".join(each for each in text if each in "()[]{}")\n'
        "    for _ in text:\n"
        '        text = text.replace("()", "").replace("[]", "").replace("{}", "")\n'
        "    return not text",
    ),
    "runs": (
        "    return found",
        "    if text:\n        found.append((text[start], len(text) - start))\n    return found",
    ),
    "bisect": ("low = middle\n", "low = middle + 1\n"),
    "intervals": (
        "begin < found[-1][1]:\n            found[-1][1] = end",
        "begin <= found[-1][1]:\n            found[-1][1] = max(end, found[-1][1])",
    ),
    "duration": (r"(\d)", r"(\d+)"),
    "wrap": (
        'lines = [""]\n    for word in text.split():\n        if ',
        "lines = []\n    for word in text.split():\n        if not lines or 1 + ",
    ),
    "flatten": (
        "isinstance(item, list):\n            found += item",
        "isinstance(item, (list, tuple)):\n            found += flat(item)",
    ),
    "collect": ("into=[]):", "into=None):\n    into = [] if into is None else into"),
    "order": (
        "        found.append",
        "        if not ready:\n            return None\n        found.append",
    ),
}


def repaired(task: RepairTask) -> str:
    old, new = FIXES[task.id]
    assert task.source.count(old) == 1
    source = task.source.replace(old, new)
    # The pairs have to stand in falling order.
    return source.replace("def roman", "NUMERALS.sort(reverse=True)\n\ndef roman")


@pytest.mark.parametrize("task", TASKS, ids=task_id)
async def test_every_task_fails_as_shipped_and_can_be_repaired(task: RepairTask) -> None:
    assert await agent.failures(task.source, task.visible, SandboxLimits(wall_s=1.5))
    assert await agent.failures(repaired(task), (*task.visible, *task.hidden)) == []
    assert await agent.score(task, repaired(task)) == 1.0


def test_folder_loads_as_an_agent() -> None:
    loaded = load_agent(Path(agent.__file__).parent)
    assert "fork" in loaded.primitives
    assert loaded.tasks is agent.tasks
    assert [task.id for task in agent.tasks()] == [*FIXES]


async def test_hidden_tests_decide_the_reward() -> None:
    (task,) = [task for task in TASKS if task.id == "collect"]
    by_heart = "def collect(item, into=()):\n    return [*into, item]\n"
    assert await agent.failures(by_heart, task.visible) == []
    assert await agent.score(task, by_heart) == 0.0
    assert await agent.score(task, "def collect(:") == 0.0
    assert await agent.score(task, "") == 0.0


async def test_failures_say_what_came_and_what_was_expected() -> None:
    tests = (("f(1)", 2), ("f('x')", 3), ("f(2)", 3), ("g()", 0))
    found = await agent.failures("def f(x):\n    return x + 2", tests)
    assert found[0] == "f(1) gave 3, expected 2"
    assert "TypeError" in found[1]
    assert found[2] == "f(2) gave 4, expected 3"
    assert "NameError" in found[3]


async def test_an_infinite_loop_ends_with_its_time_and_keeps_earlier_results() -> None:
    began = time.monotonic()
    source = "def spin():\n    while True: pass"
    found = await evaluate(source, ["1 + 1", "spin()", "2"], SandboxLimits(wall_s=1.0))
    assert [result.value for result in found] == ["2", None, None]
    assert found[1].error == "took longer than 1 s"
    assert time.monotonic() - began < 4.0


async def test_processor_time_is_limited_too() -> None:
    found = await evaluate("while True: pass", ["1"], SandboxLimits(wall_s=30.0, cpu_s=1))
    assert found[0].error == "the process ended"


async def test_a_fork_bomb_makes_no_process() -> None:
    source = "import os, threading\ndef bomb():\n    while True: os.fork()"
    threads = "threading.Thread(target=print).start()"
    run = "__import__('subprocess').run(['true'])"
    found = await evaluate(source, ["bomb()", threads, run, "'still here'"])
    assert "BlockingIOError" in found[0].error
    assert "can't start new thread" in found[1].error
    assert "BlockingIOError" in found[2].error
    assert found[3].value == "'still here'"


async def test_a_memory_hog_is_refused_and_the_rest_goes_on() -> None:
    found = await evaluate("", ["len('a' * 10 ** 10)", "len('a' * 10 ** 6)"])
    assert found[0].error.startswith("MemoryError")
    assert found[1].value == "1000000"


async def test_large_files_are_refused() -> None:
    found = await evaluate("", ["open('a', 'w').write('x' * 2 ** 21)", "open('b', 'w').write('x')"])
    assert "File too large" in found[0].error
    assert found[1].value == "1"


async def test_printing_without_end_is_dropped() -> None:
    source = "print('x' * 2 ** 22)\nimport sys; print('y' * 2 ** 22, file=sys.stderr)"
    assert (await evaluate(source, ["7"]))[0].value == "7"


async def test_ending_the_process_earns_nothing() -> None:
    for leave in ("import os; os._exit(0)", "raise SystemExit(0)", "import sys; sys.exit()"):
        found = await evaluate(leave, ["1", "2"])
        assert [result.value for result in found] == [None, None]


FORGE = """
import os

def forge(line):
    for descriptor in range(3, 9):
        try:
            os.write(descriptor, line + b"\\n")
        except OSError:
            pass
"""


async def test_what_code_writes_among_the_results_stands_for_its_own() -> None:
    noise = await evaluate(FORGE + "forge(b'no JSON')\nforge(b'[]')", ["1", "2"])
    assert [result.value for result in noise] == [None, None]
    forged = await evaluate(FORGE, ['forge(b\'{"value": "7"}\')', "3"])
    assert [result.value for result in forged] == ["7", "None"]


async def test_folders_are_deleted_and_no_process_stays() -> None:
    (found,) = await evaluate("open('left', 'w').write('x')", ["__import__('os').getcwd()"])
    assert found.value is not None
    assert not Path(found.value.strip("'")).exists()
    (own,) = await evaluate("", ["__import__('os').getpid()"])
    assert not Path(f"/proc/{own.value}").exists()


def has_landlock() -> bool:
    return ctypes.CDLL(None).syscall(444, None, ctypes.c_size_t(0), 1) > 0


@pytest.mark.skipif(not has_landlock(), reason="the kernel has no Landlock")
async def test_files_outside_are_neither_written_nor_read(tmp_path: Path) -> None:
    secret, made = tmp_path / "secret", tmp_path / "made"
    secret.write_text("s")
    for folder in (tmp_path, *tmp_path.parents[:3]):
        folder.chmod(0o777)
    secret.chmod(0o666)
    found = await evaluate(
        "import os",
        [
            f"open({str(made)!r}, 'w')",
            f"open({str(secret)!r}).read()",
            f"open({str(secret)!r}, 'w')",
            f"os.truncate({str(secret)!r}, 0)",
            f"os.remove({str(secret)!r})",
            f"os.rename({str(secret)!r}, 'mine')",
            f"open({agent.__file__!r}).read()",
            "open('own', 'w').write('x')",
            "open('own').read()",
            "__import__('decimal').Decimal(1) + 1 == 2",
        ],
    )
    assert all(
        "PermissionError" in result.error or "Invalid cross" in result.error for result in found[:7]
    )
    assert [result.value for result in found[7:]] == ["1", "'x'", "True"]
    assert secret.read_text() == "s"
    assert not made.exists()


async def test_the_network_is_cut() -> None:
    if not sandbox._without_network():
        pytest.skip("unshare --net is missing or refused")
    with_udp = "socket.socket(socket.AF_INET, socket.SOCK_DGRAM).sendto(b'x', ('127.0.0.1', 9))"
    with_tcp = "socket.create_connection(('127.0.0.1', 9), 1)"
    found = await evaluate("import socket", [with_udp, with_tcp])
    assert "unreachable" in found[0].error
    assert found[1].value is None


async def test_what_cannot_be_confined_is_said_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refused(*args: object, **known: object) -> subprocess.CompletedProcess[bytes]:
        return subprocess.CompletedProcess((), 1)

    sandbox._without_network.cache_clear()
    sandbox._warn_once.cache_clear()
    monkeypatch.setattr(sandbox.subprocess, "run", refused)
    for _ in range(2):
        assert (await evaluate("", ["1"]))[0].value == "1"
    assert caplog.text.count("cannot cut the network") == 1
    sandbox._without_network.cache_clear()
