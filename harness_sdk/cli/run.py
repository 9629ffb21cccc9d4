"""`octopus run`: an agent folder's tasks as groups of episodes, in step with the trainer."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import logging
import os
import sys
import time
from collections.abc import AsyncGenerator, Generator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from harness_sdk.agents import Agent, num_tasks
from harness_sdk.cli.agent_session import configured_agent, reached
from harness_sdk.cli.interrupts import run_interruptible
from harness_sdk.cli.progress import EpisodeProgress, episode_progress
from harness_sdk.cli.settings import add_config_arguments, load_config, render_config
from harness_sdk.client import OctopusClient
from harness_sdk.errors import Unavailable
from harness_sdk.exposition import exposed
from harness_sdk.permits import NoPermits, Permits, redis_permits
from harness_sdk.runner import GroupOutcome, Runner, RunOptions
from harness_sdk.summary import summarise

if TYPE_CHECKING:
    from harness_sdk.cli.run_config import RunConfig

logger = logging.getLogger(__name__)

_POLL_S = 0.5
_MAX_GROUPS_PER_STEP = 4


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of the command."""
    from harness_sdk.cli.run_config import RunConfig

    parser.add_argument("agent", type=Path, metavar="FOLDER", help="folder with agent.py")
    add_config_arguments(parser, RunConfig)


def run(args: argparse.Namespace) -> int:
    """Run the groups; 0 when all have ended, 130 after Ctrl-C."""
    from harness_sdk.cli.run_config import RunConfig

    config = load_config(RunConfig, args.config, args.overrides)
    if args.dry_run:
        sys.stdout.write(render_config(config, args.dry_run))
        return 0
    agent = configured_agent(args.agent, config)
    run_interruptible(_run(config, agent))
    return 0


@dataclass(frozen=True, slots=True, kw_only=True)
class _Services:
    """Where the run goes."""

    addresses: tuple[str, ...]
    redis_url: str | None
    groups_per_step: int = 0
    """What a step of the trainer that runs here consumes; 0 where it runs elsewhere."""
    groups_ahead: int = 0
    """Groups that it permits beyond those it has consumed."""


async def _run(config: RunConfig, agent: Agent) -> None:
    async with (
        _services(config) as services,
        reached(services.addresses, config) as replicas,
        _permits(services, config, (await replicas.first()).client.info.run) as permits,
    ):
        count = num_tasks(agent) if config.groups is None else config.groups or None
        with contextlib.ExitStack() as shown:
            progress = shown.enter_context(
                episode_progress(None if count is None else count * config.group_size)
            )
            runner = Runner(
                replicas,
                agent,
                RunOptions(
                    group_size=config.group_size,
                    num_groups=config.groups,
                    concurrency=config.concurrency,
                    version_policy=config.version_policy,
                ),
                permits=permits,
                on_group=GroupLines(progress),
                on_episode=progress.ended,
            )
            if config.metrics.port is not None:
                run = config.run or (await replicas.first()).client.info.run
                shown.enter_context(_exposed(runner, config.metrics.host, config.metrics.port, run))
            try:
                await runner.run()
            finally:
                shown.close()
                sys.stdout.write("\n".join(summarise(runner.groups).lines()) + "\n")
                sys.stdout.flush()
        if services.groups_per_step:
            await _drain(config, services, permits, (await replicas.first()).client)


