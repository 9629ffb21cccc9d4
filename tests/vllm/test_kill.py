"""A killed engine process: whoever waits is told soon, and nothing remains."""

from __future__ import annotations

import asyncio
import os
import signal

import pytest

from harness_sdk.errors import Unavailable
from harness_sdk.types import Message, SamplingOptions
from rollout_service.engine.vllm import VllmEngine
from tests.e2e.rollout_process import descendants
from tests.session_cases import Bench
from tests.vllm.conftest import Fleet, new_play

pytestmark = [
    pytest.mark.asyncio(loop_scope="session"),
    pytest.mark.slow,
    # The last family of all, whose process is given up anyway.
    pytest.mark.parametrize("family", ["qwen3_next"]),
]

SOON_S = 15.0
"""Of a busy machine; vLLM looks at its process at once."""


def engine_processes(engine: VllmEngine) -> list[int]:
    """The engine's process and all below it."""
    assert engine._process is not None
    first = [process.pid for process in engine._process._processes]
    return first + [below for pid in first for below in descendants(pid)]


def is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


async def test_calls_end_with_a_retryable_error_and_no_process_remains(
    fleet: Fleet, family: str
) -> None:
    served = await fleet.serve(family)
    engine, play = served.engine, new_play(served, seed=1)
    bench = Bench(engine=engine)
    await bench.open()
    await bench.say()
    root = await play.extend(None, 40)
    victims = engine_processes(engine)
    assert victims
    decode = asyncio.create_task(play.turn(root, 1500))
    turn = asyncio.create_task(
        bench.sessions.turn(bench.call(), (), sampling=SamplingOptions(max_tokens=900))
    )
    while engine.stats().running < 2:
        await asyncio.sleep(0.01)
    # Stopped first: what is asked now is never answered.
    os.kill(victims[0], signal.SIGSTOP)
    asked = [
        decode,
        turn,
        asyncio.create_task(play.extend(root, 30)),
        asyncio.create_task(engine.score(play.tokens(9), policy_version=0)),
        asyncio.create_task(engine.forget_all()),
    ]
    given_back = asyncio.create_task(engine.evict([root]))
    await asyncio.sleep(0.2)
    assert not any(task.done() for task in (*asked, given_back))
    os.kill(victims[0], signal.SIGKILL)
    async with asyncio.timeout(SOON_S):
        *errors, forgotten = await asyncio.gather(*asked, return_exceptions=True)
        await given_back
    assert [type(error) for error in errors] == [Unavailable] * 4
    assert all(error.retryable for error in errors if isinstance(error, Unavailable))
    assert forgotten is None

    # Later calls are told at once, what is given back is given back, and the episode is data.
    async with asyncio.timeout(SOON_S):
        with pytest.raises(Unavailable, match="the engine process has ended"):
            await play.extend(root, 3)
        with pytest.raises(Unavailable, match="the engine process has ended"):
            await bench.sessions.turn(bench.call(), [Message(role="tool", content="o")])
        await engine.release([root])
        record = await bench.close(error_kind="Unavailable", error_message="engine gone")
        assert record.error_kind == "Unavailable" and len(record.nodes) == 2
        await fleet.close()
    for _ in range(100):
        if not any(map(is_alive, victims)):
            break
        await asyncio.sleep(0.05)
    assert not any(map(is_alive, victims))
