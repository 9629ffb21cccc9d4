"""`octopus eval`: each task of an agent folder that is for it, scored and kept out of training."""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING

from harness_sdk.agents import Agent, num_tasks
from harness_sdk.cli.agent_session import configured_agent, reached
from harness_sdk.cli.episode_stream import reading
from harness_sdk.cli.interrupts import run_interruptible
from harness_sdk.cli.progress import EpisodeProgress, episode_progress
from harness_sdk.cli.settings import add_config_arguments, load_config, render_config
from harness_sdk.errors import HarnessError
from harness_sdk.measures import measure
from harness_sdk.model_cost import ModelCost, read_model_cost
from harness_sdk.runner import GroupOutcome, Runner, RunOptions
from harness_sdk.summary import summarise

if TYPE_CHECKING:
    from harness_sdk.cli.run_config import EvalConfig

logger = logging.getLogger(__name__)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of the command."""
    from harness_sdk.cli.run_config import EvalConfig

    parser.add_argument("agent", type=Path, metavar="FOLDER", help="folder with agent.py")
    parser.add_argument(
        "--json", type=Path, metavar="FILE", help="write figures and episodes there"
    )
    add_config_arguments(parser, EvalConfig)


def run(args: argparse.Namespace) -> int:
    """Score the agent; 1 where no episode could be scored."""
    from harness_sdk.cli.run_config import EvalConfig

    config = load_config(EvalConfig, args.config, args.overrides)
    if args.dry_run:
        sys.stdout.write(render_config(config, args.dry_run))
        return 0
    agent = configured_agent(args.agent, config)
    agent = replace(agent, tasks=agent.eval_tasks or agent.tasks)
    cost = read_model_cost(config.cost_model) if config.cost_model is not None else None
    if args.json is not None:
        # Hours of episodes must not end at a folder that is not there.
        args.json.parent.mkdir(parents=True, exist_ok=True)
    groups = run_interruptible(_evaluate(config, agent, cost))
    summary = summarise(groups)
    sys.stdout.write("\n".join(summary.lines()) + "\n")
    if args.json is not None:
        results = [asdict(episode) for group in groups for episode in group.episodes]
        figures = {"agent": agent.name, **asdict(summary), "results": results}
        args.json.write_text(json.dumps(figures, indent=2, ensure_ascii=False) + "\n", "utf-8")
    return 1 if summary.accuracy is None else 0


async def _evaluate(config: EvalConfig, agent: Agent, cost: ModelCost | None) -> list[GroupOutcome]:
    options = RunOptions(
        group_size=config.repeats,
        num_groups=config.tasks,
        concurrency=config.concurrency,
        grouped=False,
    )
    async with reached(config.address, config) as replicas:
        run = (await replicas.first()).client.info.run
        if config.redis_url is not None:
            # Before hours of episodes, not after them.
            await asyncio.to_thread(_check_stream, config.redis_url, run)
        count = num_tasks(agent)
        if config.tasks is not None:
            count = config.tasks if count is None else min(count, config.tasks)
        with episode_progress(None if count is None else count * config.repeats) as progress:
            groups = await Runner(
                replicas,
                agent,
                options,
                on_group=lambda group: _show(group, progress),
                on_episode=progress.ended,
            ).run()
    if config.redis_url is not None:
        try:
            await asyncio.to_thread(_measure, groups, config.redis_url, run, cost)
        except HarnessError as error:
            logger.warning("the scores stand, the records are not measured: %s", error)
    return groups


def _check_stream(url: str, run: str) -> None:
    with reading(url, run) as stream:
        stream.last()


def _measure(groups: list[GroupOutcome], url: str, run: str, cost: ModelCost | None) -> None:
    """Give the episodes what their records tell; one that was trimmed stays without."""
    episodes = [episode for group in groups for episode in group.episodes]
    entry_ids = [episode.entry_id for episode in episodes if episode.entry_id]
    with reading(url, run) as stream:
        found = {entry_id: measure(record, cost) for entry_id, record in stream.at(entry_ids)}
    for group in groups:
        group.episodes = [
            replace(episode, measures=found.get(episode.entry_id)) for episode in group.episodes
        ]
    if len(found) < len(episodes):
        logger.warning(
            "%d of %d records are not in the stream of %s", len(episodes) - len(found),
            len(episodes), run,
        )  # fmt: skip


def _show(group: GroupOutcome, progress: EpisodeProgress) -> None:
    for episode in group.episodes:
        reward = "failed" if episode.reward is None else f"{episode.reward:.3f}"
        text = episode.error or episode.answer
        progress.line(f"{group.task_id}  {reward}  {' '.join(text.split())[:120]}")
