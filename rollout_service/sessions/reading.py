"""A turn's reply taken apart, while it is sampled or whole: one way for both."""

from __future__ import annotations

import json
from collections.abc import Sequence

from harness_sdk.deltas import (
    CallArguments,
    CallBegun,
    CallFinished,
    ReasoningDelta,
    ReplyEvent,
    TextDelta,
    TokenDelta,
)
from harness_sdk.types import ToolSchemas, Turn
from rollout_service.chat.calls import ParsedReply, ReplyStream, opens_reasoning
from rollout_service.chat.tools import PRIMITIVE_SCHEMAS
from rollout_service.sessions.episode import Episode
from rollout_service.sessions.threads import Thread


class ReplyReader:
    """Takes a reply apart up to the first of the strings that stop it.

    Args:
        replies: What takes text apart.
        stops: Strings that end the turn; what they end holds none of them.
    """

    def __init__(self, replies: ReplyStream, stops: Sequence[str] = ()) -> None:
        self._replies = replies
        self._stops = tuple(stop for stop in stops if stop)
        self._held = ""
        self._is_stopped = False

    def push(self, text: str) -> tuple[ReplyEvent, ...]:
        """The events that `text` completes."""
        return tuple(self._replies.push(self._before_stop(text)))

    def finish(self) -> tuple[ReplyEvent, ...]:
        """The events that the end of the reply completes."""
        rest = "" if self._is_stopped else self._held
        return (*self._replies.push(rest), *self._replies.finish())

    def _before_stop(self, text: str) -> str:
        """What is surely before a stop; a stop that came is held for good."""
        if self._is_stopped:
            return ""
        text = self._held + text
        cuts = [at for stop in self._stops if (at := text.find(stop)) >= 0]
        self._is_stopped = bool(cuts)
        ready = min(cuts) if cuts else len(text) - _open_end(text, self._stops)
        self._held = text[ready:]
        return text[:ready]


def reply_reader(
    episode: Episode,
    thread: Thread,
    *,
    tools: ToolSchemas,
    step: int,
    opening: Sequence[int],
    stops: Sequence[str],
) -> ReplyReader:
    """What takes the reply of a turn apart.

    Args:
        episode: The episode.
        thread: The thread.
        tools: The agent's own.
        step: Of the turn.
        opening: Tokens that open it.
        stops: Strings that end it.
    """
    chat = episode.service.chat
    primitives = [PRIMITIVE_SCHEMAS[name] for name in episode.request.primitives]
    replies = ReplyStream(
        chat.call_format,
        step,
        tools=[*tools, *primitives],
        in_reasoning=opens_reasoning(chat.tokenizer.decode(opening), family=chat.call_format),
        taken=thread.call_ids(),
    )
    return ReplyReader(replies, stops)


def parsed(reader: ReplyReader, raw: str) -> ParsedReply:
    """The whole reply `raw`, which nothing was read of."""
    return ParsedReply.of([*reader.push(raw), *reader.finish()])


def whole_delta(turn: Turn, *, with_events: bool) -> TokenDelta:
    """A turn as one delta, for a caller that comes after its own were emitted."""
    return TokenDelta(
        token_ids=turn.token_ids,
        sampled_logprobs=turn.sampled_logprobs,
        text=turn.raw_text,
        events=_events(turn) if with_events else (),
    )


def _events(turn: Turn) -> tuple[ReplyEvent, ...]:
    events: list[ReplyEvent] = []
    if turn.reasoning:
        events.append(ReasoningDelta(text=turn.reasoning))
    if turn.text:
        events.append(TextDelta(text=turn.text))
    for call in turn.tool_calls:
        events.append(CallBegun(name=call.name))
        if not call.error:
            text = json.dumps(dict(call.arguments), ensure_ascii=False)
            events.append(CallArguments(text=text))
        events.append(CallFinished(call=call))
    return tuple(events)


def _open_end(text: str, stops: tuple[str, ...]) -> int:
    """Length of the longest end of `text` that one of `stops` begins with."""
    longest = min(len(text), max((len(stop) for stop in stops), default=1) - 1)
    sizes = range(longest, 0, -1)
    return next((n for n in sizes if any(stop.startswith(text[-n:]) for stop in stops)), 0)
