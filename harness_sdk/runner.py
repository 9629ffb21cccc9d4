"""Runs an agent's tasks as groups of episodes, and scores them: the library behind `octopus run`
and `octopus eval`."""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

from harness_sdk.agents import Agent, Task, outcome, task_id
from harness_sdk.episode import Episode
from harness_sdk.errors import (
    BudgetExhausted,
    ConfigError,
    EpisodeNotFound,
    HarnessError,
    ServiceError,
    ThreadEnded,
    Unavailable,
)
from harness_sdk.measures import EpisodeMeasures
from harness_sdk.permits import NoPermits, Permits
from harness_sdk.replicas import Replica, Replicas
from harness_sdk.tally import Tally
from harness_sdk.task_order import TaskOrder
from harness_sdk.types import ThreadStatus

logger = logging.getLogger(__name__)

_MAX_TASK_CHARS = 128
"""Of a task's name in those of its groups."""

_MAX_MOVES = 3
"""How often one episode starts again elsewhere."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunOptions:
    """What is run, and how much of it at once."""

    group_size: int = 8
    """Episodes of one task that are compared with each other."""
    num_groups: int | None = None
    """Groups to run; None ends with the pass over the tasks that the run is in, 0 goes on until it
    is cancelled."""
    concurrency: int = 16
    """Episodes at a time."""
    grouped: bool = True
    """False keeps the episodes out of training: they carry no group, and no task comes twice."""
    version_policy: str = "keep"
    """keep finishes an episode on the policy that it began with, refresh takes the newest one at
    each turn."""
    max_failures: int = 8
    """Episodes in a row that may fail on each replica for reasons of the infrastructure before the
    run stops."""

    def __post_init__(self) -> None:
        for name in ("group_size", "concurrency", "max_failures"):
            value = getattr(self, name)
            if value < 1:
                raise ConfigError(f"{name} is too small", value=value, limit="1 or more")


@dataclass(frozen=True, slots=True, kw_only=True)
class EpisodeOutcome:
    """One episode as it ended."""

    task_id: str
    group_id: str
    episode_id: str
    reward: float | None = None
    """y; None where the episode failed for a reason that is not the policy's."""
    answer: str = ""
    stop_reason: str = ""
    error: str = ""
    lost: bool = False
    """Its replica went away with it; nothing of it was recorded."""
    seconds: float = 0.0
    num_tokens: int = 0
    """Unique tokens of its record."""
    num_sampled: int = 0
    num_turns: int = 0
    num_forks: int = 0
    """Threads beside the root."""
    num_rewinds: int = 0
    num_reads: int = 0
    address: str = ""
    """Of the replica that it ran on."""
    entry_id: str = ""
    """Place of its record in the stream of episodes; empty without a stream."""
    measures: EpisodeMeasures | None = None
    """What its record tells, where somebody has read it."""
    metrics: Mapping[str, float] = field(default_factory=dict[str, float])
    """The agent's own and what its threads reported, of an episode that was scored."""


@dataclass(slots=True, kw_only=True)
class GroupOutcome:
    """The episodes of one task, as they end."""

    task_id: str
    group_id: str
    size: int
    permit_id: str = ""
    """What it holds its permit under."""
    episodes: list[EpisodeOutcome] = field(default_factory=list[EpisodeOutcome])
    replaced: list[EpisodeOutcome] = field(default_factory=list[EpisodeOutcome])
    """Episodes that failed for a reason that is not the policy's, or were lost with their replica,
    and that others stand in for."""

    @property
    def rewards(self) -> list[float]:
        """Of the episodes that count."""
        return [each.reward for each in self.episodes if each.reward is not None]

    @property
    def is_complete(self) -> bool:
        """Whether every episode has ended."""
        return len(self.episodes) == self.size


@dataclass(slots=True)
class _Place:
    """Where a group is; all of it moves when its replica is gone."""

    assigned: Replica
    """Where all of its episodes were counted at its begin."""
    replica: Replica
    """Where its next episode goes."""


