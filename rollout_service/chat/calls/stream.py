"""A reply read as it is sampled; reading it whole is the same stream, pushed once."""

from __future__ import annotations

from collections.abc import Collection

from harness_sdk.deltas import ReplyEvent
from harness_sdk.types import ToolSchemas
from rollout_service.chat.calls.families import FAMILIES
from rollout_service.chat.calls.output import Output
from rollout_service.chat.calls.reader import Reader
from rollout_service.chat.calls.reply import ParsedReply

# Characters: the reader copies what it has not read each time that it reads a little.
_PIECE = 4096


class ReplyStream:
    """Takes a reply apart while it arrives. Nothing that a model wrote makes it raise.

    However the text is cut, the events add up to the same `ParsedReply.of(events)`.

    Args:
        family: Name of one of `FAMILIES`.
        step: The turn's step; part of each call's id.
        tools: Schemas of the tools that the model knows: they give types to arguments that are
            written without any.
        in_reasoning: The generation prompt opened reasoning.
        taken: Ids of earlier calls of the thread. A call keeps the id that the model wrote, where
            its family writes one and it is not taken.

    Raises:
        ValueError: There is no such family.
    """

    def __init__(
        self,
        family: str,
        step: int,
        *,
        tools: ToolSchemas = (),
        in_reasoning: bool = False,
        taken: Collection[str] = (),
    ) -> None:
        if family not in FAMILIES:
            raise ValueError(f"no family {family!r} of tool calls; one of {', '.join(FAMILIES)}")
        self._reader = Reader()
        self._out = Output(step, tools, taken)
        self._parser = FAMILIES[family].parse(self._reader, self._out, in_reasoning)

    def push(self, text: str) -> list[ReplyEvent]:
        """The events that `text` completes."""
        # Half of a surrogate pair is no text; nothing behind could send it on.
        text = text.encode("utf-8", "replace").decode("utf-8")
        for start in range(0, len(text), _PIECE):
            self._reader.push(text[start : start + _PIECE])
            next(self._parser, None)
        return self._out.drain()

    def finish(self) -> list[ReplyEvent]:
        """The events that the end of the reply completes."""
        self._reader.ended = True
        next(self._parser, None)
        return self._out.drain()


def parse_reply(
    raw: str,
    *,
    family: str,
    step: int,
    tools: ToolSchemas = (),
    in_reasoning: bool = False,
    taken: Collection[str] = (),
) -> ParsedReply:
    """Split a turn into reasoning, text and calls.

    Args:
        raw: Everything sampled, without the stop token.
        family: Name of one of `FAMILIES`.
        step: The turn's step; part of each call's id.
        tools: Schemas of the tools that the model knows.
        in_reasoning: The generation prompt opened reasoning.
        taken: Ids of earlier calls of the thread.

    Raises:
        ValueError: There is no such family.
    """
    stream = ReplyStream(family, step, tools=tools, in_reasoning=in_reasoning, taken=taken)
    return ParsedReply.of([*stream.push(raw), *stream.finish()])
