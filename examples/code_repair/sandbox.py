"""Evaluates expressions over untrusted Python code in a process of its own.

A folder that is deleted afterwards, limits on time, memory, processes and file sizes, no network
where `unshare` may cut it, and no files but Python's own where the kernel has Landlock.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import logging
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

logger = logging.getLogger(__name__)

_CHILD = Path(__file__).with_name("sandbox_child.py")
_MAX_OUTPUT_BYTES = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class SandboxLimits:
    """What one evaluation may use."""

    wall_s: float = 5.0
    cpu_s: int = 4
    memory_bytes: int = 512 * 1024 * 1024
    """Address space, Python's own included."""
    file_bytes: int = 1024 * 1024
    """Size of a file that it writes."""

    def to_rlimits(self) -> dict[str, int]:
        """By name in `resource`; no process or thread beside the first."""
        return {
            "RLIMIT_CPU": self.cpu_s,
            "RLIMIT_AS": self.memory_bytes,
            "RLIMIT_FSIZE": self.file_bytes,
            "RLIMIT_NPROC": 0,
            "RLIMIT_NOFILE": 32,
            "RLIMIT_CORE": 0,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluated:
    """What became of one expression."""

    value: str | None = None
    """`repr` of its value; None where there is none."""
    error: str = ""
    """Why not."""


async def evaluate(
    source: str, expressions: Sequence[str], limits: SandboxLimits | None = None
) -> list[Evaluated]:
    """Run `source` as a module, then evaluate `expressions` in it, in order.

    The values come back as text, so what they are compared with never meets the code. Whatever
    the code does, each expression has a result.
    """
    limits = limits or SandboxLimits()
    order = {"source": source, "expressions": [*expressions], "limits": limits.to_rlimits()}
    with tempfile.TemporaryDirectory(
        prefix="octopus-repair-", ignore_cleanup_errors=True
    ) as folder:
        output, ended = await _run(json.dumps(order).encode(), folder, limits.wall_s)
    told, *lines = [_parsed(line) for line in output.splitlines()] or [{}]
    if told.get("unconfined"):
        _warn_once(f"the sandbox cannot confine {told['unconfined']}")
    found = [_result(line) for line in lines[: len(expressions)]]
    why = "the process ended" if ended else f"took longer than {limits.wall_s:g} s"
    return found + [Evaluated(error=why)] * (len(expressions) - len(found))


async def _run(order: bytes, folder: str, wall_s: float) -> tuple[bytes, bool]:
    """What the child said, and whether it ended by itself."""
    process = await asyncio.create_subprocess_exec(
        *_without_network(),
        *(sys.executable, "-I", "-S", "-B", str(_CHILD)),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.DEVNULL,
        cwd=folder,
        env={},
        start_new_session=True,
    )
    assert process.stdin is not None
    assert process.stdout is not None
    output = bytearray()
    try:
        async with asyncio.timeout(wall_s):
            process.stdin.write(order)
            process.stdin.close()
            while len(output) < _MAX_OUTPUT_BYTES:
                piece = await process.stdout.read(1 << 16)
                if not piece:
                    return bytes(output), True
                output += piece
    except TimeoutError:
        pass
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        await process.wait()
    return bytes(output), False


@functools.cache
def _without_network() -> tuple[str, ...]:
    """What a command begins with to run without network; nothing where that is not allowed."""
    unshare = shutil.which("unshare")
    own = ("--net",) if os.geteuid() == 0 else ("--user", "--map-current-user", "--net")
    if unshare is not None:
        tried = subprocess.run([unshare, *own, "true"], capture_output=True, check=False)
        if tried.returncode == 0:
            return (unshare, *own)
    _warn_once("the sandbox cannot cut the network: `unshare --net` is missing or refused")
    return ()


@functools.cache
def _warn_once(text: str) -> None:
    logger.warning(text)


def _parsed(line: bytes) -> dict[str, Any]:
    """A line of the child; the code under test may have written another."""
    try:
        parsed = json.loads(line)
    except (ValueError, RecursionError):
        return {}
    return parsed if isinstance(parsed, dict) else {}


def _result(line: dict[str, Any]) -> Evaluated:
    value = line.get("value")
    if isinstance(value, str):
        return Evaluated(value=value)
    return Evaluated(error=str(line.get("error", "no result")))
