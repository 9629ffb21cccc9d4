"""Replies kept for repeated idempotency keys: bounded, and gone with their episode."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

from harness_sdk.errors import InvalidRequest

T = TypeVar("T")


class Replies:
    """The replies of an episode's mutating calls.

    Args:
        max_replies: Replies kept; the oldest go first.
    """

    def __init__(self, max_replies: int) -> None:
        self._max_replies = max_replies
        self._kept: OrderedDict[str, tuple[str, Any]] = OrderedDict()
        self._running: dict[str, asyncio.Event] = {}

    async def once(
        self, key: str, action: str, call: Callable[[Callable[[T], None]], Awaitable[T]]
    ) -> T:
        """The reply kept under `key`, or that of `call`, which hands its reply to `keep` itself.

        `call` keeps its reply as it takes effect, so that a caller lost afterwards finds it. A
        call that fails keeps nothing and may be repeated. A repeat waits for the first call.

        Raises:
            InvalidRequest: `key` was used for another action.
        """
        if not key:
            return await call(lambda reply: None)
        while (running := self._running.get(key)) is not None:
            await running.wait()
        if key in self._kept:
            return self._repeated(key, action)
        self._running[key] = asyncio.Event()
        try:
            return await call(lambda reply: self._keep(key, action, reply))
        finally:
            self._running.pop(key).set()

    def _repeated(self, key: str, action: str) -> Any:
        kept_action, reply = self._kept[key]
        if kept_action != action:
            raise InvalidRequest(
                f"idempotency key was used for {kept_action}",
                value=action,
                limit=kept_action,
                remedy="draw a new key for each call",
            )
        return reply

    def _keep(self, key: str, action: str, reply: Any) -> None:
        self._kept[key] = (action, reply)
        while len(self._kept) > self._max_replies:
            self._kept.popitem(last=False)
