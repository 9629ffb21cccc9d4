"""The order that most families share: reasoning in tags, text, and calls behind markers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from rollout_service.chat.calls.output import Call, Output
from rollout_service.chat.calls.reader import (
    Broken,
    Fault,
    Reader,
    Waiting,
    accept,
    pass_until,
    skip_until,
    spaces,
)

Parse = Callable[[Reader, Output, bool], Waiting[None]]
"""Reads a whole reply; the flag says that the prompt left it inside reasoning."""

ReadCall = Callable[[Reader, Output], Waiting[None]]
"""Reads a call, its marker first, which comes next."""

THINK = {"<think>": "</think>"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """A way in which models write calls."""

    name: str
    parse: Parse
    taught_by: tuple[str, ...]
    """Text of which a chat template that teaches the family holds one."""
    reasoning: Mapping[str, str]
    """What opens reasoning, to what closes it."""


def tagged(
    calls: Mapping[str, ReadCall],
    *,
    reasoning: Mapping[str, str] = THINK,
    dropped: Iterable[str] = (),
) -> Parse:
    """The parser of a family whose calls begin with markers.

    Args:
        calls: Marker to what reads a call.
        reasoning: Opening to closing tag.
        dropped: Markers that say nothing.
    """
    unsaid, closers = tuple(dropped), tuple(reasoning.values())

    def parse(reader: Reader, out: Output, in_reasoning: bool) -> Waiting[None]:
        if in_reasoning:
            yield from spaces(reader)
            # Some models open once more what the prompt opened.
            yield from accept(reader, *reasoning)
            yield from _reason(reader, out, closers)
        settled = in_reasoning
        while True:
            markers = (*calls, *reasoning, *unsaid, *(() if settled else closers))
            marker = yield from pass_until(reader, out.text, markers)
            if not marker:
                return
            if marker in calls:
                yield from calls[marker](reader, out)
                continue
            before = reader.taken() if marker in closers else ""
            reader.take(len(marker))
            reader.line_is_blank = True
            if marker in closers:
                out.all_was_reasoning(before)
            elif marker in reasoning:
                yield from _reason(reader, out, (reasoning[marker],))
            settled = settled or marker not in unsaid

    return parse


def read_call(
    reader: Reader,
    call: Call,
    read: Callable[[Reader, Call], Waiting[None]],
    *,
    end: tuple[str, ...],
    others: tuple[str, ...] = (),
) -> Waiting[None]:
    """Read one call; behind a broken one go on at the next marker.

    Args:
        reader: Behind what opened the call.
        call: The call.
        read: Reads it to its end and finishes it.
        end: Markers that end a broken call; read.
        others: Markers at which other things begin; left unread.
    """
    try:
        yield from read(reader, call)
    except Broken as fault:
        call.fail(fault)
        yield from leave_broken(reader, end, others)
    except Fault as fault:
        call.fail(fault)


def leave_broken(reader: Reader, end: tuple[str, ...], others: tuple[str, ...]) -> Waiting[None]:
    """Drop text up to a marker, one of `end` included."""
    marker = yield from skip_until(reader, *end, *others)
    if marker in end:
        reader.take(len(marker))


def _reason(reader: Reader, out: Output, closers: tuple[str, ...]) -> Waiting[None]:
    """Reasoning to its end; one that never ends holds no calls."""
    out.reasoning("\n")
    marker = yield from pass_until(reader, out.reasoning, closers)
    reader.take(len(marker))
    reader.line_is_blank = True
