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

from harness_sdk.errors import ConfigError, EngineError
from harness_sdk.model_cost import ModelCost, read_model_cost
from harness_sdk.tracing import spanning
from trainer_service.bus import ControlBus
from trainer_service.compute_thread import ComputeThread
from trainer_service.config import TrainerConfig
from trainer_service.feed import Batch, Collector, Demonstrations, Feed, FileFeed, StreamFeed
from trainer_service.follower import agree, copy_leader
from trainer_service.garbage import loaded_is_kept
from trainer_service.grants import Grants
from trainer_service.groups import GroupAssembler
from trainer_service.metrics import report
from trainer_service.origin import Origin
from trainer_service.parsing import parse_record
from trainer_service.publish import Publisher
from trainer_service.ranks import Ranks
from trainer_service.run_folder import identity, locked
from trainer_service.run_keys import claim_run, send_figures
from trainer_service.run_state import Progress, RunState, probe_tokens
from trainer_service.sinks import Sink, opened_sinks
from trainer_service.step import StepResult, dismiss, train_step
from trainer_service.step_trace import tell_episodes
from trainer_service.stopping import unless_stopped
from trainer_service.stream import EpisodeStream, RedisLink

log = logging.getLogger(__name__)

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
        compute = await stack.enter_async_context(ComputeThread())
        await compute.run(agree, config, ranks)
        run = await compute.run(RunState.load, config, ranks)
        await compute.run(copy_leader, run.policy, run.optimizer, ranks)
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
        loop = _Loop(config, run, stop, link, bus, ranks, sinks, compute)
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
        compute: ComputeThread,
    ) -> None:
        self._config = config
        self._sinks = sinks
        self._ranks = ranks
        self._cost = _model_cost(config) if ranks.size > 1 else None
        self._run = run
        self._stop = stop
        self._link = link
        self._compute = compute
        self._publisher = Publisher(config, link, bus) if link and bus else None
        self._feed: Feed = self._make_feed()
        self._grants: Grants | None = None
        if link is not None and config.needs_groups:
            assert isinstance(self._feed, StreamFeed)
            self._grants = Grants(config, run, stop, link, self._publisher, self._feed)

    async def run(self) -> Progress:
        """Step until the end."""
        if self._link is not None:
            owner, place = await asyncio.to_thread(identity, self._config.folder)
            claiming = claim_run(self._link, self._config.run, owner, place)
            await self._unless_stopped(claiming)
        if isinstance(self._feed, StreamFeed):
            await self._unless_stopped(self._feed.open())
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
        result: StepResult = await self._compute.run(
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
                await self._compute.run(self._run.save, self._feed.state())
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
        progress = replace(
            progress,
            num_groups=progress.num_groups + len(batch.groups) * self._config.needs_groups,
        )
        if not skipped:
            # A version keeps the probe it was announced with: replicas answer with no other.
            progress = replace(
                progress,
                version=progress.version + 1,
                probe_token_ids=probe_tokens(
                    batch.episodes[0].record, self._config.publish.probe_tokens
                ),
            )
        self._run.progress = progress

    def _check_skipped(self) -> None:
        row, limit = self._run.optimizer.skipped_in_a_row, self._config.optim.max_skipped
        if row >= limit:
            raise EngineError(
                "loss or gradients are not finite",
                value=f"{row} steps in a row",
                limit=f"below {limit}",
                remedy="lower optim.lr, or set model.dtype float32, or bfloat16 in place of"
                " float16, on both sides; the checkpoint holds the last finite policy",
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
        """With `publish.in_flight` wait: return once no permitted group runs any more."""
        if self._config.publish.in_flight != "wait" or self._publisher is None:
            return
        assert self._grants is not None, "objectives without groups do not wait"
        with _timed(values, "seconds/drain"):
            await self._grants.drain()

    async def _publish(self, values: dict[str, float]) -> None:
        if self._publisher is None:
            return
        with _timed(values, "seconds/publish"):
            served = await self._compute.run(self._run.served, self._ranks)
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
        served = await self._compute.run(self._run.served, self._ranks)
        # Replicas may still be loading their model.
        await self._unless_stopped(self._publisher.publish(served, min_replicas=0))

    async def _grant(self) -> None:
        if self._grants is not None:
            await self._grants.grant()

    async def _on_wait(self) -> None:
        """What replicas say between two steps: a wrong one stops the run, a slot lets it go on."""
        if self._publisher is not None:
            self._publisher.check()
        if self._grants is not None:
            await self._grants.adjust()

    async def _on_idle(self, num_waiting: int) -> None:
        if self._grants is not None:
            await self._grants.return_silent(num_waiting)

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
            on_dropped=self._grant,
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


@contextlib.contextmanager
def _timed(values: dict[str, float], name: str) -> Iterator[None]:
    begin = time.monotonic()
    try:
        with spanning(f"octopus.{name.removeprefix('seconds/')}"):
            yield
    finally:
        values[name] = time.monotonic() - begin
