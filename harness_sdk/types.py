"""The data that an agent sees: messages, turns, budgets, results. No protobuf here."""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, Literal

from harness_sdk.errors import InvalidRequest

Role = Literal["system", "user", "assistant", "tool"]

PRIMITIVES: tuple[str, ...] = ("fork", "rewind", "read_thread", "wait", "done")
"""The branching tools, in the order in which the tool list names them."""

ROOT_THREAD = "root"
"""Id of an episode's first thread."""


class ThreadStatus(enum.StrEnum):
    """State of a thread; all but RUNNING and WAITING are final."""

    RUNNING = "running"
    WAITING = "waiting"
    DONE = "done"
    NO_DONE = "no_done"
    BUDGET = "budget"
    MAX_TURNS = "max_turns"
    CANCELLED = "cancelled"
    FAILED = "failed"

    @property
    def is_final(self) -> bool:
        """Whether the thread has ended."""
        return self not in (ThreadStatus.RUNNING, ThreadStatus.WAITING)


class StopReason(enum.StrEnum):
    """Why an episode ended. The policy's own failures score 0; the last four are infrastructure."""

    DONE = "done"
    NO_DONE = "no_done"
    BUDGET = "budget"
    MAX_TURNS = "max_turns"
    AGENT_ENDED = "agent_ended"
    CANCELLED = "cancelled"
    CLIENT_LOST = "client_lost"
    TOOL_ERROR = "tool_error"
    ENGINE_ERROR = "engine_error"

    @property
    def is_infrastructure(self) -> bool:
        """Whether the episode carries neither loss nor baseline (design.md section 10)."""
        return self in (
            StopReason.CANCELLED,
            StopReason.CLIENT_LOST,
            StopReason.TOOL_ERROR,
            StopReason.ENGINE_ERROR,
        )


FinishReason = Literal["stop", "length", "cancelled"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """One chat message.

    Example:
        `Message(role="tool", content="4 hits", name="search", tool_call_id="call_0")`
    """

    role: Role
    content: str
    name: str = ""
    """Tool that answered; only with role `tool`."""
    tool_call_id: str = ""
    """Call that this answers; only with role `tool`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolCall:
    """A tool call parsed from sampled text."""

    call_id: str
    name: str
    arguments: Mapping[str, Any]
    error: str = ""
    """What was wrong with the call; empty for a good one. `arguments` is empty then."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StructuredOutput:
    """What the text of a turn must be; one field is given.

    Tokens that lead elsewhere are masked before sampling, and the log-probabilities are those of
    what is left: evaluation, not training. Engines that cannot do it refuse.

    Example:
        `StructuredOutput(choice=("yes", "no"))`
    """

    json_schema: str = ""
    """A JSON schema as text."""
    regex: str = ""
    """A regular expression for the whole text."""
    choice: tuple[str, ...] = ()
    """Texts of which it is one."""
    grammar: str = ""
    """A grammar in EBNF with the rule `root`."""

    def __post_init__(self) -> None:
        given = self._given()
        if len(given) != 1:
            raise InvalidRequest(
                "a structured output has one constraint",
                value=", ".join(given) or "none",
                limit="json_schema, regex, choice or grammar",
                remedy="give one of them, or leave structured out",
            )

    @property
    def kind(self) -> str:
        """Name of the field that is given."""
        return self._given()[0]

    def _given(self) -> list[str]:
        return [entry.name for entry in fields(self) if getattr(self, entry.name)]


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingOptions:
    """How a turn is sampled. Log-probabilities are those of the distribution sampled from."""

    max_tokens: int = 1024
    """Tokens of a turn, the stop included."""
    temperature: float = 1.0
    """0 is greedy."""
    top_p: float = 1.0
    """Share of the probability that is kept; below 1 nothing can be trained on."""
    top_k: int = 0
    """0 keeps every token."""
    stop: tuple[str, ...] = ()
    """Strings that end the turn; the text keeps them out, the tokens keep them in."""
    seed: int | None = None
    """None draws one."""
    structured: StructuredOutput | None = None
    """None leaves the text free."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Budgets of an episode (design.md section 4). None takes the server's default."""

    thread_budget: int | None = None
    """Tokens that a thread may append; inherited prefix and mounts are free."""
    answer_reserve: int | None = None
    """Tokens of the budget that only `done` may use."""
    max_threads: int | None = None
    """Children per episode; 0 refuses every fork and leaves the prompts as they are."""
    max_depth: int | None = None
    """Forks below the root; None or 0 for no limit."""
    max_turns: int | None = None
    """Model turns per thread."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Budget:
    """What is left to a thread after a call."""

    tokens_used: int
    tokens_left: int
    """The answer reserve included."""
    turns_left: int
    threads_left: int
    """Children that the episode may still fork."""
    reserve_reached: bool = False
    """Only `done` is allowed from here on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """One model turn."""

    step: int
    """1 for the thread's first turn."""
    text: str
    """Without reasoning and tool calls."""
    reasoning: str
    tool_calls: tuple[ToolCall, ...]
    raw_text: str
    """Everything that was sampled, as it reads, without the stop token."""
    finish_reason: FinishReason
    token_ids: tuple[int, ...]
    """Sampled ids, the stop id included."""
    sampled_logprobs: tuple[float, ...]
    """Nats, one for each of `token_ids`."""
    policy_version: int
    budget: Budget
    thread_ended: ThreadStatus | None = None
    """Set where the guardrails ended the thread with this turn."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepSummary:
    """One line of a finished thread's manifest."""

    step: int
    num_tokens: int
    summary: str


@dataclass(frozen=True, slots=True, kw_only=True)
class BranchResult:
    """How a branch ended, as `wait` returns it."""

    thread_id: str
    status: ThreadStatus
    answer: str = ""
    evidence: str = ""
    summary: str = ""
    steps: tuple[StepSummary, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadResult:
    """What `read_thread` mounted."""

    branch: str
    first_step: int
    """After clamping to the source's finished steps."""
    last_step: int
    tokens_mounted: int
    """Newly visible tokens; 0 where everything was visible before."""
    next_position: int
    stub: str
    """What the model sees of it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RewindResult:
    """What `rewind` returned to the budget and which children it cancelled."""

    step: int
    tokens_returned: int
    cancelled_threads: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class EpisodeResult:
    """What closing an episode left behind."""

    stop_reason: StopReason
    entry_id: str
    """Position in the episode stream; empty without a stream."""
    num_nodes: int
    num_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerInfo:
    """What the handshake told."""

    replica_id: str
    run: str
    model: str
    engine: str
    max_message_bytes: int
    policy_versions: tuple[int, ...]
    max_positions: int
    limits: Limits


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerStatus:
    """A replica's state at one moment: `kv_use` is the share of `tokens_capacity` that is taken,
    from 0 to 1, and `metrics` holds sums since the start by area/name."""

    replica_id: str
    run: str
    engine: str
    model: str
    open_episodes: int
    queued_episodes: int
    live_threads: int
    resident_cursors: int
    recurrent_slots: int
    tokens_resident: int
    tokens_capacity: int
    kv_use: float
    policy_versions: tuple[int, ...]
    uptime_s: float
    metrics: Mapping[str, float] = field(default_factory=dict[str, float])


ToolSchema = Mapping[str, Any]
"""A function schema: `{"type": "function", "function": {"name", "description", "parameters"}}`."""

ToolSchemas = Sequence[ToolSchema]
