"""What sessions are told: limits and guardrails, an episode's request, a call's address."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, Protocol

from harness_sdk.errors import InvalidRequest
from harness_sdk.record import EpisodeRecord
from harness_sdk.types import PRIMITIVES, Limits

VersionPolicy = Literal["keep", "refresh"]

# A caller that lowers the budget alone keeps at least three quarters of it to work with.
_MAX_RESERVE_SHARE = 4


class RecordSink(Protocol):
    """Where finished episodes go."""

    async def write(self, record: EpisodeRecord) -> str:
        """Store `record` once and return its entry id; empty without a stream."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionOptions:
    """Defaults of every episode and limits of the service."""

    run: str = "default"
    replica_id: str = "replica"
    thread_budget: int = 32_768
    answer_reserve: int = 2_048
    max_threads: int = 10
    max_depth: int | None = None
    max_turns: int = 50
    admission_kv_use: float = 0.75
    """New episodes wait while more of the pool than this is taken, or is expected to be."""
    admission_poll_s: float = 0.05
    """Pause between two looks at the pool while episodes wait."""
    max_visible_tokens: int | None = None
    """Path and mounts together; None takes the model's positions."""
    allow_truncated_sampling: bool = False
    """Accept top_p, top_k and structured; their log-probabilities cannot be trained on."""
    busy_grace_s: float = 2.0
    """How long a call waits for the one before it, whose cancellation may still be on its way.

    On a loaded machine that takes a second. Waiting holds nothing: it only delays the refusal of
    a caller who makes two calls at once."""
    max_replies: int = 512
    """Replies that an episode keeps for repeated idempotency keys."""
    max_closed: int = 4096
    """Closed episodes that are remembered for a repeated close."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EpisodeLimits:
    """The limits of one episode, resolved."""

    thread_budget: int
    answer_reserve: int
    max_threads: int
    max_depth: int | None
    max_turns: int

    def to_limits(self) -> Limits:
        """The form that the agent sees."""
        return Limits(
            thread_budget=self.thread_budget,
            answer_reserve=self.answer_reserve,
            max_threads=self.max_threads,
            max_depth=self.max_depth,
            max_turns=self.max_turns,
        )


_MAX_NAME_CHARS = 512
"""Of an episode's and a group's name: logs, traces, records and the trainer's checkpoints carry
them, and thousands of them at a time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenRequest:
    """What opening an episode asks for."""

    episode_id: str = ""
    """Empty draws one."""
    group_id: str = ""
    task_id: str = ""
    run: str = ""
    """Empty takes the service's; another one is refused."""
    limits: Limits = field(default_factory=Limits)
    primitives: tuple[str, ...] = ()
    """Of `harness_sdk.types.PRIMITIVES`; with `done` among them the model drives the episode."""
    forks: bool = True
    """Whether the gate expects it to fork as often as its limits let it, before it is known how
    large episodes become."""
    version_policy: str = "keep"
    """keep | refresh"""
    idempotency_key: str = ""
    """A repeated key takes over the episode that the first call opened."""
    owner: str = ""
    """Who opens it; another owner's calls do not find it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """The address of a call on a thread."""

    episode_id: str
    thread_id: str
    expected_head: int | None = None
    """Head that the caller last saw; None skips the check (in-process callers)."""
    idempotency_key: str = ""
    """A repeated key returns the first call's reply; empty never repeats."""
    owner: str | None = None
    """Whose episodes the caller reaches; None reaches all (in-process callers)."""


def resolve_limits(options: SessionOptions, asked: Limits, max_positions: int) -> EpisodeLimits:
    """The asked limits over the service's defaults.

    A budget that was not asked for is at most what the model can see, and a reserve that was not
    asked for at most a quarter of the budget.

    Args:
        options: The service's defaults.
        asked: Explicit limits; None takes the default.
        max_positions: The model's.

    Raises:
        InvalidRequest: A limit that cannot work.
    """
    room = min(max_positions, options.max_visible_tokens or max_positions)
    budget = asked.thread_budget
    if budget is None:
        budget = min(options.thread_budget, room)
    elif budget > room:
        raise InvalidRequest(
            "thread_budget passes the model's positions or visible length",
            value=budget,
            limit=f"{room} tokens",
            remedy="lower thread_budget, or leave it out to take what the model allows",
        )
    reserve = asked.answer_reserve
    if reserve is None:
        reserve = min(options.answer_reserve, budget // _MAX_RESERVE_SHARE)
    limits = EpisodeLimits(
        thread_budget=budget,
        answer_reserve=reserve,
        max_threads=options.max_threads if asked.max_threads is None else asked.max_threads,
        max_depth=(options.max_depth if asked.max_depth is None else asked.max_depth) or None,
        max_turns=options.max_turns if asked.max_turns is None else asked.max_turns,
    )
    if not 0 <= limits.answer_reserve < limits.thread_budget:
        raise InvalidRequest(
            "answer_reserve leaves nothing of thread_budget",
            value=limits.answer_reserve,
            limit=f"0 to {limits.thread_budget - 1}",
            remedy="lower answer_reserve or raise thread_budget",
        )
    for name, least in (("max_threads", 0), ("max_turns", 1), ("max_depth", 1)):
        value = getattr(limits, name)
        if value is not None and value < least:
            raise InvalidRequest(
                f"{name} is too small",
                value=value,
                limit=f"{least} or more",
                remedy=f"raise {name}, or leave it out to take the service's",
            )
    return limits


def check_request(options: SessionOptions, request: OpenRequest) -> VersionPolicy:
    """Refuse a request that no episode can serve; return its version policy.

    Raises:
        InvalidRequest: An unknown primitive or version policy, another run, or a name that is too
            long.
    """
    for key, name in (("episode_id", request.episode_id), ("group_id", request.group_id)):
        if len(name) > _MAX_NAME_CHARS or not name.isprintable():
            raise InvalidRequest(
                f"the {key} cannot be used",
                value=f"{len(name)} characters: {name!r:.80}",
                limit=f"{_MAX_NAME_CHARS} printable characters",
                remedy="name it otherwise, by a hash if need be",
            )
    unknown = sorted(set(request.primitives) - set(PRIMITIVES))
    if unknown:
        raise InvalidRequest(
            "unknown primitive",
            value=", ".join(map(repr, unknown)),
            limit=", ".join(PRIMITIVES),
            remedy="name those that the model may call",
        )
    if request.run and request.run != options.run:
        raise InvalidRequest(
            "this replica serves another run",
            value=request.run,
            limit=options.run,
            remedy="connect to a replica of the run, or leave the run out",
        )
    if request.version_policy in ("", "keep"):
        return "keep"
    if request.version_policy == "refresh":
        return "refresh"
    raise InvalidRequest(
        "unknown version policy",
        value=request.version_policy,
        limit="keep, refresh",
        remedy="leave it out to keep the version that the episode began with",
    )
