"""The trainer in a process of its own, which can be made to die at a chosen point."""

from __future__ import annotations

import asyncio
import json
import multiprocessing
import os
import signal
import sys
import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

from trainer_service.config import TrainerConfig

CRASH_POINTS = ("in the step", "before the checkpoint is whole", "before the ack")

PUBLISH_POINTS = ("after the ack", "adapter stored, not announced", "announced, not acknowledged")
"""Those of a trainer that publishes."""

FORKSERVER = multiprocessing.get_context("forkserver")
# torch and transformers are imported once, in the server that the processes are forked from.
FORKSERVER.set_forkserver_preload(["trainer_service.loop", "rollout_service.service"])


WATCHED = (
    "loop", "grants", "feed", "stream", "groups", "step", "optim", "checkpoint", "run_state",
    "publish", "bus", "run_keys", "metrics",
)  # fmt: skip
"""Files of the trainer whose lines are counted for `crash_line`."""

COUNT_FILE = "lines.json"
"""In the run folder, how many lines ran of each function where none crashed."""


async def run_trainer(
    config: TrainerConfig,
    *,
    crash_at: str = "",
    crash_step: int = 0,
    crash_line: tuple[str, int] | None = None,
) -> int:
    """Train in a new process to its end.

    Args:
        config: Of the service.
        crash_at: One of `CRASH_POINTS` or `PUBLISH_POINTS` where the process kills itself; empty
            lets it live.
        crash_step: The how manieth step of this process crashes, from 1.
        crash_line: A function of the `WATCHED` files and the how manieth of its executed lines is
            the process's last, from 1; 0 only counts them.

    Returns:
        Exit code; minus the signal's number where it was killed.
    """
    process = FORKSERVER.Process(
        target=_main, args=(config.model_dump_json(), crash_at, crash_step, crash_line), daemon=True
    )
    process.start()
    try:
        await asyncio.to_thread(process.join, 120)
        assert process.exitcode is not None, "the trainer did not end"
        return process.exitcode
    finally:
        process.kill()
        process.join()
        process.close()


def _main(
    config_json: str, crash_at: str, crash_step: int, crash_line: tuple[str, int] | None
) -> None:
    import torch

    from trainer_service import loop

    torch.set_num_threads(1)
    if crash_at:
        _arm(crash_at, crash_step)
    config = TrainerConfig.model_validate_json(config_json)
    lines = _watch(*crash_line) if crash_line else None
    asyncio.run(loop.train(config, asyncio.Event()))
    if lines is not None:
        (config.folder / COUNT_FILE).write_text(json.dumps(lines))


def _watch(function: str, number: int) -> Counter[str]:
    """Count the lines of the `WATCHED` files from here on, and die at the one that is wanted."""
    import trainer_service.loop

    folder = Path(trainer_service.loop.__file__).parent
    watched = {str(folder / f"{name}.py") for name in WATCHED}
    lines: Counter[str] = Counter()

    def in_frame(frame: FrameType, event: str, _: Any) -> Any:
        if event == "line":
            name = frame.f_code.co_qualname
            lines[name] += 1
            if name == function and lines[name] == number:
                os.kill(os.getpid(), signal.SIGKILL)
        return in_frame

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        return in_frame if frame.f_code.co_filename in watched else None

    threading.settrace(trace)
    sys.settrace(trace)
    return lines


def _arm(crash_at: str, crash_step: int) -> None:
    from trainer_service import checkpoint, loop
    from trainer_service.bus import ControlBus
    from trainer_service.feed import StreamFeed
    from trainer_service.publish import Publisher

    if crash_at == "in the step":
        _die_around(loop, "train_step", crash_step, after=True)
    elif crash_at == "before the checkpoint is whole":
        _die_around(checkpoint, "sync_tree", crash_step, after=False)
    elif crash_at == "before the ack":
        _die_around(StreamFeed, "settle", crash_step, after=False)
    elif crash_at == "after the ack":
        _die_around(Publisher, "publish", crash_step, after=False)
    elif crash_at == "adapter stored, not announced":
        _die_around(ControlBus, "announce", crash_step, after=False)
    elif crash_at == "announced, not acknowledged":
        _die_around(ControlBus, "wait_until", crash_step, after=False)
    else:
        raise ValueError(crash_at)


def _die_around(owner: Any, name: str, count: int, *, after: bool) -> None:
    """Kill this process at the `count`-th call of `owner.name`."""
    original: Callable[..., Any] = getattr(owner, name)
    calls = 0

    def counted(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == count and not after:
            os.kill(os.getpid(), signal.SIGKILL)
        result = original(*args, **kwargs)
        if calls == count:
            os.kill(os.getpid(), signal.SIGKILL)
        return result

    setattr(owner, name, counted)
