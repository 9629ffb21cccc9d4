"""One variant, one seed: warm-up on scripts, then reinforcement learning over the real services."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import secrets
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

from pydantic import SecretStr

from benchmarks.learning.agent import vault_agent
from benchmarks.learning.teacher import draw_script, play
from benchmarks.learning.variants import VARIANTS
from benchmarks.learning.world import LIMITS, VaultTask, draw_tasks, score
from harness_sdk.cli.demo.config import MODEL
from harness_sdk.cli.processes import spawn, stop
from harness_sdk.cli.settings import render_toml
from harness_sdk.cli.stack import LocalStack
from harness_sdk.cli.stack_config import StackConfig
from harness_sdk.cli.stack_layout import trainer_plan
from harness_sdk.client import OctopusClient
from harness_sdk.permits import redis_permits
from harness_sdk.replicas import Replicas
from harness_sdk.runner import EpisodeOutcome, GroupOutcome, Runner, RunOptions

GROUP_SIZE = 8

_STOP_S = 10.0
_WARM_UP_SEED = 1_000_003
"""Tasks of the warm-up do not come again online."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """How long a run is."""

    variant: str
    """Name in `VARIANTS`."""
    seed: int
    """Of tasks, scripts and adapter."""
    model: Path = MODEL
    """Checkpoint that `benchmarks.learning.pretrain` wrote."""
    warmup_steps: int = 8
    """Steps of tree SFT on scripted episodes."""
    demonstrations_per_step: int = 32
    warmup_lr: float = 2e-3
    steps: int = 50
    """Steps of reinforcement learning."""
    lr: float = 3e-3
    """Falls linearly to a tenth."""
    rank: int = 8


class Curve:
    """Rows of a run, written to a file as each step's groups end."""

    def __init__(self, plan: Plan, path: Path) -> None:
        self._plan = plan
        self._path = path
        self._size = VARIANTS[plan.variant].groups_per_step
        self._begin_s = time.monotonic()
        self._groups: list[GroupOutcome] = []
        self._step = 0
        self._generated = 0

    def take(self, group: GroupOutcome) -> None:
        """A group has ended."""
        self._groups.append(group)
        if len(self._groups) < self._size:
            return
        episodes = [e for g in self._groups for e in g.episodes if e.reward is not None]
        self._groups.clear()
        self._step += 1
        self._generated += sum(e.num_sampled for e in episodes)
        row = {
            "task": "vault",
            "variant": self._plan.variant,
            "seed": self._plan.seed,
            "step": self._step,
            "generated_tokens": self._generated,
            **_means(episodes),
            "seconds": round(time.monotonic() - self._begin_s, 1),
        }
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")


def _means(episodes: list[EpisodeOutcome]) -> dict[str, float]:
    """Reward, and the shares of episodes in which each primitive was used."""
    count = max(len(episodes), 1)
    return {
        "reward": round(sum(e.reward or 0.0 for e in episodes) / count, 4),
        "forked": round(sum(e.num_forks > 0 for e in episodes) / count, 4),
        "rewound": round(sum(e.num_rewinds > 0 for e in episodes) / count, 4),
        "read": round(sum(e.num_reads > 0 for e in episodes) / count, 4),
        "plain_reply": round(sum("plain_reply" in e.metrics for e in episodes) / count, 4),
    }


async def learn(plan: Plan, folder: Path, rows: Path) -> None:
    """Run the plan; a row is appended to `rows` for each step of reinforcement learning.

    Args:
        plan: What to run.
        folder: Takes the logs, checkpoints and metrics; must be new.
        rows: JSON lines.
    """
    token = secrets.token_urlsafe(16)
    stack_config = StackConfig(
        model=plan.model,
        run=f"{plan.variant}-{plan.seed}",
        folder=folder,
        token=SecretStr(token),
        with_trainer=False,
        threads=1,
        stop_s=_STOP_S,
        rollout={"model": {"preamble": "compact"}},
    )
    stack = LocalStack(stack_config)
    async with stack, OctopusClient.connect(stack.address, token=token) as client:
        study = _Study(plan, stack_config, stack, client)
        await study.warm_up()
        await study.learn(Curve(plan, rows))


