"""One run: score the held-out questions, warm up and train on the others, score again."""

from __future__ import annotations

import asyncio
import secrets
import sys
import time
from collections.abc import Coroutine, Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

from benchmarks.deep_search.plan import (
    RUN,
    STOP_S,
    Plan,
    stack_config,
    train_settings,
    warm_up_settings,
)
from benchmarks.deep_search.report import Report
from benchmarks.deep_search.serving import while_serving
from benchmarks.deep_search.teacher import taught
from examples.deep_search import agent as example
from examples.deep_search.scoring import exact_match, f1, golds
from harness_sdk.agents import Agent, Task, load_agent
from harness_sdk.cli.processes import stop
from harness_sdk.cli.stack import LocalStack
from harness_sdk.client import OctopusClient
from harness_sdk.control import episodes_key
from harness_sdk.errors import ServiceError
from harness_sdk.permits import redis_permits
from harness_sdk.redis_client import blocking_redis_client
from harness_sdk.replicas import Replicas
from harness_sdk.runner import GroupOutcome, Runner, RunOptions

_BEFORE_SHARE = 0.25
"""Of the time, for the first scoring at most."""
_RESERVE = 1.2
"""The second scoring may take so many times as long as the first."""
_PROGRESS_S = 10.0


class Clock:
    """What is left of a run's time."""

    def __init__(self, seconds: float) -> None:
        self.begin_s = time.monotonic()
        self._seconds = seconds

    @property
    def spent_s(self) -> float:
        """Since the begin."""
        return time.monotonic() - self.begin_s

    def left_s(self, *, keep_s: float = 0.0) -> float:
        """Until the end, less what is kept; 0 at least."""
        return max(self._seconds - keep_s - self.spent_s, 0.0)

    def say(self, text: str) -> None:
        """A line of progress."""
        sys.stderr.write(f"[{self.spent_s:.0f} s] {text}\n")
        sys.stderr.flush()


async def study(plan: Plan, out: Path) -> None:
    """Run `plan` and write `report.json` and `report.md` to `out`, whatever it got to.

    Raises:
        HarnessError: A service ended or did not start, with the end of its log, or time was too
            short for a part.
    """
    clock = Clock(plan.seconds)
    token = secrets.token_urlsafe(16)
    config = await asyncio.to_thread(stack_config, plan, out, token)
    stack = LocalStack(config)
    report = Report(out, plan, config.run_folder / "metrics.jsonl")
    clock.say(f"starting the services, logs in {config.run_folder}")
    try:
        async with stack, OctopusClient.connect(stack.address, token=token) as client:
            await _Study(plan, stack, client, clock, report).run()
    finally:
        report.write()
        clock.say(f"wrote {out / 'report.json'}")


