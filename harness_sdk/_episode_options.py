"""What an episode is opened with, checked before anything is sent."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from operator import index
from typing import Any, SupportsIndex

from harness_sdk.errors import InvalidRequest
from harness_sdk.types import PRIMITIVES, Limits, SamplingOptions


@dataclass(frozen=True, slots=True, kw_only=True)
class QueuedEvent:
    """The episode waits for admission."""

    ahead: int
    """Episodes before it."""
    kv_use: float
    """Share of the pool that is taken."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EpisodeOptions:
    """What an episode is opened with; see `OctopusClient.episode`."""

    episode_id: str
    group_id: str
    task_id: str
    limits: Limits
    primitives: tuple[str, ...]
    version_policy: str
    run: str
    sampling: SamplingOptions
    on_queued: Callable[[QueuedEvent], None] | None


def episode_options(
    *,
    task_id: str,
    group_id: str,
    episode_id: str | None,
    limits: Limits | None,
    primitives: Sequence[str],
    version_policy: str,
    run: str,
    sampling: SamplingOptions | None,
    on_queued: Callable[[QueuedEvent], None] | None,
) -> EpisodeOptions:
    """Checked options, the defaults filled in.

    Raises:
        InvalidRequest: An unknown primitive or version policy, or a limit below 1.
    """
    _check_limits(limits or Limits())
    for name in primitives:
        if name not in PRIMITIVES:
            raise InvalidRequest("unknown primitive", value=name, limit=", ".join(PRIMITIVES))
    if version_policy not in ("keep", "refresh"):
        raise InvalidRequest("unknown version policy", value=version_policy, limit="keep, refresh")
    return EpisodeOptions(
        episode_id=episode_id or uuid.uuid4().hex,
        group_id=group_id,
        task_id=task_id,
        limits=limits or Limits(),
        primitives=tuple(primitives),
        version_policy=version_policy,
        run=run,
        sampling=sampling or SamplingOptions(),
        on_queued=on_queued,
    )


def _check_limits(limits: Limits) -> None:
    for each in fields(limits):
        value: Any = getattr(limits, each.name)
        # The wire spells "the service's default" as 0 in the others, and has 32 bits.
        least = 0 if each.name in ("max_depth", "max_threads") else 1
        if value is not None and not (
            isinstance(value, SupportsIndex) and least <= index(value) < 2**32
        ):
            raise InvalidRequest(
                f"limit {each.name} cannot be used",
                value=repr(value),
                limit=f"a whole number from {least} to {2**32 - 1}",
                remedy="leave it out for the service's default",
            )
