"""Which run, episode, thread and request a line of the log is about.

Set around work, read by the log's formatter (`harness_sdk.cli.logs`); tasks and threads that
asyncio starts inherit them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Generator, Mapping
from contextvars import ContextVar

NAMES = ("run", "episode", "thread", "request")
"""In the order in which a line tells them."""

_ids: ContextVar[Mapping[str, str]] = ContextVar("octopus_log_ids", default={})  # noqa: B039


def current_ids() -> Mapping[str, str]:
    """Those that hold now."""
    return _ids.get()


def set_ids(**ids: str) -> None:
    """Add `ids` for the rest of this task, and of what it starts."""
    _ids.set({**_ids.get(), **{name: text for name, text in ids.items() if text}})


@contextlib.contextmanager
def log_ids(**ids: str) -> Generator[None]:
    """Add `ids` within the block; empty ones are left out. Not for bodies of async generators."""
    before = _ids.set({**_ids.get(), **{name: text for name, text in ids.items() if text}})
    try:
        yield
    finally:
        _ids.reset(before)
