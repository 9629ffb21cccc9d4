"""A `verifiers` environment (its v1 API) played on the rollout service's OpenAI endpoint.

The environment keeps its tasks, agents, tools and scores; every episode of it becomes one record
in the stream, a tree of all that its agents sampled. Needs the extra `verifiers`.
"""

from __future__ import annotations

import asyncio
import importlib
import logging
import os
import time
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import quote

from harness_sdk.errors import ConfigError, ServiceError
from harness_sdk.permits import NoPermits, Permits
from harness_sdk.runner import EpisodeOutcome, GroupOutcome, group_name, new_permit_id
from harness_sdk.task_order import TaskOrder

logger = logging.getLogger(__name__)

_MODEL = "octopus"
"""The endpoint serves one model, whatever it is called."""
_CLOSE_TIMEOUT_S = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifiersOptions:
    """Where an environment is played, and how much of it."""

    url: str
    """`base_url` of the OpenAI endpoint: http://host:port/v1."""
    token_variable: str = "OCTOPUS_TOKEN"
    """Environment variable that holds the service's token."""
    group_size: int = 8
    """Episodes of one task that are compared with each other, as the trainer's."""
    num_groups: int | None = None
    """Groups to play; None ends with the pass over the tasks that the run is in."""
    concurrency: int = 16
    """Episodes at a time."""
    grouped: bool = True
    """False keeps the episodes out of training."""
    sampling: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """Sampling parameters in OpenAI's names, as {"max_tokens": 512}."""
    rewards: tuple[float, float] = (0.0, 1.0)
    """Lowest and highest reward of the environment, which become 0 and 1."""

    def __post_init__(self) -> None:
        for name in ("group_size", "concurrency"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} is too small", value=getattr(self, name), limit="1")
        if self.rewards[0] >= self.rewards[1]:
            raise ConfigError(
                "rewards is no range", value=self.rewards, limit="the lower one, then the higher"
            )


def load_environment(
    taskset: str, *, environment: str = "", settings: Mapping[str, Any] | None = None
) -> Any:
    """The environment of an installed taskset.

    Args:
        taskset: Name of its package, as verifiers' own commands take it.
        environment: Name of another environment to play the taskset's tasks in.
        settings: Further fields of verifiers' environment configuration.

    Raises:
        ConfigError: verifiers is not installed, or refuses the names or settings.
    """
    loaders = _verifiers("verifiers.v1.utils.loaders")
    fields = dict(settings or {})
    try:
        fields["taskset"] = {**fields.get("taskset", {}), "id": taskset}
        config = loaders.resolve_env_config({**fields, "id": environment})
        return loaders.load_environment(config)
    except (ImportError, AttributeError, TypeError, ValueError) as error:
        raise ConfigError(
            "verifiers cannot load the environment",
            value=f"taskset {taskset}: {error}",
            remedy="install the taskset's package, or correct the settings",
        ) from error


