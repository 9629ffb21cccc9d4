"""What a completion is asked for, whichever endpoint it came through, and what comes back."""

from __future__ import annotations

from dataclasses import dataclass

from harness_sdk.types import SamplingOptions, ToolCall, Turn
from rollout_service.openai.messages import ChatMessage


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionNames:
    """Where an agent's requests belong."""

    session: str = ""
    """Empty finds the conversation by its history."""
    task: str = ""
    group: str = ""
    owner: str = ""
    """Whose token the request carries: nobody finds another's conversation."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """One completion to take."""

    messages: tuple[ChatMessage, ...]
    """The history; with `previous` only what is new."""
    tools_json: str = ""
    """The request's tool list, laid out in one way; empty where it brought none."""
    calls_allowed: bool = False
    """Whether what reads like a call is one: there are tools and the choice is not `none`."""
    parallel_calls: bool = True
    streams: bool = False
    """Whether text is shown before the turn ends."""
    sampling: SamplingOptions
    names: SessionNames
    previous: str = ""
    """Id of the response that this continues."""
    instructions: str | None = None
    """The Responses API's system text, which is also the first of `messages`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Placed:
    """The request has its place in a session."""

    session: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Said:
    """What a turn said since the last one."""

    content: str = ""
    reasoning: str = ""
    tokens: tuple[tuple[str, float], ...] = ()
    """Text and log-probability (nats) of each sampled token."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """A finished completion; its content and reasoning are those of every `Said` together."""

    session: str
    thread_id: str
    message: ChatMessage
    reasoning: str
    bad_calls: tuple[ToolCall, ...]
    """Calls that no client could carry out, with what is wrong about them."""
    turn: Turn
    prompt_tokens: int
    cached_tokens: int
    """Of the prompt, those that were in the tree before this request."""

    @property
    def finish_reason(self) -> str:
        """In OpenAI's words."""
        if self.message.tool_calls and self.turn.finish_reason == "stop":
            return "tool_calls"
        return "stop" if self.turn.finish_reason == "stop" else "length"