class _Study:
    """The phases, each within its time and only as long as the services that it needs run."""

    def __init__(
        self, plan: Plan, stack: LocalStack, client: OctopusClient, clock: Clock, report: Report
    ) -> None:
        self._plan = plan
        self._stack = stack
        self._client = client
        self._clock = clock
        self._report = report
        agent = load_agent(Path(example.__file__).parent)
        self._train_tasks = _first(example.tasks(), plan.questions)
        held_out = _first(example.eval_tasks(), plan.questions)
        self._agent = replace(agent, tasks=lambda: self._train_tasks, score=_f1)
        self._judged = replace(agent, tasks=lambda: held_out, score=_exact_match)

    async def run(self) -> None:
        """All of them."""
        begin_s = self._clock.spent_s
        await self._score("before", self._clock.left_s() * _BEFORE_SHARE)
        reserve_s = (self._clock.spent_s - begin_s) * _RESERVE + 2 * STOP_S
        # What was scored is no training data.
        await asyncio.to_thread(_forget_episodes, self._stack.redis_url)
        if self._plan.warm_up:
            await self._warm_up(self._clock.left_s(keep_s=reserve_s))
        await self._train(reserve_s)
        await self._score("after", self._clock.left_s(keep_s=STOP_S))

    async def _score(self, when: str, limit_s: float) -> None:
        """Passes over the held-out questions; one that cannot end in time is not begun."""
        end_s, took_s = self._clock.spent_s + limit_s, 0.0
        for number in range(1, self._plan.passes + 1):
            begin_s = self._clock.spent_s
            if number > 1 and begin_s + 1.1 * took_s > end_s:
                self._clock.say(f"{when}: no time for pass {number}")
                return
            runner = self._runner(self._judged, RunOptions(group_size=1, grouped=False))
            groups = await self._within(end_s - begin_s, f"pass {number} {when}", runner.run())
            took_s = self._clock.spent_s - begin_s
            row = self._report.add_pass(when, number, await self._version(), groups)
            self._clock.say(
                f"{when}, pass {number}: exact match {row['exact_match']:.3f}, F1 {row['f1']:.3f}, "
                f"{row['scored']} of {row['questions']} questions, {took_s:.1f} s"
            )

    async def _warm_up(self, limit_s: float) -> None:
        """Imitation: as many episodes as the trainer's steps take."""
        size = len(self._train_tasks)
        await self._stack.start_trainer(warm_up_settings(self._plan, size))
        await self._within(limit_s, "the warm-up", self._imitate(size * self._plan.warm_up))
        self._clock.say(f"warm-up: version {await self._version()} serves")

    async def _imitate(self, wanted: int) -> None:
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._stack.until_ended("trainer"))
                tasks.create_task(self._play_taught(wanted))
        except BaseExceptionGroup as group:
            raise group.exceptions[0] from group

    async def _play_taught(self, wanted: int) -> None:
        ended, agent = 0, taught(self._agent)
        while ended < wanted:
            options = RunOptions(group_size=1, grouped=False, num_groups=wanted - ended)
            groups = await self._runner(agent, options).run()
            ended += sum(len(group.rewards) for group in groups)
            self._clock.say(f"warm-up: {ended} of {wanted} episodes played")

    async def _train(self, reserve_s: float) -> None:
        """Reinforcement learning until the clock leaves just enough for what follows."""
        await self._stack.start_trainer(train_settings(self._plan))
        limit_s = self._clock.left_s(keep_s=reserve_s)
        self._clock.say(f"training for {limit_s:.0f} s")
        plan = self._plan
        options = RunOptions(group_size=plan.group_size, num_groups=0)
        assert self._agent.sampling is not None
        sampling = replace(self._agent.sampling, temperature=plan.temperature)
        agent = replace(self._agent, sampling=sampling)
        async with redis_permits(self._stack.redis_url, RUN) as permits:
            runner = self._runner(agent, options, permits=permits, on_group=Progress(self._clock))
            await while_serving(
                self._stack,
                asyncio.sleep(limit_s),
                self._stack.until_ended("trainer"),
                runner.run(),
            )
        # It takes the step that it is in to its end, and then the version stands.
        await stop(self._stack.processes["trainer"], STOP_S)
        steps = self._report.num_steps()
        self._clock.say(f"trained: {steps} steps, version {await self._version()} serves")
        if not steps:
            raise ServiceError(
                "the trainer made no step in its time",
                limit=f"{limit_s:.0f} s",
                remedy=f"raise --seconds; see {self._stack.log_path('trainer')}",
            )

    def _runner(self, agent: Agent, options: RunOptions, **more: Any) -> Runner:
        options = replace(options, concurrency=self._plan.concurrency)
        return Runner(Replicas([self._client]), agent, options, **more)

    async def _version(self) -> int:
        return max((await self._client.status()).policy_versions)

    async def _within(self, limit_s: float, what: str, work: Coroutine[Any, Any, Any]) -> Any:
        """Do `work`, called `what` in errors, in time."""
        try:
            async with asyncio.timeout(limit_s):
                return await while_serving(self._stack, work)
        except TimeoutError as error:
            raise ServiceError(
                f"{what} did not end in its time",
                limit=f"{limit_s:.0f} s",
                remedy=f"raise --seconds; logs are in {self._stack.log_path('rollout').parent}",
            ) from error


class Progress:
    """A line now and then, of the groups since the last one."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._count = 0
        self._rewards: list[float] = []
        self._said_s = clock.spent_s

    def __call__(self, group: GroupOutcome) -> None:
        self._count += 1
        self._rewards += group.rewards
        if self._clock.spent_s - self._said_s < _PROGRESS_S or not self._rewards:
            return
        mean = sum(self._rewards) / len(self._rewards)
        self._clock.say(f"{self._count} groups, F1 {mean:.3f} in {len(self._rewards)} episodes")
        self._rewards.clear()
        self._said_s = self._clock.spent_s


def _first(tasks: Sequence[Task], count: int) -> list[Task]:
    return list(islice(tasks, count or None))


def _f1(task: Task, answer: str) -> float:
    return f1(answer, golds(task))


def _exact_match(task: Task, answer: str) -> float:
    return exact_match(answer, golds(task))


def _forget_episodes(redis_url: str) -> None:
    """Empty the stream, before a trainer reads it."""
    with blocking_redis_client(redis_url) as client:
        client.xtrim(episodes_key(RUN), maxlen=0, approximate=False)
