"""How far runners may run ahead of training, in permits for groups; see `run_keys`."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Coroutine, Iterator
from typing import Any, TypeVar

from trainer_service.config import TrainerConfig
from trainer_service.feed import StreamFeed
from trainer_service.publish import Publisher
from trainer_service.run_keys import (
    forget_running_groups,
    grant_permits,
    permits,
    running_groups,
    withhold_permits,
)
from trainer_service.run_state import RunState
from trainer_service.stopping import unless_stopped
from trainer_service.stream import RedisLink

log = logging.getLogger(__name__)

T = TypeVar("T")


class Grants:
    """The permits of one run.

    Args:
        config: Of the service.
        run: Whose groups consumed count.
        stop: Once it is set, Redis is waited for no longer.
        link: Redis.
        publisher: Whose replicas may wait for a slot; None publishes nothing.
        feed: Whose groups dropped count too; open before the first grant.
    """

    def __init__(
        self,
        config: TrainerConfig,
        run: RunState,
        stop: asyncio.Event,
        link: RedisLink,
        publisher: Publisher | None,
        feed: StreamFeed,
    ) -> None:
        self._config = config
        self._run = run
        self._stop = stop
        self._link = link
        self._publisher = publisher
        self._feed = feed
        self._behind = 0
        self._draining = False

    async def grant(self) -> None:
        """Permits for groups: those consumed and dropped, and as many as the lag lets run ahead.

        A group that begins behind the newest version uses up a part of its lag at once: where
        replicas wait for a slot, fewer groups begin, then none, and training waits with them.
        """
        if self._draining:
            return
        await self._find_lost()
        self._behind = self._publisher.behind if self._publisher is not None else 0
        steps = max(0, 1 + self._config.max_policy_lag - self._behind)
        ahead = steps * self._config.batch.groups_per_step
        granted = self._run.progress.num_groups + self._feed.num_dropped_groups + ahead
        granting = grant_permits(
            self._link,
            self._config.run,
            granted,
            self._config.batch.group_size,
            refills=self._config.refills,
        )
        await self._unless_stopped(granting)

    async def adjust(self) -> None:
        """Grant anew where another number of replicas waits for a slot than at the last grant."""
        if self._publisher is not None and self._publisher.behind != self._behind:
            await self.grant()

    async def drain(self) -> None:
        """Return once no permitted group runs any more, or the run is stopped; groups that never
        end are given up at their deadline, those without a permit are not waited for."""
        run = self._config.run
        with self._no_grants():
            await self._unless_stopped(withhold_permits(self._link, run))
            await self._unless_stopped(self._feed.catch_up())
            while not self._stop.is_set() and await self._unless_stopped(
                running_groups(self._link, run)
            ):
                await self._unless_stopped(self._feed.gather())

    async def return_silent(self, num_waiting: int) -> None:
        """Permits of groups whose runner died before their first episode ended come back.

        Args:
            num_waiting: Groups that wait at the feed, which heard nothing for a group's deadline.
        """
        granted, taken = await permits(self._link, self._config.run)
        here = self._run.progress.num_groups + self._feed.num_dropped_groups + num_waiting
        # A runner that may start more is alive; while none may, nobody shows it.
        silent = taken >= granted or self._draining
        if silent and taken > here:
            log.warning("%d groups were begun and sent nothing; their permits return", taken - here)
            self._feed.drop_lost(taken - here)
        if self._draining:
            await forget_running_groups(self._link, self._config.run)

    async def _find_lost(self) -> None:
        """Groups that were counted as lost and came after all would raise the lead for good."""
        if not self._feed.num_lost:
            return
        _, taken = await permits(self._link, self._config.run)
        here = self._run.progress.num_groups + self._feed.num_dropped_groups
        found = min(here + self._feed.num_waiting - taken, self._feed.num_lost)
        if found > 0:
            log.info("%d groups that seemed lost came after all", found)
            self._feed.drop_lost(-found)

    @contextlib.contextmanager
    def _no_grants(self) -> Iterator[None]:
        self._draining = True
        try:
            yield
        finally:
            self._draining = False

    async def _unless_stopped(self, work: Coroutine[Any, Any, T]) -> T | None:
        return await unless_stopped(self._stop, work)
