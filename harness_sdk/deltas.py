"""What a turn says while it is sampled: tokens as they come, and what they turn out to mean."""

from __future__ import annotations

from dataclasses import dataclass

from harness_sdk.types import ToolCall


@dataclass(frozen=True, slots=True, kw_only=True)
class TextDelta:
    """More of the text."""

    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ReasoningDelta:
    """More of the reasoning."""

    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class CallBegun:
    """A call whose name is known; its arguments may still be on their way."""

    name: str
    """That of the finished call; empty where a bad call does not say it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CallArguments:
    """More of the arguments of the call begun last, as JSON.

    Models that write JSON are followed character by character; of the others each argument comes
    when it is whole, or all of them with the end of the call. `CallFinished` is what counts.
    """

    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class CallFinished:
    """The end of the call begun last."""

    call: ToolCall


@dataclass(frozen=True, slots=True, kw_only=True)
class AllWasReasoning:
    """Reasoning ended that nothing had opened: all events before this one are void."""

    reasoning: str
    """What they stood for, as it was written."""


ReplyEvent = TextDelta | ReasoningDelta | CallBegun | CallArguments | CallFinished | AllWasReasoning
"""What a part of a reply turns out to be; those of a turn add up to it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenDelta:
    """What a turn sampled since the delta before."""

    token_ids: tuple[int, ...]
    sampled_logprobs: tuple[float, ...]
    """Nats, one for each of `token_ids`."""
    text: str
    events: tuple[ReplyEvent, ...] = ()
    """What the reply turns out to say, of a turn that is streamed; those of all deltas add up to
    its text, reasoning and calls."""