class Runner:
    """Runs groups with bounded concurrency.

    Args:
        replicas: Where to; each group goes to the least busy one and stays there.
        agent: What to run.
        options: How much of it.
        permits: How far it may run ahead; None sets no limit.
        on_group: Called when the last episode of a group has ended.
        on_episode: Called when an episode has ended that counts, before `on_group`.
    """

    def __init__(
        self,
        replicas: Replicas,
        agent: Agent,
        options: RunOptions,
        *,
        permits: Permits | None = None,
        on_group: Callable[[GroupOutcome], None] | None = None,
        on_episode: Callable[[EpisodeOutcome], None] | None = None,
    ) -> None:
        self._replicas = replicas
        self._agent = agent
        self._options = options
        self._permits = permits or NoPermits()
        self._on_group = on_group
        self._on_episode = on_episode
        self._slots = asyncio.Semaphore(options.concurrency)
        self._order = TaskOrder(agent.tasks, agent.name)
        self._unopened: set[str] = set()
        self._running: dict[str, GroupOutcome] = {}
        self.tally = Tally()
        self.groups: list[GroupOutcome] = []
        """Every group begun so far; unless the run has no end, which keeps none."""

    async def run(self) -> list[GroupOutcome]:
        """Run every group; a failed episode is recorded, not raised.

        Raises:
            ServiceError: `max_failures` episodes in a row failed by the infrastructure's fault.
            Unavailable: No replica is left, and none came.
            ConfigError: There are no tasks.
        """
        options = self._options
        try:
            async with asyncio.TaskGroup() as tasks:
                while await self._order.wants(options.num_groups, repeats=options.grouped):
                    await self._begin_group(tasks)
        except BaseExceptionGroup as group:
            raise group.exceptions[0] from group
        finally:
            for each in list(self._running.values()):
                await self._end(each)
        return self.groups

    async def _begin_group(self, tasks: asyncio.TaskGroup) -> None:
        await self._slots.acquire()
        try:
            group, task = await self._permitted_group()
            replica = await self._replicas.assign(group.size)
        except BaseException:
            self._slots.release()
            raise
        place = _Place(replica, replica)
        tasks.create_task(self._run_one(place, group, task))
        for _ in range(group.size - 1):
            await self._slots.acquire()
            tasks.create_task(self._run_one(place, group, task))

    async def _permitted_group(self) -> tuple[GroupOutcome, Task]:
        """The run's next group, once it may start, and its task."""
        permit_id = new_permit_id()
        with self.tally.waiting():
            place = await self._permits.take(permit_id)
        try:
            task = await self._order.take(place)
            name = task_id(task)
        except BaseException:
            await self._permits.give_back(permit_id)
            raise
        group = GroupOutcome(
            task_id=name,
            group_id=group_name(name, permit_id) if self._options.grouped else "",
            permit_id=permit_id,
            size=self._options.group_size,
        )
        if self._options.num_groups != 0:
            self.groups.append(group)
        self._unopened.add(permit_id)
        self._running[permit_id] = group
        return group, task

    async def _run_one(self, place: _Place, group: GroupOutcome, task: Task) -> None:
        """An episode and those that stand in for it, where its group is."""
        assigned, num_moves = place.assigned, 0
        try:
            while True:
                assigned = await self._replicas.move(assigned, place.replica)
                place.replica = assigned
                with self.tally.running():
                    ended = await self._episode(assigned, group, task)
                self.tally.count(ended.reward)
                if ended.lost and num_moves < _MAX_MOVES and self._replicas.has_other(assigned):
                    # The trainer never heard of it, and would wait for it.
                    num_moves += 1
                    group.replaced.append(ended)
                elif ended.reward is not None or not await self._replaces(group, ended):
                    break
            group.episodes.append(ended)
            if self._on_episode is not None:
                self._on_episode(ended)
        finally:
            self._replicas.release(assigned)
            self._slots.release()
        if group.is_complete:
            await self._end(group)
            self.tally.num_groups += 1
            if self._on_group is not None:
                self._on_group(group)

    async def _replaces(self, group: GroupOutcome, failed: EpisodeOutcome) -> bool:
        """Whether another episode is to stand in for `failed`, which then is noted."""
        allowed = await self._permits.refills()
        if sum(not each.lost for each in group.replaced) >= allowed:
            return False
        group.replaced.append(failed)
        return True

    async def _end(self, group: GroupOutcome) -> None:
        """Tell that no episode of it runs; return the permit of one that the service, and so the
        trainer, never heard of."""
        self._running.pop(group.permit_id, None)
        if group.permit_id in self._unopened:
            self._unopened.discard(group.permit_id)
            await self._permits.give_back(group.permit_id)
        else:
            await self._permits.end(group.permit_id)

    async def _episode(self, replica: Replica, group: GroupOutcome, task: Task) -> EpisodeOutcome:
        """One episode; whatever goes wrong in it becomes part of its outcome."""
        started_s = time.monotonic()
        episode = replica.client.episode(
            task_id=group.task_id,
            group_id=group.group_id,
            limits=self._agent.limits,
            primitives=self._agent.primitives,
            sampling=self._agent.sampling,
            version_policy=self._options.version_policy,
        )
        reward: float | None = None
        failure, lost = "", False
        try:
            async with episode:
                self._unopened.discard(group.permit_id)
                reward = await run_task(self._agent, episode, task)
        except (Exception, asyncio.CancelledError) as error:
            if isinstance(error, asyncio.CancelledError) and _is_cancelled():
                raise
            # Else it is that of a task which the agent awaited: left alone, it would end this one
            # without a word.
            reward, failure = None, f"{type(error).__name__}: {error}"
            known = isinstance(error, HarnessError)
            logger.warning(
                "episode %s of task %s failed: %s",
                episode.episode_id,
                group.task_id,
                failure,
                exc_info=None if known else error,
            )
            # A replica that was started again knows nothing of the episode; one that has left may
            # still drain, and then its record is kept and nothing is to be run again.
            lost = (
                isinstance(error, Unavailable | EpisodeNotFound) and episode.has_raised(error)
            ) or (not replica.is_present and episode.result is None)
            self._count_failure(replica, error, lost)
        else:
            self._replicas.note_success(replica)
        seconds = time.monotonic() - started_s
        found = replace(
            _outcome(group, episode, reward, failure, seconds), lost=lost, address=replica.address
        )
        if reward is None:
            return found
        return replace(found, metrics=episode.figures | self._metrics(task, found.answer))

    def _metrics(self, task: Task, answer: str) -> dict[str, float]:
        """The agent's own; a fault in them costs no episode, for its record is sent already."""
        if self._agent.metrics is None:
            return {}
        try:
            return dict(self._agent.metrics(task, answer))
        except Exception:
            logger.warning("the agent's metrics failed for task %s", task_id(task), exc_info=True)
            return {}

    def _count_failure(self, replica: Replica, error: BaseException, lost: bool) -> None:
        in_a_row = self._replicas.note_failure(replica, lost=lost)
        if in_a_row >= self._options.max_failures:
            raise ServiceError(
                f"episodes fail one after another, the last with {type(error).__name__}: {error}",
                value=f"{in_a_row} in a row",
                limit=self._options.max_failures,
                remedy="see the log for the first one; the run can be started again",
            ) from error


