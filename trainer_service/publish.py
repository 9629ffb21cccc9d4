"""A new version to the replicas, and the proof that they serve it.

The checksums that a replica read back from its serving buffers are the proof; its probe's
log-probabilities are a second look. Either one differing stops training. A replica that waits for
a slot stops nothing: it takes the newest version once one is free, and `behind` tells by how much
training has to hold back until then.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from harness_sdk import control
from harness_sdk.control import PolicyAnnouncement, ReplicaState
from harness_sdk.errors import AdapterError, ConfigError, Unavailable
from harness_sdk.fingerprints import file_sha256
from trainer_service.bus import ControlBus, ReplicaStates
from trainer_service.config import TrainerConfig
from trainer_service.run_keys import delete_adapter, upload_adapter
from trainer_service.stream import RedisLink

log = logging.getLogger(__name__)

REPEAT_S = 2.0
"""Replicas that have not answered are told again: one may have been subscribing just then."""

SILENT_S = 90.0
"""A replica that waits for a slot repeats it every few seconds; one that has not for so long is
no longer waited for. A large adapter may take most of it to arrive."""

NUM_NAMED = 8
"""Tensors that an error names before it only counts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Served:
    """What every replica must serve as a version."""

    version: int
    folder: Path
    """PEFT folder, as durable as the checkpoint it comes from."""
    base_model: str
    """Hash of the base model."""
    checksums: Mapping[str, str]
    """Tensor name to sha256, of the trainer's own parameters."""
    probe_token_ids: tuple[int, ...]
    probe_logprobs: tuple[float, ...]
    """Nats, of `probe_token_ids[1:]`, by the trainer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishReport:
    """How the replicas took a version."""

    version: int
    acknowledged: tuple[str, ...]
    """Replicas whose checksums and probe agree."""
    waiting: tuple[str, ...]
    """Replicas that have it and wait for a slot, which their open episodes hold."""
    silent: tuple[str, ...]
    """Live replicas that did not answer in time."""
    probe_delta_max: float
    """Largest |delta logp| of the probe over the replicas."""
    seconds: float


class Publisher:
    """Publishes versions of one run, which only rise.

    Args:
        config: Of the service.
        link: Redis, for adapters that travel in chunks.
        bus: Control bus.
    """

    def __init__(self, config: TrainerConfig, link: RedisLink, bus: ControlBus) -> None:
        self._config = config
        self._link = link
        self._bus = bus
        self._served: Served | None = None
        self._told_waiting: set[str] = set()

    async def publish(self, served: Served, *, min_replicas: int = 0) -> PublishReport:
        """Store, announce, and wait for what the live replicas say.

        Args:
            served: The version.
            min_replicas: ReplicaStates that must serve it in time, or wait for a slot.

        Raises:
            AdapterError: A replica refused the version, or serves something else.
            ConfigError: One serves a version that this run folder never made.
            Unavailable: Fewer than `min_replicas` serve it in time.
        """
        begin = time.monotonic()
        announcement = await self._store(served)
        asked = _live(self._bus.replicas)
        give_up = begin + self._config.publish.ack_timeout_s
        await self._announce(announcement, asked, min_replicas, give_up)
        self._served = served
        self.check()
        report = self._report(served, asked, time.monotonic() - begin)
        self._judge(report, min_replicas)
        await self._forget_old(served.version)
        return report

    @property
    def behind(self) -> int:
        """Versions that new episodes may begin behind the newest, for want of slots; 0 if none.

        By the furthest of the replicas that wait for a slot.
        """
        newest = self._served.version if self._served is not None else 0
        serving = [max(state.versions, default=0) for state in self._waiting().values()]
        return max(0, newest - min(serving, default=newest))

    def check(self) -> None:
        """Compare every replica that says it serves the newest version, late ones too.

        Raises:
            AdapterError: One refused it or serves something else.
            ConfigError: One serves a version that this run folder never made.
        """
        newest = self._served.version if self._served is not None else 0
        for state in self._bus.replicas.values():
            if not state.alive:
                continue
            # Versions only rise: a folder that was lost or removed would begin anew at 1.
            if max(state.versions, default=0) > newest:
                raise ConfigError(
                    f"replica {state.replica_id} serves a later version of run {self._config.run}"
                    " than its folder holds",
                    value=max(state.versions),
                    limit=f"up to {newest}",
                    remedy=f"restore {self._config.folder}, or use a new run name",
                )
            if self._served is not None:
                verify(state, self._served, self._config.probe_tolerance)
        self._tell_waiting()

    def _waiting(self) -> dict[str, ReplicaState]:
        return {
            name: state
            for name, state in self._bus.replicas.items()
            if _waits(state) and self._bus.silence_s(name) < SILENT_S
        }

    def _tell_waiting(self) -> None:
        """Log once that a replica waits, and once that it does no longer."""
        waiting = self._waiting()
        for name in sorted(waiting.keys() - self._told_waiting):
            log.warning(
                "replica %s waits for a slot for version %d: %s; training goes on up to the policy"
                " lag, then waits too (raise adapters.max_versions, or open long episodes with"
                " version_policy refresh)",
                name,
                waiting[name].waiting_version,
                waiting[name].waiting_for,
            )
        for name in sorted(self._told_waiting - waiting.keys()):
            state = self._bus.replicas.get(name)
            if state is None or not state.alive:
                log.warning("replica %s, which waited for a slot, is gone", name)
            elif _waits(state):
                log.warning("replica %s waited for a slot and says nothing any more", name)
            else:
                log.info("replica %s serves version %d", name, max(state.versions, default=0))
        self._told_waiting = set(waiting)

    async def _announce(
        self,
        announcement: PolicyAnnouncement,
        asked: frozenset[str],
        min_replicas: int,
        give_up: float,
    ) -> None:
        """Announce until all of `asked` and `min_replicas` have answered, or until `give_up`."""
        while True:
            await self._bus.announce(announcement)
            left = give_up - time.monotonic()
            settled = await self._bus.wait_until(
                lambda replicas: _settled(replicas, asked, announcement.version, min_replicas),
                max(0.0, min(left, REPEAT_S)),
            )
            if settled or left <= REPEAT_S:
                return

    async def _store(self, served: Served) -> PolicyAnnouncement:
        folder = served.folder
        sha256 = await asyncio.to_thread(file_sha256, folder / control.ADAPTER_FILE)
        if self._config.publish.via == "folder":
            uri = folder.resolve().as_uri()
        else:
            uri = await upload_adapter(self._link, self._config.run, served.version, folder)
        return PolicyAnnouncement(
            version=served.version,
            sha256=sha256,
            num_tensors=len(served.checksums),
            rank=self._config.lora.rank,
            alpha=self._config.lora.alpha,
            uri=uri,
            base_model=served.base_model,
            probe_token_ids=served.probe_token_ids,
        )

    def _report(self, served: Served, asked: frozenset[str], seconds: float) -> PublishReport:
        live = {name: state for name, state in self._bus.replicas.items() if state.alive}
        serving = {name: state for name, state in live.items() if _serves(state, served.version)}
        waiting = {name for name, state in live.items() if state.waiting_version == served.version}
        deltas = [_probe_delta(state, served) for state in serving.values()]
        return PublishReport(
            version=served.version,
            acknowledged=tuple(sorted(serving)),
            waiting=tuple(sorted(waiting)),
            silent=tuple(sorted((asked & live.keys()) - serving.keys() - waiting)),
            probe_delta_max=max(deltas, default=0.0),
            seconds=seconds,
        )

    def _judge(self, report: PublishReport, needed: int) -> None:
        if len(report.acknowledged) + len(report.waiting) < needed:
            raise Unavailable(
                f"too few replicas serve version {report.version}",
                value=f"{len(report.acknowledged)} after {report.seconds:.1f} s"
                + (f", waiting for a slot: {', '.join(report.waiting)}" if report.waiting else "")
                + (f", silent: {', '.join(report.silent)}" if report.silent else ""),
                limit=f"{needed} and more within {self._config.publish.ack_timeout_s:g} s",
                remedy="start rollout services of this run, or lower publish.min_replicas",
            )
        if report.silent:
            log.warning(
                "replicas %s did not answer for version %d in time; going on",
                ", ".join(report.silent),
                report.version,
                extra={"policy_version": report.version},
            )

    async def _forget_old(self, version: int) -> None:
        old = version - self._config.publish.keep_versions
        if self._config.publish.via == "redis" and old > 0:
            await delete_adapter(self._link, self._config.run, old)


def verify(state: ReplicaState, served: Served, probe_tolerance: float) -> None:
    """Compare what a replica says about the served version with the trainer's own.

    Raises:
        AdapterError: It refused the version, or the checksums or the probe differ.
    """
    where = f"replica {state.replica_id}, version {served.version}"
    if state.error and state.error_version == served.version:
        raise AdapterError(
            f"{where}: refused: {state.error}",
            remedy="correct what it names, on the replica or in this run's lora and model options;"
            " the trainer resumes from its checkpoint",
        )
    if not _serves(state, served.version):
        return
    faults = _faults(state.checksums, served.checksums)
    if faults:
        raise AdapterError(
            f"{where}: it acknowledged and serves other weights",
            value=", ".join(faults[:NUM_NAMED])
            + (f" and {len(faults) - NUM_NAMED} more" if len(faults) > NUM_NAMED else ""),
            remedy="restart the replica; the trainer resumes from its checkpoint",
        )
    delta = _probe_delta(state, served)
    if not delta <= probe_tolerance:
        raise AdapterError(
            f"{where}: the weights agree and the probe's log-probabilities do not",
            value=f"{delta:.3g} nats",
            limit=f"{probe_tolerance:g} nats",
            remedy="compare base model, dtype and rotary settings, or raise "
            "publish.probe_tolerance",
        )


def _faults(found: Mapping[str, str], expected: Mapping[str, str]) -> list[str]:
    missing = [f"{name} missing" for name in expected if name not in found]
    unknown = [f"{name} unknown" for name in found if name not in expected]
    differing = [
        f"{name} differs" for name in expected if name in found and found[name] != expected[name]
    ]
    return sorted(missing) + sorted(unknown) + sorted(differing)


def _settled(
    replicas: ReplicaStates, asked: frozenset[str], version: int, min_replicas: int
) -> bool:
    answered = {name for name, state in replicas.items() if _answered(state, version)}
    waiting = {name for name in asked if name in replicas and replicas[name].alive} - answered
    return not waiting and len(answered) >= min_replicas


def _probe_delta(state: ReplicaState, served: Served) -> float:
    if len(state.probe_logprobs) != len(served.probe_logprobs):
        return float("inf")
    return _largest_delta(state.probe_logprobs, served.probe_logprobs)


def _largest_delta(one: Sequence[float], other: Sequence[float]) -> float:
    deltas = [abs(a - b) for a, b in zip(one, other, strict=True)]
    # max() passes over NaN; a probe that is not finite must not pass.
    if any(delta != delta for delta in deltas):
        return float("inf")
    return max(deltas, default=0.0)


def _serves(state: ReplicaState, version: int) -> bool:
    return bool(state.versions) and max(state.versions) == version


def _waits(state: ReplicaState) -> bool:
    return state.alive and state.waiting_version > 0


def _answered(state: ReplicaState, version: int) -> bool:
    refused = bool(state.error) and state.error_version == version
    waits = state.waiting_version == version
    return state.alive and (refused or waits or _serves(state, version))


def _live(replicas: ReplicaStates) -> frozenset[str]:
    return frozenset(name for name, state in replicas.items() if state.alive)
