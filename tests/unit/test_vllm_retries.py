"""A call that finds too little comes again alone, and is refused only when nothing else ran."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest

from harness_sdk.errors import ResourceExhausted
from rollout_service.engine.vllm.gate import RebuildGate
from rollout_service.engine.vllm.retries import Retries
from rollout_service.engine.vllm.room import ResidencyMissing


class Call:
    """A call that fails `num_failures` times, each attempt ended by the test."""

    def __init__(self, gate: RebuildGate, num_failures: int) -> None:
        self.num_attempts = 0
        self.forgotten: list[int] = []
        self._ends = asyncio.Semaphore(0)
        self._gate = gate
        self._num_failures = num_failures
        self.task = asyncio.create_task(self._run())

    async def _run(self) -> None:
        async with self._gate.entered(), Retries(self._gate, self.forgotten.extend) as retries:
            while True:
                self.num_attempts += 1
                await self._ends.acquire()
                if self.num_attempts > self._num_failures:
                    return
                await retries.after(ResidencyMissing([self.num_attempts]))

    async def end(self, num_attempts: int = 1) -> None:
        """Let attempts end."""
        for _ in range(num_attempts):
            self._ends.release()
        await settle()


async def settle() -> None:
    for _ in range(20):
        await asyncio.sleep(0)


@pytest.fixture
def gate() -> Iterator[RebuildGate]:
    gate = RebuildGate()
    yield gate
    assert gate._num_active == 0 and not gate.is_closed


async def test_failures_beside_other_calls_never_count(gate: RebuildGate) -> None:
    others = [Call(gate, 0) for _ in range(6)]
    call = Call(gate, 99)
    # Once after entering, once alone, then at the end of each of the others.
    await call.end(99)
    for index, other in enumerate(others):
        assert call.num_attempts == index + 2 and not call.task.done()
        await other.end()
    # The last of these had nothing beside it: it and two more tell.
    with pytest.raises(ResourceExhausted, match="does not fit"):
        await call.task
    assert call.num_attempts == len(others) + 2 + 2
    assert call.forgotten == list(range(1, call.num_attempts + 1))


async def test_an_attempt_that_began_beside_another_call_does_not_count(gate: RebuildGate) -> None:
    other, call = Call(gate, 0), Call(gate, 4)
    await call.end()
    assert call.num_attempts == 2
    await other.end()
    # The second attempt fails as if the other had still been in its way; two more may.
    await call.end(9)
    await call.task
    assert call.num_attempts == 5


async def test_nobody_begins_beside_a_call_that_is_alone(gate: RebuildGate) -> None:
    call = Call(gate, 1)
    await call.end()
    newcomer = Call(gate, 0)
    opened = asyncio.create_task(gate.opened())
    await settle()
    assert gate.is_closed and newcomer.num_attempts == 0 and not opened.done()
    await call.end()
    await newcomer.end()
    await asyncio.gather(call.task, newcomer.task, opened)


async def test_who_has_begun_lets_others_in(gate: RebuildGate) -> None:
    async with gate.entered(), Retries(gate, lambda _: None) as retries:
        await retries.after(ResidencyMissing([]))
        assert gate.is_closed
        await retries.begun()
        assert not gate.is_closed
