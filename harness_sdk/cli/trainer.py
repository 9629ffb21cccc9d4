"""`octopus trainer`: the trainer service of a run."""

from __future__ import annotations

import argparse
import asyncio
import importlib
import logging
import os
import signal
import sys
from typing import TYPE_CHECKING

from harness_sdk.cli.settings import add_config_arguments, load_config, render_config
from harness_sdk.interpreter import uncollected
from harness_sdk.log_ids import set_ids

if TYPE_CHECKING:
    from trainer_service.config import TrainerConfig

logger = logging.getLogger(__name__)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of the command."""
    from trainer_service.config import TrainerConfig

    add_config_arguments(parser, TrainerConfig)
    parser.add_argument(
        "--records",
        metavar="FILE",
        help="train on a file of records, the same as --batch.records FILE",
    )


def run(args: argparse.Namespace) -> int:
    """Train until --max-steps, the end of the records, SIGINT or SIGTERM; under torchrun, with the
    other processes that it started."""
    from trainer_service.config import TrainerConfig

    overrides = list(args.overrides)
    if args.records is not None:
        overrides += ["--batch.records", args.records]
    config = load_config(TrainerConfig, args.config, overrides)
    if args.dry_run:
        sys.stdout.write(render_config(config, args.dry_run))
        return 0
    from trainer_service.launch import place

    rank, _ = place()
    config.require_inputs()
    if rank:
        _follow(config)
        return 0
    resolved = render_config(config, "json")
    logger.info("configuration: %s", " ".join(resolved.split()))
    config.folder.mkdir(parents=True, exist_ok=True)
    (config.folder / "config.json").write_text(resolved, "utf-8")
    asyncio.run(_train(config))
    return 0


def _follow(config: TrainerConfig) -> None:
    """A process beside the first that torchrun started; that one says when to stop."""
    for each in (signal.SIGINT, signal.SIGTERM):
        signal.signal(each, signal.SIG_IGN)
    with uncollected():
        from trainer_service.follower import follow
        from trainer_service.ranks import Ranks

    ranks = Ranks.join(config.model.device)
    follow(config.on_device(ranks.device), ranks)
    ranks.leave()


async def _train(config: TrainerConfig) -> None:
    """The first signal ends after the step in progress, the second one at once."""
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    set_ids(run=config.run)

    def ask_to_stop(number: signal.Signals) -> None:
        if stop.is_set():
            # A step on its thread cannot be interrupted; whatever is durable is whole.
            os._exit(128 + number)
        logger.info("%s: ending after this step; once more ends at once", number.name)
        stop.set()

    for each in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(each, ask_to_stop, each)
    logger.info("run %s, objective %s, in %s", config.run, config.objective, config.folder)
    # torch and transformers are imported from here on, off the event loop.
    with uncollected():
        loop_module = await asyncio.to_thread(importlib.import_module, "trainer_service.loop")
    from trainer_service.ranks import Ranks

    ranks = await asyncio.to_thread(Ranks.join, config.model.device)
    await loop_module.train(config.on_device(ranks.device), stop, ranks)
    ranks.leave()
