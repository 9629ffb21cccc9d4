"""An engine process that runs on and computes nothing is killed, and turns end as if it never was;
one that is merely slow is left alone."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from tests.vllm.audit import check_nothing_left
from tests.vllm.audited_scheduler import HANG
from tests.vllm.conftest import new_play, serve
from tests.vllm.test_restart import by_thread, core_pid, play_tree, told, until_sampled

pytestmark = [
    pytest.mark.asyncio(loop_scope="session"),
    pytest.mark.slow,
    # Two starts and a hang, each of which a busy machine draws out.
    pytest.mark.timeout(600),
]

FAMILY = "granitemoehybrid"
HANG_S = 20.0
"""More than the first step takes on a busy machine, which compiles."""
SOON_S = 120.0
"""Of a busy machine: until the hang is noticed, and the next process runs."""


async def test_turns_of_a_stopped_process_end_as_if_it_had_gone_on(servable_folder: Path) -> None:
    serving = asynccontextmanager(serve)(servable_folder, FAMILY, hang_timeout_s=HANG_S)
    async with serving as served:
        calm = await play_tree(served, break_by=None)
        victim = core_pid(served.engine)
        record = await play_tree(served, break_by=signal.SIGSTOP, within_s=SOON_S)
        assert served.engine.stats().restarts == 1
        assert not Path(f"/proc/{victim}").exists()
        assert [told(record, node) for node in by_thread(record)] == [
            told(calm, node) for node in by_thread(calm)
        ]
        await check_nothing_left(served.engine)


async def test_a_slow_process_is_left_alone_and_one_that_hangs_says_where(
    servable_folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    serving = asynccontextmanager(serve)(servable_folder, FAMILY, hang_timeout_s=HANG_S)
    async with serving as served:
        engine, play = served.engine, new_play(served, seed=1)
        pid = core_pid(engine)
        root = await play.extend(None, 40)
        turn = asyncio.create_task(play.turn(root, 60))
        # Each time for most of what it has, and longer than the watch pauses.
        for _ in range(2):
            await until_sampled(engine, 4)
            os.kill(pid, signal.SIGSTOP)
            await asyncio.sleep(0.6 * HANG_S)
            os.kill(pid, signal.SIGCONT)
        async with asyncio.timeout(SOON_S):
            slow = await turn
        assert len(slow.sampled_logprobs) == 60
        assert (engine.stats().restarts, core_pid(engine)) == (0, pid)

        # In a command of a core that is idle: nobody waits for it but the watch.
        client = engine._supervisor.newest.builder.client
        hanging = asyncio.create_task(client._llm.engine_core.call_utility_async(HANG))
        async with asyncio.timeout(SOON_S):
            while not engine.stats().restarts:
                await asyncio.sleep(0.05)
            again = await play.turn(root, 60)
        hanging.cancel()
        play.check(again)
        assert "in _hang" in caplog.text and core_pid(engine) != pid
        await engine.release([root, slow, again])
        await check_nothing_left(engine)
