"""Cancellations that an awaited call swallows, as redis-py does on Python 3.11."""

from __future__ import annotations

import asyncio

import pytest

from harness_sdk._cancellation import cancellable, end


async def swallowing(then: Exception | None = None) -> str:
    """Returns, or fails, in place of being cancelled."""
    try:
        await asyncio.Event().wait()
    except asyncio.CancelledError:
        if then is not None:
            raise then from None
    return "reply"


@pytest.mark.parametrize("then", [None, ConnectionError("lost")])
async def test_a_swallowed_cancellation_is_raised(then: Exception | None) -> None:
    task = asyncio.create_task(cancellable(swallowing(then)))
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_a_swallowed_timeout_still_is_one() -> None:
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.01):
            await cancellable(swallowing())


async def test_an_earlier_cancellation_and_an_inner_timeout_do_not_count() -> None:
    async def work() -> str:
        async with asyncio.timeout(10):
            return "reply"

    async def clean_up() -> str:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            return await cancellable(work())
        raise AssertionError("cancelled before")

    task = asyncio.create_task(clean_up())
    await asyncio.sleep(0)
    task.cancel()
    assert await task == "reply"


async def test_what_goes_on_is_cancelled_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("harness_sdk._cancellation._PATIENCE_S", 0.01)

    async def stubborn() -> None:
        for _ in range(3):
            await swallowing()
        await asyncio.Event().wait()

    task = asyncio.create_task(stubborn())
    await asyncio.sleep(0)
    async with asyncio.timeout(1):
        await end(task)
    assert task.cancelled()
