"""What a turn appends before it samples: messages and notes, as far as the budget allows."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

from harness_sdk.errors import BudgetExhausted, InvalidRequest
from harness_sdk.types import Message, Role, SamplingOptions, ThreadStatus, ToolSchemas
from rollout_service.chat.tools import parse_tools, static_schemas
from rollout_service.sessions.appending import render
from rollout_service.sessions.episode import Episode
from rollout_service.sessions.threads import Note, Thread

# Below, logits over temperature leave float32's precision, and in the end its range: NaN.
_LEAST_TEMPERATURE = 1e-3


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnRequest:
    """What a turn is asked for."""

    messages: tuple[Message, ...] = ()
    tools_json: str = ""
    sampling: SamplingOptions = dataclasses.field(default_factory=SamplingOptions)
    demonstration: str | None = None
    with_events: bool = False
    """Whether the deltas tell what the reply turns out to say."""

    @property
    def stops(self) -> tuple[str, ...]:
        """Strings that end the reply."""
        return () if self.demonstration is not None else self.sampling.stop


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnPlan:
    """What a turn appends before it samples."""

    step: int
    """Number of the turn's step."""
    notes: list[Note]
    token_ids: tuple[int, ...]
    opening: tuple[int, ...]
    """What opens the model's turn behind them; empty with some templates."""
    tools: ToolSchemas
    sampling_limit: int


async def plan_turn(episode: Episode, thread: Thread, request: TurnRequest) -> TurnPlan:
    """What the turn that `request` asks for appends.

    Raises:
        BudgetExhausted: It does not fit.
        InvalidRequest: The request cannot be served.
    """
    tools = _tools(episode, thread, request)
    notes = [*thread.pending, *(Note(message=message) for message in request.messages)]
    if thread.head is None and not notes:
        raise InvalidRequest(
            "the first turn has no messages", value=0, limit="1 or more", remedy="give a prompt"
        )
    roster = episode.guardrails.roster_note(thread, list(episode.threads.values()))
    if roster is not None and thread.head is not None:
        notes.append(roster)
    token_ids = await _render(episode, thread, notes, tools)
    opening = _opening(episode, thread, notes)
    reserve = episode.guardrails.reserve_note(thread, len(token_ids) + len(opening))
    if reserve is not None:
        noticed = [*notes, reserve]
        with_notice = await _render(episode, thread, noticed, tools)
        after_notice = _opening(episode, thread, noticed)
        with contextlib.suppress(BudgetExhausted):
            episode.guardrails.check_cost(thread, len(with_notice) + len(after_notice), 1)
            notes, token_ids, opening = noticed, with_notice, after_notice
    cost = len(token_ids) + len(opening)
    try:
        episode.guardrails.check_cost(thread, cost, 1)
    except BudgetExhausted:
        thread.exhausted = ThreadStatus.BUDGET
        raise
    thread.exhausted = None
    in_reserve = thread.reserve_noted or reserve is not None
    limit = episode.guardrails.sampling_limit(thread, cost, in_reserve=in_reserve)
    step = thread.steps[-1]
    return TurnPlan(
        step=step.number if step.awaits_turn else step.number + 1,
        notes=notes,
        token_ids=token_ids,
        opening=opening,
        tools=tools,
        sampling_limit=limit,
    )


def _opening(episode: Episode, thread: Thread, notes: Sequence[Note]) -> tuple[int, ...]:
    # With nothing new the turn follows what its thread began with, a turn of its own, or a note
    # that was appended alone.
    before: Role = "tool"
    if notes:
        before = notes[-1].message.role
    elif thread.head is thread.base:
        before = thread.role_before
    elif thread.head is thread.steps[-1].turn:
        before = "assistant"
    return episode.service.chat.opening(before)


async def _render(
    episode: Episode, thread: Thread, notes: Sequence[Note], tools: ToolSchemas
) -> tuple[int, ...]:
    messages = [note.message for note in notes]
    if thread.head is None:
        listed = [*tools, *static_schemas(episode.request.primitives)]
        return await render(episode, messages, listed)
    return (*thread.due, *await render(episode, messages))


def _tools(episode: Episode, thread: Thread, request: TurnRequest) -> ToolSchemas:
    """The agent's tools; only a root's first turn may bring them."""
    if not request.tools_json:
        return thread.tools
    tools = parse_tools(request.tools_json)
    if thread.head is not None and tools != list(thread.tools):
        raise InvalidRequest(
            "the tool list is fixed by the root's first turn",
            value=", ".join(tool["function"]["name"] for tool in tools) or "no tools",
            limit=", ".join(tool["function"]["name"] for tool in thread.tools) or "no tools",
            remedy="leave tools out of later turns",
            episode_id=episode.episode_id,
            thread_id=thread.thread_id,
        )
    names = [tool["function"]["name"] for tool in tools]
    double = sorted({n for n in names if names.count(n) > 1 or n in episode.request.primitives})
    if double:
        raise InvalidRequest(
            "tool names are not unique",
            value=", ".join(double),
            limit="each name once; the service describes the primitives itself",
            remedy="rename the tool",
        )
    return tools


def check_sampling(episode: Episode, sampling: SamplingOptions) -> None:
    """Refuse what no engine samples by, or what cannot be trained on.

    Raises:
        InvalidRequest: An option is out of its range.
    """
    rules: tuple[tuple[str, bool, str], ...] = (
        ("max_tokens", sampling.max_tokens >= 1, "1 or more"),
        (
            "temperature",
            sampling.temperature == 0 or _LEAST_TEMPERATURE <= sampling.temperature <= 100,
            f"0 (greedy), or {_LEAST_TEMPERATURE} to 100",
        ),
        ("top_p", 0 < sampling.top_p <= 1, "above 0, at most 1"),
        ("top_k", sampling.top_k >= 0, "0 or more"),
    )
    for name, good, limit in rules:
        if not good:
            raise InvalidRequest(
                f"sampling.{name} is out of range",
                value=getattr(sampling, name),
                limit=limit,
                remedy=f"correct {name}, or leave the sampling options out",
            )
    structured = sampling.structured
    truncated = sampling.top_p < 1 or sampling.top_k > 0 or structured is not None
    if truncated and not episode.service.options.allow_truncated_sampling:
        raise InvalidRequest(
            "top_p, top_k and structured cannot be trained on: their mask is not recorded",
            value=f"top_p={sampling.top_p}, top_k={sampling.top_k}, "
            f"structured={structured.kind if structured is not None else None}",
            limit="top_p=1, top_k=0, structured=None",
            remedy="leave them out; for evaluation alone, serve with "
            "--limits.allow-truncated-sampling true",
        )
