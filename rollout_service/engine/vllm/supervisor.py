"""Keeps an engine running: where its process ends, another is started, within bounds.

Knows nothing of vLLM, nor of what the engine held.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from harness_sdk.errors import EngineError, HarnessError, Unavailable

logger = logging.getLogger(__name__)


_MAX_ENDS = 3
"""Engines that may end while they serve one call: past it the call is taken for the cause."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RestartPolicy:
    """How often an engine is started again, and with what pauses."""

    max_restarts: int = 5
    """Within `window_s`, and of starts that fail in a row; 0 starts none again."""
    window_s: float = 3600.0
    first_pause_s: float = 0.5
    """Before the first restart of a window; twice as long before each other one."""
    max_pause_s: float = 30.0


class Supervised(Protocol):
    """An engine over one process, or over several that end together."""

    @property
    def has_ended(self) -> bool:
        """Whether it ended unasked."""
        ...

    async def ended(self) -> Unavailable:
        """Wait for that; returns what its callers are told."""
        ...

    def last_lines(self) -> list[str]:
        """What it wrote last, once it has ended; may block for a moment."""
        ...

    async def close(self) -> None:
        """End it, and free what it left."""
        ...


C = TypeVar("C", bound=Supervised)
T = TypeVar("T")


class Supervisor(Generic[C]):
    """The engine that runs now, and the one after it.

    Args:
        start: Starts an engine, given the one before it that has ended; None is the first.
        policy: How often, and with what pauses.
        on_given_up: Told once that no other is started; every call raises that from then on.

    Attributes:
        num_restarts: Engines started after the first.
    """

    def __init__(
        self,
        start: Callable[[C | None], Awaitable[C]],
        policy: RestartPolicy,
        *,
        on_given_up: Callable[[Unavailable], None] | None = None,
    ) -> None:
        self._start = start
        self._policy = policy
        self._on_given_up = on_given_up
        self._newest: C | None = None
        self._failure: Unavailable | None = None
        self._changed = asyncio.Event()
        self._watching: asyncio.Task[None] | None = None
        self._ends_s: deque[float] = deque()
        self.num_restarts = 0

    async def start(self) -> None:
        """Start the first engine, and watch it.

        Raises:
            ConfigError: It did not start.
        """
        self._newest = await self._start(None)
        self._watching = asyncio.create_task(self._watch(self._newest))

    async def close(self) -> None:
        """End the engine; whoever waits for one is told."""
        self._failure = self._failure or _not_running()
        self._tell()
        if self._watching is not None:
            # Once: a start that is given up has its process to kill first.
            self._watching.cancel()
            await asyncio.wait([self._watching])
        newest, self._newest = self._newest, None
        if newest is not None:
            await newest.close()

    @property
    def newest(self) -> C:
        """The engine started last, whether it runs or has ended.

        Raises:
            Unavailable: There is none.
        """
        if self._newest is None:
            raise _not_running()
        return self._newest

    @property
    def is_serving(self) -> bool:
        """Whether it runs, and would be started again."""
        is_running = self._newest is not None and not self._newest.has_ended
        return is_running and self._failure is None

    async def running(self) -> C:
        """The engine that runs; waits while one is being started.

        Raises:
            Unavailable: None is started any more.
        """
        while not self.is_serving:
            if self._failure is not None:
                raise self._failure.copy()
            await self._changed.wait()
        return self.newest

    async def served(self, run: Callable[[C], Awaitable[T]]) -> T:
        """What `run` returns, of the next engine where one ends meanwhile.

        Raises:
            Unavailable: None is started any more.
            EngineError: Too many have ended meanwhile.
        """
        for num_ends in itertools.count(1):
            engine = await self.running()
            try:
                return await run(engine)
            except Unavailable as cause:
                if not engine.has_ended:
                    raise
                check_blameless(num_ends, cause)
        raise AssertionError

    async def _watch(self, engine: C) -> None:
        try:
            await self._keep_running(engine)
        except Unavailable as failure:
            self._give_up(failure)
        except Exception as error:
            # Nobody would start it again, nor tell whoever waits for that.
            logger.exception("watching the engine failed")
            self._give_up(
                Unavailable(
                    "the engine is not watched any more",
                    value=repr(error),
                    remedy="this is a fault of ours: report it with the service's log, and start"
                    " the service again",
                )
            )

    async def _keep_running(self, engine: C) -> None:
        """Start another each time that one has ended.

        Raises:
            Unavailable: Too many have ended, or did not start.
        """
        while True:
            error = await engine.ended()
            await self._log_end(engine, error)
            engine = await self._another(engine, error)
            self.num_restarts += 1
            self._newest = engine
            logger.warning("the engine runs again, restart %d", self.num_restarts)
            self._tell()

    async def _another(self, before: C, error: HarnessError) -> C:
        """The next engine that starts.

        Raises:
            Unavailable: Too many have ended, or did not start.
        """
        policy = self._policy
        # Only now: starts that fail slowly would count for ever as too few.
        self._forget_old_ends()
        while True:
            self._count_end(error)
            pause_s = policy.first_pause_s * 2 ** (len(self._ends_s) - 1)
            pause_s = min(pause_s, policy.max_pause_s)
            logger.warning("the engine is started again in %.1f s", pause_s)
            await asyncio.sleep(pause_s)
            try:
                return await self._start(before)
            except HarnessError as failed:
                error = failed
            except Exception as failed:
                logger.exception("the engine did not start")
                error = Unavailable(f"the engine did not start: {failed!r}")
            logger.error("%s", error)

    def _count_end(self, error: HarnessError) -> None:
        """One more has ended, or did not start.

        Raises:
            Unavailable: There were too many.
        """
        self._ends_s.append(time.monotonic())
        if len(self._ends_s) > self._policy.max_restarts:
            raise Unavailable(
                f"the engine is not started again: {error.message}",
                value="; ".join(
                    each
                    for each in (error.value, f"ended or failed to start {len(self._ends_s)} times")
                    if each
                ),
                limit=f"{self._policy.max_restarts} restarts in {self._policy.window_s:g} s",
                remedy="see the engine's last lines in the service's log; open another episode once"
                " the service has been started again",
            )

    def _forget_old_ends(self) -> None:
        oldest_s = time.monotonic() - self._policy.window_s
        while self._ends_s and self._ends_s[0] < oldest_s:
            self._ends_s.popleft()

    def _give_up(self, failure: Unavailable) -> None:
        self._failure = failure
        logger.error("%s", failure)
        self._tell()
        if self._on_given_up is not None:
            self._on_given_up(failure)

    def _tell(self) -> None:
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    async def _log_end(self, engine: C, error: Unavailable) -> None:
        lines = await asyncio.to_thread(engine.last_lines)
        said = "\n".join(lines) if lines else "it wrote nothing"
        logger.error("%s; its last lines:\n%s", error.message, said)


def check_blameless(num_ends: int, cause: Unavailable) -> None:
    """Let a call be served by one engine more, unless too many have ended under it.

    Raises:
        EngineError: They have: it may be what ends them.
    """
    if num_ends >= _MAX_ENDS:
        raise EngineError(
            "the engine process ended each time that it served the call",
            value=f"{num_ends} times",
            limit=f"{_MAX_ENDS} times",
            remedy="do not repeat the call before the service's log has said why",
        ) from cause


def _not_running() -> Unavailable:
    return Unavailable("the engine is not running")
