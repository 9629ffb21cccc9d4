"""Work that ends as soon as the services do."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

from harness_sdk.cli.stack import LocalStack
from harness_sdk.errors import ServiceError

_REASON_S = 5.0


async def while_serving(stack: LocalStack, *work: Coroutine[Any, Any, Any]) -> Any:
    """The result of the first of `work` to end; no other goes on.

    Raises:
        ServiceError: The rollout service ended, which explains whatever else failed.
    """
    serving = asyncio.create_task(_serving(stack))
    doing = [asyncio.create_task(each) for each in work]
    try:
        done, _ = await asyncio.wait([serving, *doing], return_when=asyncio.FIRST_COMPLETED)
        if any(each.exception() for each in done):
            # Calls fail a moment before their service is seen to have ended.
            await asyncio.wait([serving], timeout=_REASON_S)
        return next(each.result() for each in (serving, *doing) if each.done())
    finally:
        for each in (serving, *doing):
            each.cancel()
        await asyncio.gather(serving, *doing, return_exceptions=True)


async def _serving(stack: LocalStack) -> None:
    await stack.until_ended("rollout")
    raise ServiceError(
        "the rollout service ended before its time", remedy=f"see {stack.log_path('rollout')}"
    )
