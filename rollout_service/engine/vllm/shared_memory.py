"""Shared memory that processes have mapped, and freeing what those left that were killed.

Python's own tracker keeps it until the service ends, and knows nothing of what C++ has made.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable
from pathlib import Path

_FOLDER = "/dev/shm/"


def family(pid: int) -> list[int]:
    """A process and all below it."""
    found = [pid]
    # Grows while it is gone through.
    for each in found:
        with contextlib.suppress(OSError):
            for thread in Path(f"/proc/{each}/task").iterdir():
                found += map(int, (thread / "children").read_text().split())
    return found


def shared_files(pids: Iterable[int]) -> set[Path]:
    """Segments and semaphores that processes have mapped and this one has not."""
    mapped = set[Path]().union(*map(_mapped, pids))
    return mapped - _mapped(os.getpid())


def free(files: Iterable[Path]) -> None:
    """Free what nobody maps any more; what is gone is gone."""
    for file in files:
        with contextlib.suppress(OSError):
            file.unlink()


def _mapped(pid: int) -> set[Path]:
    try:
        lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
    except OSError:
        return set()
    # Address, rights, offset, device, inode, and the path, which may hold spaces.
    names = {line.split(maxsplit=5)[-1] for line in lines if f" {_FOLDER}" in line}
    return {Path(name) for name in names if not name.endswith(" (deleted)")}
