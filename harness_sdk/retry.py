"""Repeating a call while its service is unavailable, within one deadline."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Awaitable, Callable, Iterator
from typing import TypeVar

from harness_sdk.errors import DeadlineExceeded, HarnessError
from harness_sdk.options import RetryPolicy

T = TypeVar("T")


async def call_with_retry(
    attempt: Callable[[float | None], Awaitable[T]],
    policy: RetryPolicy,
    timeout_s: float | None,
) -> T:
    """The result of the first attempt that succeeds.

    Args:
        attempt: Called with the seconds that are left to it; None where there is no deadline.
        policy: How often, and with what pauses.
        timeout_s: Seconds for all attempts and pauses together.

    Raises:
        HarnessError: Of the last attempt, or the first one that is not retryable.
        DeadlineExceeded: No time was left for another attempt.
    """
    deadline = None if timeout_s is None else time.monotonic() + timeout_s
    pauses = backoff_s(policy)
    while True:
        try:
            return await attempt(_left(deadline))
        except HarnessError as error:
            pause = next(pauses, None)
            if not error.retryable or pause is None:
                raise
            left = _left(deadline)
            if left is not None and left <= pause:
                raise DeadlineExceeded(
                    f"no time left to repeat the call: {error.message}",
                    limit=f"{timeout_s} s",
                    remedy="raise the call's timeout or start the service",
                ) from error
            await asyncio.sleep(pause)


def backoff_s(policy: RetryPolicy) -> Iterator[float]:
    """The pauses between attempts in seconds, jittered: one fewer than there are attempts."""
    whole = policy.initial_backoff_s
    for _ in range(policy.max_attempts - 1):
        yield random.uniform(whole / 2, whole)
        whole = min(whole * policy.multiplier, policy.max_backoff_s)


def _left(deadline: float | None) -> float | None:
    return None if deadline is None else max(deadline - time.monotonic(), 0.0)