def new_permit_id() -> str:
    """What a group that is not known yet takes its permit under; no other has it."""
    return uuid.uuid4().hex[:12]


def group_name(task_name: str, permit_id: str) -> str:
    """A name for a group that no other has; it begins as the task's, which may be a whole text."""
    shown = "".join(char for char in task_name if char.isprintable())
    return f"{shown[:_MAX_TASK_CHARS]}/{permit_id}"


async def run_task(agent: Agent, episode: Episode, task: Task) -> float:
    """Drive an open episode with the agent, score it and close it; returns its y.

    Without the root's `done`, or where the policy used up its budgets, y is 0.
    """
    root = episode.root
    scored: str | None = None
    try:
        returned = await agent.run(root, task)
        if isinstance(returned, str):
            scored = returned
            if not root.ended:
                await root.done(returned)
    except (BudgetExhausted, ThreadEnded) as error:
        # The policy's own failure, not the agent's: it scores 0 and is trained on.
        logger.info("episode %s: %s", episode.episode_id, error)
    reward = 0.0
    if root.status is ThreadStatus.DONE:
        reward = await outcome(agent, task, root.answer if scored is None else scored)
    await episode.close(reward=reward)
    return reward


def _is_cancelled() -> bool:
    """Whether somebody cancelled the running task."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


def _outcome(
    group: GroupOutcome, episode: Episode, reward: float | None, failure: str, seconds: float
) -> EpisodeOutcome:
    threads = list(episode.threads.values())
    result = episode.result
    return EpisodeOutcome(
        task_id=group.task_id,
        group_id=group.group_id,
        episode_id=episode.episode_id,
        reward=reward,
        answer=threads[0].answer if threads else "",
        stop_reason=result.stop_reason if result is not None else "",
        error=failure,
        seconds=seconds,
        num_tokens=result.num_tokens if result is not None else 0,
        num_sampled=sum(thread.num_sampled for thread in threads),
        num_turns=sum(thread.num_turns for thread in threads),
        num_forks=max(len(threads) - 1, 0),
        num_rewinds=sum(thread.num_rewinds for thread in threads),
        num_reads=sum(thread.num_reads for thread in threads),
        entry_id=result.entry_id if result is not None else "",
    )
