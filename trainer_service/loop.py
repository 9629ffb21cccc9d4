"""The trainer's life: read, group, step, checkpoint, acknowledge, publish, grant, report.

The order is the promise: nothing is acknowledged or published before its checkpoint is durable.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import time
from collections.abc import Coroutine, Iterator, Sequence
from dataclasses import replace
from typing import Any, TypeVar

from harness_sdk._cancellation import end
from harness_sdk.errors import ConfigError, EngineError
from harness_sdk.model_cost import ModelCost, read_model_cost
from harness_sdk.tracing import spanning
from trainer_service.bus import ControlBus
from trainer_service.config import TrainerConfig
from trainer_service.feed import Batch, Collector, Demonstrations, Feed, FileFeed, StreamFeed
from trainer_service.follower import copy_leader
from trainer_service.garbage import loaded_is_kept
from trainer_service.groups import GroupAssembler
from trainer_service.metrics import report
from trainer_service.origin import Origin
from trainer_service.parsing import parse_record
from trainer_service.publish import Publisher
from trainer_service.ranks import Ranks
from trainer_service.run_folder import identity, locked
from trainer_service.run_keys import (
    claim_run,
    forget_running_groups,
    grant_permits,
    permits,
    running_groups,
    send_figures,
    withhold_permits,
)
from trainer_service.run_state import Progress, RunState, probe_tokens
from trainer_service.sinks import Sink, opened_sinks
from trainer_service.step import StepResult, dismiss, train_step
from trainer_service.step_trace import tell_episodes
from trainer_service.stream import EpisodeStream, RedisLink

log = logging.getLogger(__name__)

GRACE_S = 3.0
"""After a stop, what Redis and the broker still get to finish; a restart catches up with it."""

T = TypeVar("T")


async def train(config: TrainerConfig, stop: asyncio.Event, ranks: Ranks | None = None) -> Progress:
    """Train until `max_steps`, the end of the records, or `stop`.

    Args:
        config: Of the service; `config.folder` takes checkpoints, adapters and metrics.
        stop: Set it to end after the step in progress.
        ranks: The processes that this one leads, which are in `follower.follow`; None leads none.

    Raises:
        ConfigError: Episodes, checkpoint and configuration do not fit together.
        AdapterError: A replica serves something else than the newest version.
        Unavailable: Redis, the broker or enough replicas stayed away.
        EngineError: Losses are not finite, or one of `ranks` is gone.
    """
    ranks = ranks or Ranks()
    for name in ("checkpoints", "adapters"):
        (config.folder / name).mkdir(parents=True, exist_ok=True)
    async with contextlib.AsyncExitStack() as stack:
        stack.enter_context(locked(config.folder))
        run = await asyncio.to_thread(RunState.load, config, ranks)
        await asyncio.to_thread(copy_leader, run.policy, run.optimizer, ranks)
        stack.enter_context(loaded_is_kept())
        link = bus = None
        if config.batch.records is None or config.publishes:
            link = RedisLink(config.redis.url, patience_s=config.redis.patience_s)
            stack.push_async_callback(link.close)
        if config.publishes:
            bus = ControlBus(config.mqtt.url, config.run, patience_s=config.mqtt.patience_s)
            if await unless_stopped(stop, stack.enter_async_context(bus)) is None:
                await asyncio.to_thread(dismiss, ranks)
                return run.progress
        sinks = await opened_sinks(config, stack)
        loop = _Loop(config, run, stop, link, bus, ranks, sinks)
        progress = await loop.run()
    await asyncio.to_thread(dismiss, ranks)
    return progress


class _Loop:
    """Steps of one process, over what `train` has opened."""

    def __init__(
        self,
        config: TrainerConfig,
        run: RunState,
        stop: asyncio.Event,
        link: RedisLink | None,
        bus: ControlBus | None,
        ranks: Ranks,
        sinks: Sequence[Sink],
    ) -> None:
        self._config = config
        self._sinks = sinks
        self._ranks = ranks
        self._cost = _model_cost(config) if ranks.size > 1 else None
        self._run = run
        self._stop = stop
        self._link = link
        self._publisher = Publisher(config, link, bus) if link and bus else None
        self._num_dropped_groups = 0
        self._behind = 0
        self._draining = False
        self._feed: Feed = self._make_feed()

    async def run(self) -> Progress:
        """Step until the end."""
        if self._link is not None:
            owner, place = await asyncio.to_thread(identity, self._config.folder)
            claiming = claim_run(self._link, self._config.run, owner, place)
            await self._unless_stopped(claiming)
        if isinstance(self._feed, StreamFeed):
            await self._unless_stopped(self._feed.open())
            self._num_dropped_groups = self._feed.num_dropped_groups
        await self._announce_again()
        await self._grant()
        while not self._finished():
            batch, waited_s = await self._next()
            if batch is None:
                break
            await self._step(batch, {"seconds/wait": waited_s})
        log.info("trainer ends: version %d", self._run.progress.version)
        return self._run.progress

    async def _step(self, batch: Batch, values: dict[str, float]) -> None:
        """One optimiser step and all that its durability allows."""
        begun_s = time.time()
        version = self._run.progress.version
        traces = [episode.record.traceparent for episode in batch.episodes]
        with spanning(
            "octopus.step", links=traces, run=self._config.run, policy_version=version
        ) as span:
            await self._take_step(batch, values)
            span.set(step=self._run.optimizer.num_attempts, episodes=len(batch.episodes))
        tell_episodes(batch, span, begun_s, step=self._run.optimizer.num_attempts)

    async def _take_step(self, batch: Batch, values: dict[str, float]) -> None:
        begin = time.monotonic()
        version = self._run.progress.version
        result: StepResult = await asyncio.to_thread(
            train_step,
            self._run.policy,
            self._run.optimizer,
            batch,
            self._config,
            version=version,
            ranks=self._ranks,
            cost=self._cost,
        )
        self._advance(batch, skipped=result.skipped)
        values |= result.metrics
        try:
            with _timed(values, "seconds/checkpoint"):
                await asyncio.to_thread(self._run.save, self._feed.state())
            with _timed(values, "seconds/acknowledge"):
                await self._unless_stopped(self._feed.settle())
            if not result.skipped:
                await self._drain(values)
                await self._publish(values)
            await self._grant()
        finally:
            values["seconds/step"] = time.monotonic() - begin
            figures = self._report(values)
        await asyncio.to_thread(self._tell_sinks, values)
        if self._link is not None:
            await self._unless_stopped(send_figures(self._link, self._config.run, figures))
        self._check_skipped()

    def _advance(self, batch: Batch, *, skipped: bool) -> None:
        progress = self._run.progress
        self._run.progress = replace(
            progress,
            version=progress.version + (not skipped),
            num_groups=progress.num_groups + len(batch.groups) * self._config.needs_groups,
            probe_token_ids=probe_tokens(
                batch.episodes[0].record, self._config.publish.probe_tokens
            ),
        )

    def _check_skipped(self) -> None:
        row, limit = self._run.optimizer.skipped_in_a_row, self._config.optim.max_skipped
        if row >= limit:
            raise EngineError(
                "loss or gradients are not finite",
                value=f"{row} steps in a row",
                limit=f"below {limit}",
                remedy="lower optim.lr or use float32; the checkpoint holds the last finite policy",
            )

    async def _next(self) -> tuple[Batch | None, float]:
        begin = time.monotonic()
        if self._publisher is not None:
            self._publisher.check()
        waiting = self._feed.next(self._run.progress.version, self._stop.is_set)
        batch = await self._unless_stopped(waiting)
        return batch, time.monotonic() - begin

    def _finished(self) -> bool:
        steps = self._config.max_steps
        done = steps is not None and self._run.optimizer.num_steps >= steps
        return done or self._stop.is_set()

    async def _drain(self, values: dict[str, float]) -> None:
        """With `publish.in_flight` wait: return once no permitted group runs any more; those that
        never end are given up at their deadline."""
        if self._config.publish.in_flight != "wait" or self._publisher is None:
            return
        link = self._link
        assert isinstance(self._feed, StreamFeed) and link is not None
        with _timed(values, "seconds/drain"), self._no_grants():
            await self._unless_stopped(withhold_permits(link, self._config.run))
            await self._unless_stopped(self._feed.catch_up())
            while not self._stop.is_set() and await self._num_in_flight(link):
                await self._unless_stopped(self._feed.gather())
        self._num_dropped_groups = self._feed.num_dropped_groups

    async def _num_in_flight(self, link: RedisLink) -> int:
        """Groups that hold a permit and run; those without a permit are not waited for."""
        return await self._unless_stopped(running_groups(link, self._config.run)) or 0

    @contextlib.contextmanager
    def _no_grants(self) -> Iterator[None]:
        self._draining = True
        try:
            yield
        finally:
            self._draining = False

    async def _publish(self, values: dict[str, float]) -> None:
        if self._publisher is None:
            return
        with _timed(values, "seconds/publish"):
            served = await asyncio.to_thread(self._run.served, self._ranks)
            needed = self._config.publish.min_replicas
            published = await self._unless_stopped(
                self._publisher.publish(served, min_replicas=needed)
            )
        if published is not None:
            values["publish/acknowledged"] = float(len(published.acknowledged))
            values["publish/silent"] = float(len(published.silent))
            values["publish/waiting"] = float(len(published.waiting))
            values["publish/behind"] = float(self._publisher.behind)
            values["publish/probe_delta_max"] = published.probe_delta_max

    async def _announce_again(self) -> None:
        """The newest version once more: the last process may have ended before it was served."""
        if self._publisher is None or self._run.progress.version == 0:
            return
        served = await asyncio.to_thread(self._run.served, self._ranks)
        # Replicas may still be loading their model.
        await self._unless_stopped(self._publisher.publish(served, min_replicas=0))

    async def _grant(self) -> None:
        """Permits for groups: those consumed and dropped, and as many as the lag lets run ahead.

        A group that begins behind the newest version uses up a part of its lag at once: where
        replicas wait for a slot, fewer groups begin, then none, and training waits with them.
        """
        if self._link is None or not self._config.needs_groups or self._draining:
            return
        await self._find_lost()
        self._behind = self._publisher.behind if self._publisher is not None else 0
        steps = max(0, 1 + self._config.max_policy_lag - self._behind)
        ahead = steps * self._config.batch.groups_per_step
        granted = self._run.progress.num_groups + self._num_dropped_groups + ahead
        granting = grant_permits(
            self._link,
            self._config.run,
            granted,
            self._config.batch.group_size,
            refills=self._config.refills,
        )
        await self._unless_stopped(granting)

    async def _find_lost(self) -> None:
        """Groups that were counted as lost and came after all would raise the lead for good."""
        if not isinstance(self._feed, StreamFeed) or not self._feed.num_lost or self._link is None:
            return
        _, taken = await permits(self._link, self._config.run)
        here = self._run.progress.num_groups + self._feed.num_dropped_groups
        found = min(here + self._feed.num_waiting - taken, self._feed.num_lost)
        if found > 0:
            log.info("%d groups that seemed lost came after all", found)
            self._feed.drop_lost(-found)
            self._num_dropped_groups = self._feed.num_dropped_groups

    async def _on_wait(self) -> None:
        """What replicas say between two steps: a wrong one stops the run, a slot lets it go on."""
        if self._publisher is None:
            return
        self._publisher.check()
        if self._publisher.behind != self._behind:
            await self._grant()

    async def _on_dropped(self, num_dropped_groups: int) -> None:
        self._num_dropped_groups = num_dropped_groups
        await self._grant()

    async def _on_idle(self, num_waiting: int) -> None:
        """Permits of groups whose runner died before their first episode ended come back."""
        if self._link is None or not self._config.needs_groups:
            return
        granted, taken = await permits(self._link, self._config.run)
        here = self._run.progress.num_groups + self._num_dropped_groups + num_waiting
        # A runner that may start more is alive; while none may, nobody shows it.
        silent = taken >= granted or self._draining
        if silent and taken > here and isinstance(self._feed, StreamFeed):
            log.warning("%d groups were begun and sent nothing; their permits return", taken - here)
            self._feed.drop_lost(taken - here)
        if self._draining:
            await forget_running_groups(self._link, self._config.run)

    def _tell_sinks(self, values: dict[str, float]) -> None:
        for sink in self._sinks:
            try:
                sink(self._run.optimizer.num_attempts, values)
            except Exception:
                # A full disk or a site that is away must not cost the run.
                log.warning("figures of a step are lost to a sink", exc_info=True)

    def _report(self, values: dict[str, float]) -> str:
        for cause, count in self._feed.dropped().items():
            values[f"dropped/{cause}"] = float(count)
        values["dropped/total"] = float(sum(self._feed.dropped().values()))
        values["policy/version"] = float(self._run.progress.version)
        values["optim/steps"] = float(self._run.optimizer.num_steps)
        if isinstance(self._feed, StreamFeed):
            values["dead/trimmed"] = float(self._feed.num_dead_trimmed)
        return report(
            self._config.folder / "metrics.jsonl",
            self._run.optimizer.num_attempts,
            values,
            run=self._config.run,
            objective=self._config.objective,
        )

    def _make_feed(self) -> Feed:
        config, state = self._config, self._run.feed_state
        batch = config.batch
        assert config.model.path is not None
        origin = Origin.of_folder(config.model.path)
        if batch.records is not None:
            return FileFeed(batch.records, batch, seed=config.seed, state=state, origin=origin)
        assert self._link is not None
        stream = EpisodeStream(
            self._link,
            config.run,
            consumer=config.redis.consumer,
            claim_idle_s=config.redis.claim_idle_s,
            parse=functools.partial(parse_record, origin=origin),
        )
        collector: Collector = Demonstrations(batch.min_reward)
        if config.needs_groups:
            collector = GroupAssembler(
                group_size=batch.group_size,
                min_group=batch.min_group,
                deadline_s=batch.group_deadline_s,
                max_policy_lag=config.max_policy_lag if batch.staleness == "drop" else None,
                refills=config.refills,
                drops_incomplete=batch.incomplete == "drop",
                closed=tuple(state.get("closed_groups", ())),
            )
        return StreamFeed(
            stream,
            collector,
            num_groups=batch.groups_per_step if config.needs_groups else batch.episodes_per_step,
            state=state,
            on_dropped=self._on_dropped,
            idle_s=batch.group_deadline_s,
            on_idle=self._on_idle,
            on_wait=self._on_wait,
        )

    async def _unless_stopped(self, work: Coroutine[Any, Any, T]) -> T | None:
        return await unless_stopped(self._stop, work)


def _model_cost(config: TrainerConfig) -> ModelCost | None:
    assert config.model.path is not None
    try:
        return read_model_cost(config.model.path)
    except ConfigError as error:
        log.warning("episodes are divided by their tokens alone: %s", error)
        return None


async def unless_stopped(stop: asyncio.Event, work: Coroutine[Any, Any, T]) -> T | None:
    """Await `work`; once `stop` is set it gets `GRACE_S` more, then None is returned."""
    task = asyncio.create_task(work)
    stopped = asyncio.create_task(stop.wait())
    try:
        await asyncio.wait({task, stopped}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            await asyncio.wait({task}, timeout=GRACE_S)
        return task.result() if task.done() else None
    finally:
        stopped.cancel()
        await end(task)


@contextlib.contextmanager
def _timed(values: dict[str, float], name: str) -> Iterator[None]:
    begin = time.monotonic()
    try:
        with spanning(f"octopus.{name.removeprefix('seconds/')}"):
            yield
    finally:
        values[name] = time.monotonic() - begin
