"""Which run, episode, thread and request a line of the log is about.

Set around work, read by the log's formatter (`harness_sdk.cli.logs`); tasks and threads that
asyncio starts inherit them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from contextvars import ContextVar, Token

NAMES = ("run", "episode", "thread", "request")
"""In the order in which a line tells them."""

_ids: ContextVar[Mapping[str, str]] = ContextVar("octopus_log_ids", default={})  # noqa: B039


def current_ids() -> Mapping[str, str]:
    """Those that hold now."""
    return _ids.get()


def set_ids(**ids: str) -> None:
    """Add `ids` for the rest of this task, and of what it starts."""
    _ids.set({**_ids.get(), **{name: text for name, text in ids.items() if text}})


class log_ids:
    """Add `ids` within the block; empty ones are left out. Not for bodies of async generators.

    A block that is never left, or by another task than came in, puts nothing back.
    """

    def __init__(self, **ids: str) -> None:
        self._ids = {name: text for name, text in ids.items() if text}
        self._token: Token[Mapping[str, str]] | None = None

    def __enter__(self) -> None:
        self._token = _ids.set({**_ids.get(), **self._ids})

    def __exit__(self, *error: object) -> None:
        if self._token is not None:
            # In another context there is nothing to put back.
            with contextlib.suppress(ValueError):
                _ids.reset(self._token)
