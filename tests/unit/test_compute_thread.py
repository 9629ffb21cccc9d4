"""Calls that share a thread, whatever other threads there are."""

from __future__ import annotations

import asyncio
import contextvars
import threading
import time

import pytest

from trainer_service.compute_thread import ComputeThread


async def test_calls_share_a_thread_beside_the_pool() -> None:
    barrier = threading.Barrier(4)
    async with ComputeThread() as compute:
        found = set()
        for _ in range(4):
            # Threads of the pool are idle now, and the next call could be on any of them.
            await asyncio.gather(*(asyncio.to_thread(barrier.wait, 10) for _ in range(4)))
            found.add(await compute.run(threading.get_ident))
    assert len(found) == 1


async def test_call_sees_its_callers_context_and_raises_to_it() -> None:
    step = contextvars.ContextVar("step", default=0)
    step.set(3)
    async with ComputeThread() as compute:
        assert await compute.run(step.get) == 3
        with pytest.raises(ZeroDivisionError):
            await compute.run(divmod, 1, 0)


async def test_leaving_waits_for_the_call_that_runs() -> None:
    ended: list[str] = []

    def work() -> None:
        time.sleep(0.1)
        ended.append("call")

    async with ComputeThread() as compute:
        call = asyncio.create_task(compute.run(work))
        await asyncio.sleep(0)
    assert ended == ["call"]
    await call
