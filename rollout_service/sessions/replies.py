"""What each call on a session returns; the server turns these into messages."""

from __future__ import annotations

from dataclasses import dataclass

from harness_sdk.types import (
    BranchResult,
    Budget,
    EpisodeResult,
    ReadResult,
    RewindResult,
    ThreadStatus,
    Turn,
)
from rollout_service.sessions.options import EpisodeLimits


@dataclass(frozen=True, slots=True, kw_only=True)
class Queued:
    """An episode waits for admission."""

    ahead: int
    """Episodes that were there before."""
    kv_use: float
    """Share of the pool that is taken."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Opened:
    """An episode was admitted."""

    episode_id: str
    root_thread: str
    head: int
    policy_version: int
    limits: EpisodeLimits
    holder: int
    """Number of the call that holds the episode; a repeat of the opening takes over."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnReply:
    """A model turn and the thread's head after it."""

    head: int
    turn: Turn


@dataclass(frozen=True, slots=True, kw_only=True)
class Forked:
    """One new thread."""

    thread_id: str
    head: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ForkReply:
    """The threads of a fork, in the order asked for."""

    head: int
    threads: tuple[Forked, ...]
    budget: Budget


@dataclass(frozen=True, slots=True, kw_only=True)
class RewindReply:
    """Where a rewind went."""

    head: int
    result: RewindResult
    budget: Budget


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadReply:
    """What a read mounted."""

    head: int
    result: ReadResult
    budget: Budget


@dataclass(frozen=True, slots=True, kw_only=True)
class WaitReply:
    """How the awaited branches ended; one that still runs has timed out."""

    head: int
    results: tuple[BranchResult, ...]
    note: str
    budget: Budget


@dataclass(frozen=True, slots=True, kw_only=True)
class DoneReply:
    """A thread closed."""

    head: int
    status: ThreadStatus


@dataclass(frozen=True, slots=True, kw_only=True)
class CloseReply:
    """An episode closed; `key` is the idempotency key that may repeat the call."""

    result: EpisodeResult
    key: str
    owner: str
    """Whose the episode was."""
