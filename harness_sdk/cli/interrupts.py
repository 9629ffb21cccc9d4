"""Ctrl-C and SIGTERM for commands that clean up behind themselves."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


def run_interruptible(main: Coroutine[Any, Any, T]) -> T:
    """Run `main` to its end; SIGINT and SIGTERM cancel it.

    The handlers are set even where a shell started the command with SIGINT ignored, as it does
    for `command &` in a script: `kill -INT` then ends the command all the same.

    Raises:
        KeyboardInterrupt: A signal ended it.
    """

    async def interruptible() -> T:
        task = asyncio.current_task()
        assert task is not None
        for number in (signal.SIGINT, signal.SIGTERM):
            asyncio.get_running_loop().add_signal_handler(number, task.cancel)
        return await main

    try:
        return asyncio.run(interruptible())
    except asyncio.CancelledError:
        raise KeyboardInterrupt from None
