"""The beginning of episodes: their ids, their turn in the queue, and who may still come."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Container

from harness_sdk.errors import HarnessError, InvalidRequest, Unavailable
from harness_sdk.tracing import begin, spanning
from harness_sdk.types import Limits
from rollout_service.sessions.admission import Admission, OnQueued
from rollout_service.sessions.episode import Episode, Service
from rollout_service.sessions.forecast import Footprint, Forecast
from rollout_service.sessions.guardrails import Guardrails
from rollout_service.sessions.options import OpenRequest, check_request, resolve_limits
from rollout_service.sessions.replies import Opened


class Opening:
    """Opens the episodes of a replica.

    Args:
        service: What they share.
        episodes: Those that are open; a new one is put there.
        closed: Ids of those that were closed lately.

    Attributes:
        failure: Why nobody is served any more; None while somebody is.
        shut: Why nobody else is admitted; empty while somebody is.
    """

    def __init__(
        self, service: Service, episodes: dict[str, Episode], closed: Container[str]
    ) -> None:
        self._service = service
        self._options = service.options
        self._engine = service.engine
        self._episodes = episodes
        self._closed = closed
        self._opening: dict[str, str] = {}
        self.failure: HarnessError | None = None
        self.shut = ""
        limits = resolve_limits(self._options, Limits(), self._engine.info.max_positions)
        self._forecast = Forecast(self._engine.info, limits.thread_budget)
        self._admission = Admission(
            kv_use=lambda: self._engine.stats().kv_use,
            peak_use=self._peak_use,
            num_open=lambda: sum(not each.gave_back for each in episodes.values()),
            is_serving=lambda: self.is_final or self._engine.stats().is_serving,
            max_kv_use=self._options.admission_kv_use,
            poll_s=self._options.admission_poll_s,
        )

    @property
    def num_waiting(self) -> int:
        """Episodes in the queue."""
        return self._admission.num_waiting

    def ending(self) -> None:
        """Learn from the pool while it still holds what an episode that closes took."""
        self._forecast.ending(self._engine.stats(), self._footprints())

    def ended(self, episode: Episode) -> None:
        """Learn from an episode that has closed how much room one takes."""
        self._forecast.ended(episode.footprint())

    async def open(self, request: OpenRequest, on_queued: OnQueued | None) -> Opened:
        """Admit an episode; see `Sessions.open`."""
        version_policy = check_request(self._options, request)
        limits = resolve_limits(self._options, request.limits, self._engine.info.max_positions)
        episode_id = request.episode_id or uuid.uuid4().hex
        repeated = await self._repeated_opening(episode_id, request)
        if repeated is not None:
            return self._hold(repeated)
        self._reserve_id(episode_id, request.idempotency_key)
        span = begin("octopus.session", run=self._options.run, episode=episode_id)
        try:
            with spanning("octopus.admission", within=span):
                if await self._admission.admit(on_queued):
                    self._service.metrics.add("guardrails/queued_episodes")
            self._check_admits()
            episode = Episode(
                self._service,
                episode_id,
                request,
                Guardrails(
                    limits,
                    model_driven="done" in request.primitives,
                    reads="read_thread" in request.primitives,
                    options=self._options,
                    info=self._engine.info,
                    chat=self._service.chat,
                    metrics=self._service.metrics,
                ),
                version_policy=version_policy,
                policy_version=self._service.newest_version(),
                span=span,
            )
            self._episodes[episode_id] = episode
        except BaseException as error:
            span.end(error)
            raise
        finally:
            self._opening.pop(episode_id, None)
        self._service.metrics.add("episodes/opened")
        return self._hold(episode)

    def _peak_use(self) -> float:
        return self._forecast.peak_use(self._engine.stats(), self._footprints())

    def _footprints(self) -> list[Footprint]:
        """Of the episodes that the pool holds, those that are about to give back among them."""
        return [each.footprint() for each in self._episodes.values() if not each.gave_back]

    async def _repeated_opening(self, episode_id: str, request: OpenRequest) -> Episode | None:
        """The episode that the first call with its key opened; waits while that one waits."""
        key = request.idempotency_key
        while key and self._opening.get(episode_id) == key:
            await asyncio.sleep(self._options.admission_poll_s)
        episode = self._episodes.get(episode_id)
        if episode is None or not key or episode.closing is not None:
            return None
        first = episode.request
        return episode if (first.idempotency_key, first.owner) == (key, request.owner) else None

    def _hold(self, episode: Episode) -> Opened:
        episode.holder += 1
        return Opened(
            episode_id=episode.episode_id,
            root_thread=episode.root.thread_id,
            head=episode.root.head_id,
            policy_version=episode.policy_version,
            limits=episode.guardrails.limits,
            holder=episode.holder,
        )

    @property
    def is_final(self) -> bool:
        """Whether no episode is admitted any more."""
        return self.failure is not None or bool(self.shut)

    def _check_admits(self) -> None:
        if self.failure is not None:
            raise self.failure.copy()
        if self.shut:
            raise Unavailable(
                self.shut,
                value="no new episode",
                remedy="connect to another replica",
            )

    def _reserve_id(self, episode_id: str, key: str) -> None:
        self._check_admits()
        known = (self._episodes, self._opening, self._closed)
        if any(episode_id in ids for ids in known):
            raise InvalidRequest(
                "episode id was used before",
                value=episode_id,
                remedy="draw a new id; records are told apart by it",
                episode_id=episode_id,
            )
        self._opening[episode_id] = key
