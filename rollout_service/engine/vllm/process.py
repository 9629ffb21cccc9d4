"""The engine process from the service: started so that it can be given up, watched, ended."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import multiprocessing
import os
import signal
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

from harness_sdk.errors import ConfigError, EngineError, HarnessError, Unavailable
from rollout_service.engine.vllm.hang import HangWatch
from rollout_service.engine.vllm.lifeline import STACKS_SIGNAL
from rollout_service.engine.vllm.shared_memory import family, free, shared_files
from rollout_service.engine.vllm.wire import COMMAND

logger = logging.getLogger(__name__)

T = TypeVar("T")

_KILL_PAUSE_S = 0.1
_DYING_S = 10.0
"""That a core which told of its failure has to end by itself, and one that was killed."""
_EXIT_S, _EXIT_POLL_S = 1.0, 0.01
_STACKS_S = 1.0
"""That the processes of a core that hangs have to write where they are."""


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
            await EngineProcess(starting.result()).close()
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
    """vLLM's engine core, alive until it is closed, ends by itself, or is killed because it hangs.

    Args:
        llm: vLLM's `AsyncLLM`, whose process it is.
        hang_timeout_s: Seconds within which it has to answer, a step included; 0 waits for ever.
    """

    def __init__(self, llm: Any, *, hang_timeout_s: float = 0.0) -> None:
        self._llm = llm
        self._hang_timeout_s = hang_timeout_s
        self._is_hung = False
        self._loop = asyncio.get_running_loop()
        self._ended: asyncio.Future[None] = self._loop.create_future()
        # The same, or that it was closed.
        self._is_over: asyncio.Future[None] = self._loop.create_future()
        self._dying: asyncio.TimerHandle | None = None
        self._closing: asyncio.Task[None] | None = None
        self._processes = list(llm.engine_core.resources.engine_manager.processes)
        families = [family(process.pid) for process in self._processes]
        self._shared = shared_files(pid for pids in families for pid in pids)
        # Copies: vLLM closes its own when it likes.
        self._sentinels = [os.dup(process.sentinel) for process in self._processes]
        for sentinel in self._sentinels:
            self._loop.add_reader(sentinel, self._note_end)
        self._hang_watch = (
            HangWatch(self._ask, self._kill_hung, hang_timeout_s) if hang_timeout_s else None
        )

    @property
    def has_ended(self) -> bool:
        """Whether it ended, told that it does, or is being closed."""
        return self._closing is not None or self._ended.done() or self._is_dying()

    async def ended(self) -> Unavailable:
        """Wait until it has ended unasked; returns what its callers are told."""
        await asyncio.shield(self._ended)
        # Its exit code may come a moment after its end.
        give_up_s = self._loop.time() + _EXIT_S
        while any(each.exitcode is None for each in self._processes):
            if self._loop.time() > give_up_s:
                break
            await asyncio.sleep(_EXIT_POLL_S)
        return self._end()

    async def answer(self, call: Awaitable[T]) -> T:
        """The result of `call`, which would wait for ever where the process ends or is closed.

        Raises:
            Unavailable: The process has ended, whatever vLLM's client says then.
        """
        task = asyncio.ensure_future(call)
        try:
            await asyncio.wait([task, self._is_over], return_when=asyncio.FIRST_COMPLETED)
            if not task.done():
                raise self._end()
            cause = task.exception()
            if cause is not None and self.has_ended:
                raise self._end() from cause
            return task.result()
        finally:
            task.cancel()

    def failure(self, cause: Exception) -> HarnessError:
        """What a request is told that failed with `cause`."""
        if self.has_ended:
            return self._end()
        return EngineError(f"the engine failed: {cause}", remedy="see the service's log")

    async def close(self) -> None:
        """End the process, wait until it is gone, and free what vLLM holds of it here.

        Goes on where its caller is cancelled; whoever calls again waits for that.
        """
        if self._closing is None:
            self._closing = asyncio.create_task(self._close())
            await asyncio.shield(self._closing)
        else:
            await asyncio.wait([self._closing])

    async def _close(self) -> None:
        self._unwatch()
        handler = self._llm.output_handler
        if handler is not None:
            if self._ended.done():
                # It has requests to tell first.
                await asyncio.wait([handler], timeout=_DYING_S)
            # Its task would take the process's end for a failure.
            handler.cancel()
            await asyncio.wait([handler])
            # Nobody else would tell requests that still run.
            self._llm.output_processor.propagate_error(self._llm.dead_error)
        context = self._llm.engine_core.resources.ctx
        try:
            await asyncio.to_thread(self._llm.shutdown)
        finally:
            if not self._is_over.done():
                self._is_over.set_result(None)
        # Its sockets are closed by a callback on this loop, which leaves their context open.
        await asyncio.sleep(0)
        await asyncio.to_thread(context.destroy, 0)
        free(self._shared)

    def _is_dying(self) -> bool:
        """Whether the core told of its failure; one that does not end then is killed."""
        is_dying = bool(self._llm.engine_core.resources.engine_dead)
        if is_dying and self._dying is None and self._closing is None:
            self._dying = self._loop.call_later(_DYING_S, self._kill)
        return is_dying

    def _kill(self) -> None:
        for process in self._processes:
            process.kill()

    async def _ask(self) -> None:
        await self._llm.engine_core.call_utility_async(COMMAND, "usage", [], 0)

    async def _kill_hung(self) -> None:
        self._is_hung = True
        logger.error(
            "the engine process has not answered for %g s and is killed; where it hangs:",
            self._hang_timeout_s,
        )
        self._signal(STACKS_SIGNAL)
        await asyncio.sleep(_STACKS_S)
        # Its ranks as well: one that is stopped does not notice that the core has gone.
        self._signal(signal.SIGKILL)
        # Cancelled with its end; a driver may keep it from ending.
        await asyncio.sleep(_DYING_S)
        self._note_end()

    def _signal(self, number: signal.Signals) -> None:
        for pid in [pid for process in self._processes for pid in family(process.pid)]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)

    def _note_end(self) -> None:
        self._unwatch()
        for told in (self._ended, self._is_over):
            if not told.done():
                told.set_result(None)

    def _unwatch(self) -> None:
        while self._sentinels:
            sentinel = self._sentinels.pop()
            self._loop.remove_reader(sentinel)
            os.close(sentinel)
        if self._dying is not None:
            self._dying.cancel()
        if self._hang_watch is not None:
            self._hang_watch.cancel()

    def _end(self) -> Unavailable:
        codes = {process.exitcode for process in self._processes} - {None}
        cause = ", ".join(map(_exit, sorted(codes)))
        remedy = "repeat the call; the service's log says why"
        if self._is_hung:
            cause = f"killed because it had not answered for {self._hang_timeout_s:g} s"
            remedy += "; raise engine.vllm.hang_timeout_s where a step takes longer"
        return Unavailable(
            "the engine process has ended, and what it held with it", value=cause, remedy=remedy
        )


def _exit(code: int) -> str:
    if code == -signal.SIGKILL:
        return "killed from outside, as the kernel does where memory is short"
    return f"exit code {code}"
