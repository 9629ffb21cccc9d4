"""The engine process from the service: started so that it can be given up, watched, ended."""

from __future__ import annotations

import asyncio
import logging
import multiprocessing
import os
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

from harness_sdk.errors import ConfigError, EngineError, HarnessError, Unavailable

logger = logging.getLogger(__name__)

T = TypeVar("T")

_KILL_PAUSE_S = 0.1


async def launched(launch: Callable[[], Any]) -> Any:
    """What `launch` returns, run on a thread; cancelled, its process is killed first.

    Raises:
        ConfigError: vLLM did not start.
    """
    before = set(multiprocessing.active_children())
    starting = asyncio.create_task(asyncio.to_thread(launch))
    try:
        return await asyncio.shield(starting)
    except asyncio.CancelledError:
        # A thread cannot be cancelled and loading takes minutes: it fails with its process.
        while not starting.done():
            for child in set(multiprocessing.active_children()) - before:
                child.kill()
            await asyncio.wait([starting], timeout=_KILL_PAUSE_S)
        if not starting.cancelled() and starting.exception() is None:
            await EngineProcess(starting.result(), None).close()
        raise
    except HarnessError:
        raise
    except Exception as error:
        lines = str(error).strip().splitlines() or [type(error).__name__]
        raise ConfigError(
            f"vLLM did not start: {lines[0]}",
            remedy="see vLLM's own lines in the log; the model, its dtype and the memory decide",
        ) from error


class EngineProcess:
    """vLLM's engine core, alive until it is closed or ends by itself."""

    def __init__(self, llm: Any, on_end: Callable[[Unavailable], None] | None) -> None:
        """Watch the process of `llm`.

        Args:
            llm: vLLM's `AsyncLLM`.
            on_end: Called once, from the event loop, when the process ends unasked.
        """
        self._llm = llm
        self._on_end = on_end
        self._loop = asyncio.get_running_loop()
        self._ended: asyncio.Future[None] = self._loop.create_future()
        self._processes = list(llm.engine_core.resources.engine_manager.processes)
        # Copies: vLLM closes its own when it likes.
        self._sentinels = [os.dup(process.sentinel) for process in self._processes]
        for sentinel in self._sentinels:
            self._loop.add_reader(sentinel, self._note_end)

    @property
    def has_ended(self) -> bool:
        """Whether it ended unasked."""
        return self._ended.done()

    async def answer(self, call: Awaitable[T]) -> T:
        """The result of `call`, which would wait for ever where the process ends meanwhile.

        Raises:
            Unavailable: The process has ended.
        """
        task = asyncio.ensure_future(call)
        try:
            await asyncio.wait([task, self._ended], return_when=asyncio.FIRST_COMPLETED)
            if not task.done():
                raise self._end()
            return task.result()
        finally:
            task.cancel()

    def failure(self, cause: Exception) -> HarnessError:
        """What a request is told that failed with `cause`."""
        if self.has_ended or self._llm.engine_core.resources.engine_dead:
            return self._end()
        return EngineError(f"the engine failed: {cause}", remedy="see the service's log")

    async def close(self) -> None:
        """End the process and wait until it is gone."""
        self._unwatch()
        # Its task would take the process's end for a failure.
        handler = self._llm.output_handler
        if handler is not None:
            handler.cancel()
            await asyncio.wait([handler])
        context = self._llm.engine_core.resources.ctx
        await asyncio.to_thread(self._llm.shutdown)
        # Its sockets are closed by a callback on this loop, which leaves their context open.
        await asyncio.sleep(0)
        await asyncio.to_thread(context.destroy, 0)

    def _note_end(self) -> None:
        self._unwatch()
        if self._ended.done():
            return
        self._ended.set_result(None)
        error = self._end()
        logger.error("%s", error)
        if self._on_end is not None:
            self._on_end(error)

    def _unwatch(self) -> None:
        while self._sentinels:
            sentinel = self._sentinels.pop()
            self._loop.remove_reader(sentinel)
            os.close(sentinel)

    def _end(self) -> Unavailable:
        codes = {process.exitcode for process in self._processes} - {None}
        return Unavailable(
            "the engine process has ended, and what it held with it",
            value=", ".join(f"exit code {code}" for code in codes),
            remedy="open another episode once the service has been started again; its log says why",
        )
