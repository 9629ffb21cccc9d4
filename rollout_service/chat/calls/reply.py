"""The whole that the events of a reply add up to."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from harness_sdk.deltas import (
    AllWasReasoning,
    CallArguments,
    CallBegun,
    CallFinished,
    ReasoningDelta,
    ReplyEvent,
    TextDelta,
)
from harness_sdk.types import ToolCall


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
                case CallBegun() | CallArguments():
                    pass
        return cls(text="".join(text), reasoning="".join(reasoning), tool_calls=tuple(calls))