class _Study:
    """The two phases."""

    def __init__(
        self, plan: Plan, config: StackConfig, stack: LocalStack, client: OctopusClient
    ) -> None:
        self._plan = plan
        self._variant = VARIANTS[plan.variant]
        self._config = config
        self._stack = stack
        self._client = client

    async def warm_up(self) -> None:
        """Imitate scripts, those of one step together: the short ones would come first."""
        plan = self._plan
        rng = random.Random(plan.seed)
        drawn = draw_tasks(_WARM_UP_SEED + plan.seed)
        async with self._trainer(warmup_settings(plan)):
            for _ in range(plan.warmup_steps):
                async with asyncio.TaskGroup() as tasks:
                    for task in islice(drawn, plan.demonstrations_per_step):
                        tasks.create_task(self._demonstrate(task, rng))

    async def learn(self, curve: Curve) -> None:
        """Play and train until the trainer has made its steps."""
        plan, variant = self._plan, self._variant
        async with redis_permits(self._stack.redis_url, self._config.run) as permits:
            options = RunOptions(
                group_size=GROUP_SIZE,
                num_groups=0,
                concurrency=GROUP_SIZE * variant.groups_per_step,
            )
            agent = vault_agent(variant, plan.seed)
            runner = Runner(
                Replicas([self._client]), agent, options, permits=permits, on_group=curve.take
            )
            async with asyncio.TaskGroup() as tasks:
                playing = tasks.create_task(runner.run())
                async with self._trainer(online_settings(plan)):
                    pass
                playing.cancel()

    async def _demonstrate(self, task: VaultTask, rng: random.Random) -> None:
        script = draw_script(rng, task, self._variant)
        episode = self._client.episode(
            task_id=task.task_id, primitives=self._variant.primitives, limits=LIMITS
        )
        async with episode:
            answer = await play(episode, task, script, self._variant)
            await episode.close(reward=score(task, answer))

    @contextlib.asynccontextmanager
    async def _trainer(self, settings: dict[str, Any]) -> AsyncIterator[None]:
        """Start the trainer, run the block, wait until the trainer has made its steps."""
        if self._variant.longest_path and settings["objective"] == "path_average":
            process = await self._spawn_longest_path(settings)
        else:
            await self._stack.start_trainer(settings)
            process = None
        try:
            yield
            await self._stack.until_ended("trainer")
        finally:
            if process is not None:
                await stop(process, _STOP_S)

    async def _spawn_longest_path(self, settings: dict[str, Any]) -> asyncio.subprocess.Process:
        path = self._config.run_folder / "longest_path.toml"
        plan = replace(
            trainer_plan(self._config, settings), module="benchmarks.learning.longest_path"
        )
        await asyncio.to_thread(path.write_text, render_toml(plan.settings), "utf-8")
        process = await spawn(
            plan.argv(path),
            log_path=self._stack.log_path("trainer"),
            environment={
                "OCTOPUS_REDIS_URL": self._stack.redis_url,
                "OCTOPUS_MQTT_URL": self._stack.mqtt_url,
                "OMP_NUM_THREADS": "1",
            },
        )
        self._stack.processes["trainer"] = process
        return process


def warmup_settings(plan: Plan) -> dict[str, Any]:
    """Of the trainer that imitates the scripts."""
    return {
        "objective": "sft",
        "max_steps": plan.warmup_steps,
        "batch": {"episodes_per_step": plan.demonstrations_per_step},
        "optim": {"lr": plan.warmup_lr},
        **_shared_settings(plan),
    }


def online_settings(plan: Plan) -> dict[str, Any]:
    """Of the trainer that goes on from there with rewards."""
    variant = VARIANTS[plan.variant]
    return {
        "objective": "path_average" if variant.longest_path else "dag_grpo",
        "max_steps": plan.warmup_steps + plan.steps,
        "batch": {
            "groups_per_step": variant.groups_per_step,
            "group_size": GROUP_SIZE,
            "max_policy_lag": variant.max_policy_lag,
        },
        "optim": {"lr": plan.lr, "schedule": "linear", "min_lr_factor": 0.1},
        **_shared_settings(plan),
    }


def _shared_settings(plan: Plan) -> dict[str, Any]:
    return {
        "seed": plan.seed,
        "lora": {"rank": plan.rank, "alpha": 2.0 * plan.rank},
        "publish": {"min_replicas": 1},
    }
