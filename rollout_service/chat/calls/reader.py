"""Text that arrives in pieces, read from the front by generators that yield to wait for more.

What is read depends on the text alone, never on how it was cut into pieces.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Generator, Mapping
from typing import TypeVar

T = TypeVar("T")
Waiting = Generator[None, None, T]
"""Yields where it needs more text; returns what it read."""

_SPACE = re.compile(r"\s*")


class Fault(Exception):
    """What is wrong with a call that was read to its end."""


class Broken(Fault):
    """What is wrong with a call whose end is not known: reading goes on at the next marker."""


class Reader:
    """The text that has arrived and not been read."""

    def __init__(self) -> None:
        self.text = ""
        self.ended = False
        """No more text will arrive."""
        self.line_is_blank = True
        """Nothing but white space was read of the line that the text goes on with."""
        self._taken: list[str] = []

    def push(self, text: str) -> None:
        """Add text at the end."""
        self.text += text

    def take(self, size: int) -> str:
        """Read the next `size` characters."""
        taken, self.text = self.text[:size], self.text[size:]
        self._taken.append(taken)
        _, newline, line = taken.rpartition("\n")
        self.line_is_blank = (bool(newline) or self.line_is_blank) and not line.strip()
        return taken

    def taken(self) -> str:
        """Everything read so far."""
        return "".join(self._taken)


def pass_until(
    reader: Reader, write: Callable[[str], object], markers: tuple[str, ...]
) -> Waiting[str]:
    """Hand text to `write` as soon as it cannot be a marker, up to the first one.

    Returns:
        The marker, which stays unread; empty where the text ends before any.
    """
    pattern = _any_of(markers)
    while True:
        if found := pattern.search(reader.text):
            write(reader.take(found.start()))
            return found.group()
        held = 0 if reader.ended else _held(reader.text, markers)
        write(reader.take(len(reader.text) - held))
        if reader.ended:
            return ""
        yield


def skip_until(reader: Reader, *markers: str) -> Waiting[str]:
    """Like `pass_until`, but the text is dropped."""
    return (yield from pass_until(reader, len, markers))


def until(reader: Reader, wanted: str, *stops: str) -> Waiting[str]:
    """Read up to `wanted` and past it; nothing is read where it is missing.

    Raises:
        Broken: One of `stops` or the end of the text comes first.
    """
    markers = (wanted, *stops)
    pattern, seen = _any_of(markers), 0
    while not (found := pattern.search(reader.text, seen)):
        if reader.ended:
            raise Broken(f"the call was cut off before {_shown(wanted)}")
        seen = max(0, len(reader.text) - max(map(len, markers)))
        yield
    if found.group() != wanted:
        raise Broken(f"{_shown(wanted)} is missing before {_shown(found.group())}")
    text = reader.take(found.start())
    reader.take(len(wanted))
    return text


def until_closed(
    reader: Reader, closings: Mapping[str, tuple[str, ...]]
) -> Waiting[tuple[str, str]]:
    """Read a value that may hold its own closing tag.

    Args:
        reader: Where the value begins.
        closings: Tag to what follows it where it closes; a tag with anything else behind it, white
            space aside, is a part of the value.

    Returns:
        The value, and the tag that closed it and was read too.

    Raises:
        Broken: The text ends first; nothing was read.
    """
    pattern, at = _any_of(tuple(closings)), 0
    while True:
        found = pattern.search(reader.text, at)
        if found is None:
            if reader.ended:
                raise Broken(f"the call was cut off before {next(iter(closings))}")
            at = max(at, len(reader.text) - max(map(len, closings)))
            yield
            continue
        at = found.start()
        closes = _followed(reader, found.end(), closings[found.group()])
        if closes is None:
            yield
        elif closes:
            value = reader.take(at)
            return value, reader.take(len(found.group()))
        else:
            at = found.end()


def accept(reader: Reader, *markers: str) -> Waiting[str]:
    """Read the first of `markers` that comes next; empty where none does."""
    return reader.take(len((yield from comes(reader, *markers))))


def comes(reader: Reader, *markers: str) -> Waiting[str]:
    """The first of `markers` that comes next, unread; empty where none does."""
    while True:
        for marker in markers:
            if reader.text.startswith(marker):
                return marker
            if not reader.ended and marker.startswith(reader.text):
                break
        else:
            return ""
        yield


def spaces(reader: Reader) -> Waiting[None]:
    """Read white space."""
    while True:
        reader.take(_after_space(reader.text, 0))
        if reader.text or reader.ended:
            return
        yield


def closing(reader: Reader, end: tuple[str, ...], others: tuple[str, ...] = ()) -> Waiting[None]:
    """Read the end of a call.

    Args:
        reader: Behind the call's arguments.
        end: Markers that end a call; read.
        others: Markers that may follow without it; left unread.

    Raises:
        Broken: Other text comes first. The end of the text is an end, a marker's beginning too.
    """
    yield from spaces(reader)
    if (yield from accept(reader, *end)):
        return
    markers = (*end, *others)
    while not reader.text.startswith(others):
        if not any(marker.startswith(reader.text) for marker in markers):
            raise Broken(f"text stands between the call and {end[0]}")
        if reader.ended:
            reader.take(len(reader.text))
            return
        yield


def rest(reader: Reader) -> Waiting[str]:
    """Read everything to the end."""
    while not reader.ended:
        yield
    return reader.take(len(reader.text))


def _followed(reader: Reader, at: int, followers: tuple[str, ...]) -> bool | None:
    """Whether a follower, or the end of the text, comes at `at`; None while that is open."""
    at = _after_space(reader.text, at)
    if reader.text.startswith(followers, at):
        return True
    rest = reader.text[at : at + max(map(len, followers))]
    if not any(follower.startswith(rest) for follower in followers):
        return False
    return True if reader.ended else None


def _held(text: str, markers: tuple[str, ...]) -> int:
    """Length of the longest end of `text` that may become a marker."""
    for size in range(min(len(text), max(map(len, markers)) - 1), 0, -1):
        if any(marker.startswith(text[-size:]) for marker in markers):
            return size
    return 0


def _after_space(text: str, at: int) -> int:
    found = _SPACE.match(text, at)
    return found.end() if found is not None else at


def _shown(marker: str) -> str:
    return "the end of the line" if marker == "\n" else marker


@functools.cache
def _any_of(markers: tuple[str, ...]) -> re.Pattern[str]:
    return re.compile("|".join(re.escape(marker) for marker in markers))