@contextlib.asynccontextmanager
async def _services(config: RunConfig) -> AsyncGenerator[_Services]:
    """The services that were named, or all of them on this machine for `--model`."""
    if config.model is None:
        yield _Services(addresses=config.address, redis_url=config.redis_url)
        return
    from harness_sdk.cli.models import resolve_model, rollout_for_model
    from harness_sdk.cli.stack import LocalStack
    from harness_sdk.cli.stack_config import StackConfig
    from harness_sdk.cli.stack_layout import trainer_plan
    from harness_sdk.cli.watch.beside import page_beside
    from trainer_service.config import TrainerConfig

    stack_config = StackConfig(
        model=await asyncio.to_thread(resolve_model, config.model),
        run=config.run or "local",
        folder=config.folder,
        redis_url=config.redis_url,
        token=config.token,
        rollout=rollout_for_model(config.model, config.rollout),
        trainer=_trainer_for_groups(config),
        threads=max((os.cpu_count() or 2) // 2, 1),
    )
    trainer = TrainerConfig.model_validate(trainer_plan(stack_config).settings)
    per_step = trainer.batch.groups_per_step
    stack = LocalStack(stack_config)
    try:
        async with (
            stack,
            page_beside(stack_config, stack) as page,
            asyncio.TaskGroup() as tasks,
        ):
            sys.stdout.write(f"page     {page}\n")
            sys.stdout.flush()
            supervising = tasks.create_task(stack.supervise())
            yield _Services(
                addresses=(stack.address,),
                redis_url=stack.redis_url,
                groups_per_step=per_step,
                groups_ahead=(1 + trainer.max_policy_lag) * per_step,
            )
            supervising.cancel()
    except BaseExceptionGroup as group:
        raise group.exceptions[0] from group


def _trainer_for_groups(config: RunConfig) -> dict[str, Any]:
    batch: dict[str, Any] = {"group_size": config.group_size}
    if config.groups:
        # A short run still takes two steps, the second on episodes of a newer version.
        batch["groups_per_step"] = min(max(config.groups // 2, 1), _MAX_GROUPS_PER_STEP)
    return {**config.trainer, "batch": {**batch, **config.trainer.get("batch", {})}}


@contextlib.asynccontextmanager
async def _permits(
    services: _Services, config: RunConfig, service_run: str
) -> AsyncGenerator[Permits]:
    if services.redis_url is None:
        yield NoPermits()
        return
    # A trainer that starts here is given the size; what an earlier one asked for is void.
    size = config.group_size if config.model is None else None
    run = config.run or service_run
    async with redis_permits(services.redis_url, run, group_size=size) as permits:
        yield permits


async def _drain(
    config: RunConfig, services: _Services, permits: Permits, client: OctopusClient
) -> None:
    """Let the trainer take the steps that it has the groups for, then say what is served."""
    deadline_s = time.monotonic() + config.drain_s
    while time.monotonic() < deadline_s:
        # The permits that follow a step come last: its version is served by then.
        with contextlib.suppress(Unavailable):
            granted, taken = await permits.counts()
            if taken - (granted - services.groups_ahead) < services.groups_per_step:
                break
        await asyncio.sleep(_POLL_S)
    versions = (await client.status()).policy_versions
    sys.stdout.write(f"versions  {', '.join(map(str, versions))} served now\n")


@contextlib.contextmanager
def _exposed(runner: Runner, host: str, port: int, run: str) -> Generator[None]:
    """The runner's figures for Prometheus, and where they are."""
    counters = {"episodes/ended_": "outcome"}
    with exposed(
        "run", runner.tally.figures, host=host, port=port, labels={"run": run}, counters=counters
    ) as address:
        logger.info("figures at http://%s/metrics", address)
        yield


class GroupLines:
    """One line for each group that has ended."""

    def __init__(self, progress: EpisodeProgress) -> None:
        self._progress = progress
        self._count = 0
        self._started_s = time.monotonic()

    def __call__(self, group: GroupOutcome) -> None:
        self._count += 1
        rewards = group.rewards
        mean = f"{sum(rewards) / len(rewards):.3f}" if rewards else "-"
        failed = group.size - len(rewards)
        replaced = f", {len(group.replaced)} replaced" if group.replaced else ""
        tokens = sum(episode.num_tokens for episode in group.episodes)
        self._progress.line(
            f"group {self._count}  {group.task_id}  reward {mean}  "
            f"{group.size} episodes, {failed} failed{replaced}  {tokens} tokens  "
            f"{time.monotonic() - self._started_s:.1f} s"
        )
