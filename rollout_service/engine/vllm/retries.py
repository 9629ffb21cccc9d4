"""What follows where a call finds too little: it comes again, and is refused when nothing helps."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AsyncExitStack

from rollout_service.engine.vllm.gate import RebuildGate
from rollout_service.engine.vllm.room import NotReady

_MAX_ONLY = 3
"""Attempts with nothing else running: what one lacks then is room, not luck."""


class Retries:
    """Attempts of one active call; the second and later ones with nobody else beginning.

    Refused is only who had the engine to himself from an attempt's beginning to its end: what
    other calls took or kept meanwhile says nothing of what a call needs.
    """

    def __init__(self, gate: RebuildGate, forget: Callable[[Iterable[int]], None]) -> None:
        """For a call that has entered `gate`; `forget` hears of residencies that are gone."""
        self._gate = gate
        self._forget = forget
        self._alone = AsyncExitStack()
        self._is_alone = False
        self._is_only = False
        """Whether nothing else was active when the attempt under way began."""
        self._num_only = 0

    async def __aenter__(self) -> Retries:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.begun()

    async def begun(self) -> None:
        """It runs, so others may begin."""
        await self._alone.aclose()

    async def after(self, cause: NotReady) -> None:
        """An attempt has failed: returns when the next may be made.

        Raises:
            ResourceExhausted: It would fail again.
        """
        self._forget(cause.residencies)
        if not self._is_alone:
            self._is_alone = True
            await self._alone.enter_async_context(self._gate.alone())
        elif not self._is_only:
            await self._gate.another_end()
        else:
            self._num_only += 1
            if self._num_only == _MAX_ONLY:
                raise cause.as_error() from cause
        self._is_only = self._gate.has_one
