"""`octopus verifiers`: a `verifiers` environment's tasks as groups of episodes."""

from __future__ import annotations

import argparse
import contextlib
import sys
from typing import TYPE_CHECKING, Any

from harness_sdk.cli.interrupts import run_interruptible
from harness_sdk.cli.settings import (
    add_config_arguments,
    json_object,
    load_config,
    render_config,
)
from harness_sdk.permits import NoPermits, redis_permits
from harness_sdk.summary import summarise

if TYPE_CHECKING:
    from harness_sdk.cli.run_config import VerifiersConfig


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of the command."""
    from harness_sdk.cli.run_config import VerifiersConfig

    parser.add_argument(
        "taskset", metavar="TASKSET", help="name of the taskset's package, which is installed"
    )
    parser.add_argument(
        "--env", type=json_object, default={}, metavar="JSON",
        help='fields of the environment, as {"agent": {"runtime": {"type": "subprocess"}}}',
    )  # fmt: skip
    add_config_arguments(parser, VerifiersConfig)


def run(args: argparse.Namespace) -> int:
    """Play the groups; 0 when all have ended, 130 after Ctrl-C."""
    from harness_sdk.cli.run_config import VerifiersConfig

    config = load_config(VerifiersConfig, args.config, args.overrides)
    if args.dry_run:
        sys.stdout.write(render_config(config, args.dry_run))
        return 0
    run_interruptible(_play(config, args.taskset, args.env))
    return 0


async def _play(config: VerifiersConfig, taskset: str, settings: dict[str, Any]) -> None:
    from harness_sdk.cli.progress import EpisodeProgress
    from harness_sdk.cli.run import GroupLines
    from harness_sdk.environments.verifiers import (
        VerifiersOptions,
        VerifiersRunner,
        load_environment,
    )

    options = VerifiersOptions(
        url=config.url,
        group_size=config.group_size,
        num_groups=config.groups,
        concurrency=config.concurrency,
        sampling=config.sampling.model_dump(exclude_none=True),
        rewards=config.rewards,
    )
    environment = load_environment(taskset, settings=settings)
    async with contextlib.AsyncExitStack() as stack:
        permits = NoPermits()
        if config.redis_url is not None:
            permits = await stack.enter_async_context(
                redis_permits(config.redis_url, config.run, group_size=config.group_size)
            )
        lines = GroupLines(EpisodeProgress())
        runner = VerifiersRunner(environment, options, permits=permits, on_group=lines)
        try:
            await runner.run()
        finally:
            sys.stdout.write("\n".join(summarise(runner.groups).lines()) + "\n")
            sys.stdout.flush()
