"""Child processes that never outlive this one."""

from __future__ import annotations

import asyncio
import contextlib
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
# Asks the kernel for SIGTERM at the parent's end, then becomes the program. A preexec_fn would do
# it in this process's own fork, whose gRPC handlers can abort the child (grpcio 1.85).
_LAUNCH = f"""
import ctypes, os, sys
ctypes.CDLL(None).prctl({_PR_SET_PDEATHSIG}, {int(signal.SIGTERM)})
if os.getppid() != int(sys.argv[1]):
    os._exit(1)
os.execvp(sys.argv[2], sys.argv[2:])
"""


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
    with log_path.open("ab") as log:
        return await asyncio.create_subprocess_exec(
            *_launched(argv),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            cwd=cwd,
            env={**os.environ, **(environment or {})},
            pass_fds=tuple(pass_fds),
            start_new_session=True,
        )


async def stop(process: asyncio.subprocess.Process, grace_s: float) -> int:
    """End `process`: SIGTERM, then SIGKILL after `grace_s` seconds; its exit status."""
    if process.returncode is None:
        with contextlib.suppress(ProcessLookupError):
            process.terminate()
        try:
            async with asyncio.timeout(grace_s):
                await process.wait()
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


def _launched(argv: Sequence[str]) -> Sequence[str]:
    if sys.platform != "linux":
        return argv
    return [sys.executable, "-I", "-S", "-c", _LAUNCH, str(os.getpid()), *argv]