class VerifiersRunner:
    """Plays groups of episodes of an environment.

    Args:
        env: The environment; see `load_environment`.
        options: Where, and how much of it.
        permits: How far it may run ahead of the trainer; None sets no limit.
        on_group: Called when the last episode of a group has ended.
    """

    def __init__(
        self,
        env: Any,
        options: VerifiersOptions,
        *,
        permits: Permits | None = None,
        on_group: Callable[[GroupOutcome], None] | None = None,
    ) -> None:
        self._vf = _verifiers("verifiers.v1")
        self._env = env
        self._options = options
        self._permits = permits or NoPermits()
        self._on_group = on_group
        self._order = TaskOrder(lambda: env.taskset, env.config.taskset.id)
        self._slots = asyncio.Semaphore(options.concurrency)
        self._http: Any = None
        self._endpoint = self._vf.EvalClientConfig(
            base_url=options.url, api_key_var=options.token_variable
        )
        self.groups: list[GroupOutcome] = []
        """Every group begun so far."""

    async def run(self) -> list[GroupOutcome]:
        """Play every group; a failed episode is recorded, not raised.

        Raises:
            ServiceError: The endpoint did not take an episode's end.
            ConfigError: There are no tasks.
        """
        aiohttp: Any = importlib.import_module("aiohttp")
        token = os.environ.get(self._options.token_variable, "")
        headers = {"Authorization": f"Bearer {token}"} if token else {}
        timeout = aiohttp.ClientTimeout(total=_CLOSE_TIMEOUT_S)
        try:
            async with (
                aiohttp.ClientSession(headers=headers, timeout=timeout) as self._http,
                self._env.serving(),
                asyncio.TaskGroup() as tasks,
            ):
                while await self._order.wants(self._options.num_groups):
                    await self._begin_group(tasks)
        except BaseExceptionGroup as group:
            raise group.exceptions[0] from group
        finally:
            for each in self.groups:
                if not each.is_complete:
                    await self._permits.end(each.permit_id)
        return self.groups

    async def _begin_group(self, tasks: asyncio.TaskGroup) -> None:
        permit_id = new_permit_id()
        place = await self._permits.take(permit_id)
        try:
            task = await self._order.take(place)
        except BaseException:
            await self._permits.give_back(permit_id)
            raise
        name = str(task.data.id or task.data.idx)
        group = GroupOutcome(
            task_id=name,
            group_id=group_name(name, permit_id) if self._options.grouped else "",
            permit_id=permit_id,
            size=self._options.group_size,
        )
        self.groups.append(group)
        for _ in range(group.size):
            await self._slots.acquire()
            tasks.create_task(self._play(group, task))

    async def _play(self, group: GroupOutcome, task: Any) -> None:
        try:
            group.episodes.append(await self._episode(group, task))
        finally:
            self._slots.release()
        if group.is_complete:
            await self._permits.end(group.permit_id)
            if self._on_group is not None:
                self._on_group(group)

    async def _episode(self, group: GroupOutcome, task: Any) -> EpisodeOutcome:
        session, started_s = uuid.uuid4().hex, time.monotonic()
        names = {"session": session, "group": group.group_id, "task": group.task_id}
        sampling = self._vf.SamplingConfig(**self._options.sampling, metadata=names)
        context = self._vf.ModelContext(model=_MODEL, client=self._endpoint, sampling=sampling)
        try:
            played = await self._env.run_episode(task, context)
        except BaseException:
            await asyncio.shield(self._close(session, None))
            raise
        reward = self._reward(played) if played.ok else None
        failure = "" if played.ok else _failure(played)
        if failure:
            logger.warning("episode %s of task %s failed: %s", session, group.task_id, failure)
        closed = await self._close(session, reward)
        return EpisodeOutcome(
            task_id=group.task_id,
            group_id=group.group_id,
            episode_id=str(closed.get("episode_id", "")),
            reward=reward,
            answer=_answer(played),
            error=failure,
            seconds=time.monotonic() - started_s,
            num_tokens=int(closed.get("num_tokens", 0)),
            num_turns=sum(trace.num_turns for trace in played.traces),
            entry_id=str(closed.get("entry_id", "")),
        )

    def _reward(self, episode: Any) -> float:
        """From 0 to 1: the mean over the agents that are trained."""
        traces = [trace for trace in episode.traces if trace.agent.trainable]
        low, high = self._options.rewards
        value = sum(trace.reward for trace in traces) / max(len(traces), 1)
        if not low <= value <= high:
            raise ConfigError(
                "the environment's reward is outside the range that was declared",
                value=value,
                limit=f"{low} to {high}",
                remedy="give its lowest and highest reward with --rewards",
            )
        return (value - low) / (high - low)

    async def _close(self, session: str, reward: float | None) -> dict[str, Any]:
        """End the session; one that no agent ever called for is none."""
        url = f"{self._options.url.rstrip('/')}/octopus/sessions/{quote(session, safe='')}/close"
        async with self._http.post(url, json={"reward": reward}) as response:
            if response.status == 404:
                return {}
            if response.status != 200:
                raise ServiceError(
                    "the endpoint did not take an episode's end",
                    value=f"{response.status}: {(await response.text())[:300]}",
                    remedy="check the URL and the token",
                )
            return await response.json()


def _answer(episode: Any) -> str:
    for trace in reversed(episode.traces):
        for branch in reversed(trace.branches):
            for message in reversed(branch.messages):
                if message.role == "assistant" and message.content:
                    return str(message.content)
    return ""


def _failure(episode: Any) -> str:
    errors = [*episode.errors, *(trace.last_error for trace in episode.traces)]
    return next((f"{e.type}: {e.message}" for e in errors if e is not None), "unknown")


def _verifiers(module: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ConfigError(
            "verifiers is not installed",
            value=error,
            remedy="pip install 'octopus-agents[verifiers]'",
        ) from error
