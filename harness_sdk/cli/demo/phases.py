"""The demo's two phases over the services: imitation of a script, then reinforcement learning."""

from __future__ import annotations

import asyncio
import contextlib
import random
import secrets
import shutil
from collections.abc import AsyncGenerator
from itertools import islice
from pathlib import Path
from typing import cast

from pydantic import SecretStr

from harness_sdk.cli.demo.agent import LIMITS, relay_agent
from harness_sdk.cli.demo.config import MODEL, RUN, DemoConfig
from harness_sdk.cli.demo.gallery import Gallery
from harness_sdk.cli.demo.progress import Progress
from harness_sdk.cli.demo.task import DEMO_PRIMITIVES, RelayTask, draw_tasks, score
from harness_sdk.cli.demo.teacher import Script, draw_script, play
from harness_sdk.cli.stack import LocalStack
from harness_sdk.cli.stack_config import StackConfig
from harness_sdk.client import OctopusClient
from harness_sdk.errors import ConfigError
from harness_sdk.permits import redis_permits
from harness_sdk.replicas import Replicas
from harness_sdk.runner import Runner, RunOptions

FORKS, READS = 0.6, 0.5
"""Shares of the scripts whose root forks, and of those whose opener reads: 30 % are right."""

_STOP_S = 10.0
_WARM_UP_SEED = 1_000_003
"""Tasks of the warm-up do not come again online."""


async def run_phases(config: DemoConfig, progress: Progress) -> tuple[Gallery, int]:
    """Run both phases.

    Returns:
        Episodes of the online phase, and how often the rollout service was started again.
    """
    _clear(config.run_folder)
    token = secrets.token_urlsafe(16)
    stack = LocalStack(_stack_config(config, token))
    gallery = Gallery()
    progress.tell("starting Valkey, the MQTT broker and the rollout service")
    async with (
        stack,
        _supervised(stack),
        OctopusClient.connect(stack.address, token=token) as client,
    ):
        progress.tell(
            f"warm-up: tree SFT on {config.warmup_steps * config.demonstrations_per_step} scripted "
            f"episodes, {FORKS * READS:.0%} of them right"
        )
        await _warm_up(config, stack, client, progress)
        progress.tell(
            f"online RL: dag_grpo, {config.groups_per_step} groups of {config.group_size} "
            "episodes a step"
        )
        async with gallery.collect(stack.redis_url, RUN):
            await _learn(config, stack, client, progress)
    return gallery, stack.num_starts["rollout"] - 1


async def _warm_up(
    config: DemoConfig, stack: LocalStack, client: OctopusClient, progress: Progress
) -> None:
    await stack.start_trainer(config.warmup_settings())
    async with asyncio.TaskGroup() as tasks, progress.following(config.run_folder):
        tasks.create_task(_demonstrate(config, client))
        await stack.until_ended("trainer")


async def _demonstrate(config: DemoConfig, client: OctopusClient) -> None:
    """Play the demonstrations, those of one step together: the short ones would come first."""
    rng = random.Random(config.seed)
    drawn = draw_tasks(_WARM_UP_SEED + config.seed)
    for _ in range(config.warmup_steps):
        async with asyncio.TaskGroup() as tasks:
            for task in islice(drawn, config.demonstrations_per_step):
                script = draw_script(rng, task, forks=FORKS, reads=READS)
                tasks.create_task(_play(client, task, script))


async def _play(client: OctopusClient, task: RelayTask, script: Script) -> None:
    episode = client.episode(task_id=task.task_id, primitives=DEMO_PRIMITIVES, limits=LIMITS)
    async with episode:
        answer = await play(episode, task, script)
        await episode.close(reward=score(task, answer))


async def _learn(
    config: DemoConfig, stack: LocalStack, client: OctopusClient, progress: Progress
) -> None:
    await stack.start_trainer(config.online_settings())
    async with redis_permits(stack.redis_url, RUN) as permits:
        options = RunOptions(
            group_size=config.group_size, num_groups=0, concurrency=config.concurrency
        )
        runner = Runner(Replicas([client]), relay_agent(config.seed), options, permits=permits)
        async with asyncio.TaskGroup() as tasks, progress.following(config.run_folder):
            playing = tasks.create_task(runner.run())
            await stack.until_ended("trainer")
            playing.cancel()


@contextlib.asynccontextmanager
async def _supervised(stack: LocalStack) -> AsyncGenerator[None]:
    """Fail the block with the service that fails."""
    try:
        async with asyncio.TaskGroup() as tasks:
            supervising = tasks.create_task(stack.supervise())
            yield
            supervising.cancel()
    except BaseExceptionGroup as group:
        raise _first(group) from group


def _stack_config(config: DemoConfig, token: str) -> StackConfig:
    return StackConfig(
        model=MODEL,
        run=RUN,
        folder=config.out,
        token=SecretStr(token),
        with_trainer=False,
        threads=1,
        stop_s=_STOP_S,
        rollout=config.rollout_settings(),
    )


def _clear(folder: Path) -> None:
    """Remove what the last demo left: a run that is found would be continued.

    Raises:
        ConfigError: The folder is not a demo's.
    """
    if not folder.exists():
        return
    if not (folder / "rollout.toml").is_file():
        raise ConfigError(
            "a folder of that name is not the demo's own",
            value=folder,
            remedy="remove it or give another --out",
        )
    shutil.rmtree(folder)


def _first(group: BaseExceptionGroup[BaseException]) -> BaseException:
    """The first failure of a group, however deep it lies."""
    error = group.exceptions[0]
    if isinstance(error, BaseExceptionGroup):
        return _first(cast("BaseExceptionGroup[BaseException]", error))
    return error
