"""Ties vLLM's processes to the one that started them: none hears Ctrl-C, none is left behind, what
they write goes where it says, and each tells where it hangs when it is asked.

vLLM's engine core looks after its workers, but not after its own parent.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import select
import shutil
import signal
import threading
from pathlib import Path
from typing import Any

STACKS_SIGNAL = signal.SIGUSR1
"""Lets a tied process write the stacks of all its threads."""
_followed: set[int] = set()


class Lifeline(dict[str, Any]):
    """An empty table in vLLM's configuration; a process that receives it is tied to the sender.

    The configuration is the first that reaches a new process, before it waits for anything, and
    each process hands it to those that it starts itself.

    Args:
        output: Descriptor of the sender's that takes what the process writes, and those that it
            starts; None leaves that where it is.
        folder: Of the sender's, removed if it is killed.
    """

    def __init__(self, output: int | None = None, folder: str | None = None) -> None:
        super().__init__()
        self._output = output
        self._folder = folder

    def __reduce__(self) -> tuple[Any, ...]:
        return _received, (os.getpid(), _born(os.getpid()), self._output, self._folder)


def _received(sender: int, born: str, output: int | None, folder: str | None) -> Lifeline:
    # A copy within a process arrives at its sender.
    if sender == os.getpid():
        return Lifeline(output, folder)
    if sender not in _followed and hasattr(os, "pidfd_open"):
        _followed.add(sender)
        _follow(sender, born, folder)
        if output is not None:
            _write_to(sender, output)
        faulthandler.register(STACKS_SIGNAL, file=2, all_threads=True)
    # Whoever this process starts inherits what it writes to.
    return Lifeline()


def _write_to(sender: int, output: int) -> None:
    with contextlib.suppress(OSError):
        descriptor = os.open(f"/proc/{sender}/fd/{output}", os.O_WRONLY)
        for own in (1, 2):
            os.dup2(descriptor, own)
        os.close(descriptor)


def _follow(parent: int, born: str, folder: str | None) -> None:
    """Leave the terminal's process group, and end when the parent, born then, ends."""
    # The service ends the engine when the last episode is stored; Ctrl-C would end it at once.
    with contextlib.suppress(PermissionError):
        os.setsid()
    try:
        descriptor = os.pidfd_open(parent)
    except ProcessLookupError:
        _end(folder)
        return
    if _born(parent) != born:
        _end(folder)
    threading.Thread(
        target=_end_after, args=(descriptor, folder), daemon=True, name="octopus-parent"
    ).start()


def _born(pid: int) -> str:
    """When a process began, in ticks: its number may be another's later. Empty: there is none."""
    try:
        status = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return ""
    # The second of its fields is a name in parentheses, which may hold anything.
    return status.rpartition(")")[2].split()[19]


def _end_after(descriptor: int, folder: str | None) -> None:
    ended = select.poll()
    ended.register(descriptor, select.POLLIN)
    ended.poll()
    _end(folder)


def _end(folder: str | None) -> None:
    if folder is not None:
        shutil.rmtree(folder, ignore_errors=True)
    # At once: a step may take long, and an exit handler may wait for what is gone.
    os.kill(os.getpid(), signal.SIGKILL)
