"""What a reply turns out to say, piece by piece, and the whole that the pieces add up to."""

from __future__ import annotations

from collections.abc import Iterable
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
class CallFinished:
    """The end of the call begun last."""

    call: ToolCall


@dataclass(frozen=True, slots=True, kw_only=True)
class AllWasReasoning:
    """Reasoning ended that nothing had opened: all events before this one are void."""

    reasoning: str
    """What they stood for, as it was written."""


ReplyEvent = TextDelta | ReasoningDelta | CallBegun | CallFinished | AllWasReasoning


@dataclass(frozen=True, slots=True, kw_only=True)
class ParsedReply:
    """What a turn says, taken apart."""

    text: str
    """Without reasoning and calls."""
    reasoning: str
    tool_calls: tuple[ToolCall, ...]

    @classmethod
    def of(cls, events: Iterable[ReplyEvent]) -> ParsedReply:
        """The reply that `events` add up to."""
        text: list[str] = []
        reasoning: list[str] = []
        calls: list[ToolCall] = []
        for event in events:
            match event:
                case TextDelta():
                    text.append(event.text)
                case ReasoningDelta():
                    reasoning.append(event.text)
                case CallFinished():
                    calls.append(event.call)
                case AllWasReasoning():
                    text, reasoning, calls = [], [event.reasoning], []
                case CallBegun():
                    pass
        return cls(text="".join(text), reasoning="".join(reasoning), tool_calls=tuple(calls))
