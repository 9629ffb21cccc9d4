"""Who works in a run's folder: one process at a time, and one folder a run."""

from __future__ import annotations

import contextlib
import fcntl
import socket
import uuid
from collections.abc import Iterator
from pathlib import Path

from harness_sdk.errors import ConfigError
from trainer_service.checkpoint import sync_tree


def identity(folder: Path) -> tuple[str, str]:
    """An id that stays with the run folder, wherever it moves, and where it is now."""
    path = folder / "run.id"
    owner = path.read_text("utf-8").strip() if path.exists() else ""
    if not owner:
        owner = uuid.uuid4().hex
        path.write_text(owner + "\n", "utf-8")
        sync_tree(folder)
    return owner, f"{socket.gethostname()}:{folder.resolve()}"


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Hold the run folder: two trainers of one run would train every episode twice."""
    with (folder / "trainer.lock").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise ConfigError(
                "another trainer works in this run's folder",
                value=folder,
                remedy="stop it, or use another run name",
            ) from error
        yield
