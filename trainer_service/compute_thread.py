"""The one thread on which the model computes."""

from __future__ import annotations

import asyncio
import contextvars
import functools
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


class ComputeThread:
    """Runs blocking calls one after another, all of them on the same thread.

    The C library and the kernels keep what a thread has freed for that thread: a step on each
    thread of a pool would hold as many times the memory of one. Leaving the context waits for the
    call that runs.
    """

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="compute")

    async def __aenter__(self) -> ComputeThread:
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await asyncio.to_thread(self._pool.shutdown)

    async def run(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """`function(*args, **kwargs)`, as `asyncio.to_thread` calls it."""
        context = contextvars.copy_context()
        call = functools.partial(context.run, function, *args, **kwargs)
        return await asyncio.get_running_loop().run_in_executor(self._pool, call)
