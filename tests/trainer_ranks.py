"""`octopus trainer` in several processes, one of which can be made to die within a step.

As a program, `python -m tests.trainer_ranks RANK STEP OWN OPTION...`: the trainer's command in one
process of torchrun's; process RANK kills itself in its STEP-th step, none with RANK -1. All but
the first have the options of the JSON array OWN too.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from harness_sdk.cli.settings import render_config
from harness_sdk.interpreter import leave
from trainer_service.config import TrainerConfig

REPOSITORY = Path(__file__).parents[1]


async def run_ranks(
    config: TrainerConfig,
    num_ranks: int,
    *,
    dies: tuple[int, int] = (-1, 0),
    followers_own: Sequence[str] = (),
) -> tuple[int, str]:
    """Train with torchrun to the end.

    Args:
        config: Of the service.
        num_ranks: Processes.
        dies: Rank and step, from 1, where it is killed.
        followers_own: Options of every process but the first.

    Returns:
        Exit code of torchrun, and all that was printed.
    """
    config.folder.mkdir(parents=True, exist_ok=True)
    options = config.folder / "given.toml"
    options.write_text(render_config(config), "utf-8")
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "torch.distributed.run", "--standalone",
        "--nproc-per-node", str(num_ranks), "-m", "tests.trainer_ranks",
        *map(str, dies), json.dumps(followers_own), "--config", str(options),
        cwd=REPOSITORY,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )  # fmt: skip
    try:
        async with asyncio.timeout(150):
            output, _ = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    assert process.returncode is not None
    return process.returncode, output.decode()


def _die_in_step(number: int) -> None:
    from trainer_service import step

    accumulate: Any = step.take_share
    calls = 0

    def counted(*args: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == number:
            os.kill(os.getpid(), signal.SIGKILL)
        return accumulate(*args)

    step.take_share = counted


def _main(rank: str, number: str, own: str, *options: str) -> int:
    from harness_sdk.cli.__main__ import main

    if os.environ["RANK"] != "0":
        options = (*options, *json.loads(own))

    if os.environ["RANK"] == rank:
        _die_in_step(int(number))
    return main(["trainer", *options])


if __name__ == "__main__":
    leave(_main(*sys.argv[1:]))
