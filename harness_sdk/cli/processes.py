"""Child processes that never outlive this one."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import random
import signal
import socket
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

_PR_SET_PDEATHSIG = 1
# Below Linux's ephemeral ports, 32768 and up: one of those may go to a client at any moment.
_PORTS = range(20_000, 32_768)
# Loaded before any fork: nothing may be imported between fork and exec.
_LIBC = ctypes.CDLL(None) if sys.platform == "linux" else None


async def spawn(
    argv: Sequence[str],
    *,
    log_path: Path,
    environment: Mapping[str, str] | None = None,
    cwd: Path | None = None,
    pass_fds: Sequence[int] = (),
) -> asyncio.subprocess.Process:
    """Start `argv` in a session of its own, so that Ctrl-C reaches this process alone.

    Args:
        argv: Program and arguments.
        log_path: File that its output is appended to.
        environment: Added to this process's own.
        cwd: Working folder; None keeps this one's.
        pass_fds: Descriptors that the child inherits.

    Returns:
        The child; on Linux the kernel ends it when this process dies, however that happens.
    """
    log_path.parent.mkdir(parents=True, exist_ok=True)
    parent = os.getpid()
    with log_path.open("ab") as log:
        return await asyncio.create_subprocess_exec(
            *argv,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            cwd=cwd,
            env={**os.environ, **(environment or {})},
            pass_fds=tuple(pass_fds),
            start_new_session=True,
            preexec_fn=lambda: _die_with(parent),
        )


async def stop(process: asyncio.subprocess.Process, grace_s: float) -> int:
    """End `process`: SIGTERM, then SIGKILL after `grace_s` seconds; its exit status."""
    if process.returncode is None:
        with contextlib.suppress(ProcessLookupError):
            process.terminate()
        try:
            await asyncio.wait_for(process.wait(), grace_s)
        except TimeoutError:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
    return await process.wait()


def free_port() -> int:
    """A loopback port that nothing listens on now, and that no outgoing connection takes."""
    while True:
        port = random.choice(_PORTS)
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
        return port


def _die_with(parent: int) -> None:
    if _LIBC is not None:
        _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
        if os.getppid() != parent:
            os._exit(1)
