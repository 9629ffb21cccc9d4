"""A turn's text as a client is shown it: while it is sampled, or whole at the end."""

from __future__ import annotations

from collections.abc import Sequence

from harness_sdk.deltas import (
    AllWasReasoning,
    ReasoningDelta,
    ReplyEvent,
    TextDelta,
    TokenDelta,
)
from harness_sdk.types import Turn
from rollout_service.openai.ask import Said

_THOUGHT = "</think>"


class ReplyText:
    """What a client has been shown of a turn; without events nothing before the end."""

    def __init__(self) -> None:
        self.content = ""
        self.reasoning = ""
        self._void = ""
        """Content that turned out to be reasoning."""

    def push(self, delta: TokenDelta) -> Said:
        """What `delta` lets be shown."""
        content, reasoning = len(self.content), len(self.reasoning)
        for event in delta.events:
            self._show(event)
        return Said(
            content=self.content[content:],
            reasoning=self.reasoning[reasoning:],
            tokens=tuple((delta.text, value) for value in delta.sampled_logprobs),
        )

    def finish(self, content: str, reasoning: str) -> Said:
        """The rest of a turn that says `content` after `reasoning`."""
        content = self._void + content
        if not content.startswith(self.content):
            content = self.content
        if not reasoning.startswith(self.reasoning):
            reasoning = self.reasoning
        rest = Said(
            content=content[len(self.content) :], reasoning=reasoning[len(self.reasoning) :]
        )
        self.content, self.reasoning = content, reasoning
        return rest

    def _show(self, event: ReplyEvent) -> None:
        if isinstance(event, TextDelta):
            self.content += event.text
        elif isinstance(event, ReasoningDelta):
            self.reasoning += event.text
        elif isinstance(event, AllWasReasoning):
            # A client cannot unsee what it was shown as text; the rest goes on below it.
            self.content += "\n" if self.content else ""
            self._void = self.content
            self.reasoning += "" if self.reasoning else event.reasoning


def plain_content(turn: Turn, stops: Sequence[str]) -> str:
    """A turn's text with what reads like a call left in it: nobody carries it out."""
    cuts = [at for stop in stops if stop and (at := turn.raw_text.find(stop)) >= 0]
    raw = turn.raw_text[: min(cuts)] if cuts else turn.raw_text
    _, closed, after = raw.partition(_THOUGHT)
    return (after if closed else raw).strip()
