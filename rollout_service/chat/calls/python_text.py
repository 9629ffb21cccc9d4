"""Keyword arguments written as Python's literals: where they end, and what they hold."""

from __future__ import annotations

import re
from typing import Any, NoReturn

from rollout_service.chat.calls.reader import Broken, Fault, Reader, Waiting
from rollout_service.chat.nesting import MAX_DEPTH

_CLOSERS = {"(": ")", "[": "]", "{": "}"}
# Between strings and brackets stand names, numbers and separators; what else stands there has
# lost a quote.
_PLAIN = re.compile(r"[\s\w.,:=+\-]*")
_STRING_PART = re.compile(r"""[^\\'"]*""")
_KEYWORD = re.compile(r"\s*([^\W\d][\w.\-]*)\s*=")
_WORD = re.compile(r"[\w.+\-]+")
_SPACE = re.compile(r"\s*")
_WORDS: dict[str, Any] = {
    "True": True,
    "False": False,
    "None": None,
    # JSON's, which models write too.
    "true": True,
    "false": False,
    "null": None,
}
_NUMBER = re.compile(r"[+\-]?(?:[0-9]+(?:_[0-9]+)*\.?[0-9]*|\.[0-9]+)(?:[eE][+\-]?[0-9]+)?")
_ESCAPE = re.compile(
    r"\\(?:\n|[\\'\"abfnrtv]|[0-7]{1,3}|x[0-9a-fA-F]{2}|u[0-9a-fA-F]{4}|U[0-9a-fA-F]{8})"
)
_ESCAPES = {
    "\n": "", "\\": "\\", "'": "'", '"': '"', "a": "\a", "b": "\b", "f": "\f", "n": "\n",
    "r": "\r", "t": "\t", "v": "\v",
}  # fmt: skip


def arguments_text(reader: Reader) -> Waiting[str]:
    """Read up to the parenthesis that closes the call and past it.

    Raises:
        Broken: They are no literals, or cut off; nothing was read.
    """
    end = _End()
    while not end.find(reader.text):
        if reader.ended:
            raise Broken("the call was cut off before its )")
        yield
    return reader.take(end.at)[:-1]


def keyword_arguments(text: str) -> dict[str, Any]:
    """The values in `text`, as `q="a", n=[1, None]`; line breaks may stand in strings.

    Raises:
        Fault: It is something else.
    """
    literals, found = _Literals(text), dict[str, Any]()
    while not literals.is_at_end():
        name = literals.keyword()
        if name in found:
            raise Fault(f"the argument {name[:40]} is given twice")
        found[name] = literals.value()
        if not literals.accept(",") and not literals.is_at_end():
            literals.refuse("a comma is missing")
    return found


class _End:
    """Looks for the closing parenthesis in text that grows; each character is read once."""

    def __init__(self) -> None:
        self.at = 0
        self._open = [")"]
        self._quote = ""

    def find(self, text: str) -> bool:
        """Whether it is there; then it stands before `at`.

        Raises:
            Broken: No text behind this one could bring it.
        """
        while self._open and self.at < len(text):
            step = self._in_string(text) if self._quote else self._outside(text)
            if not step:
                break
            self.at += step
        return not self._open

    def _in_string(self, text: str) -> int:
        """Characters that can be passed; 0 where that depends on what follows."""
        plain = _end_of(_STRING_PART, text, self.at) - self.at
        if plain:
            return plain
        if text[self.at] == "\\":
            return 2 if len(text) > self.at + 1 else 0
        rest = text[self.at : self.at + len(self._quote)]
        if self._quote == rest:
            self._quote = ""
            return len(rest)
        return 0 if self._quote.startswith(rest) else 1

    def _outside(self, text: str) -> int:
        plain = _end_of(_PLAIN, text, self.at) - self.at
        if plain:
            return plain
        character = text[self.at]
        if character in "'\"":
            return self._open_string(text, character)
        if character in _CLOSERS:
            self._open.append(_CLOSERS[character])
            if len(self._open) > MAX_DEPTH:
                raise Broken(f"the call is nested too deeply: more than {MAX_DEPTH} levels")
        elif self._open.pop() != character:
            raise Broken(f"the call is no Python: {character!r} at character {self.at}")
        return 1

    def _open_string(self, text: str, quote: str) -> int:
        rest = text[self.at : self.at + 3]
        if rest == quote * 2 or rest == quote:
            # One more character tells whether it is empty, or opens three times.
            return 0
        self._quote = quote * 3 if rest == quote * 3 else quote
        if rest.startswith(quote * 2) and len(self._quote) == 1:
            self._quote = ""
            return 2
        return len(self._quote)


class _Literals:
    """Literals read from the front; brackets in them match, and no deeper than `MAX_DEPTH`."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._at = _end_of(_SPACE, text, 0)

    def is_at_end(self) -> bool:
        """Whether nothing is left."""
        return self._at == len(self._text)

    def refuse(self, why: str) -> NoReturn:
        """What stands here is wrong."""
        raise Fault(f"the call's arguments are no KEY=VALUE: {why} at character {self._at}")

    def accept(self, mark: str) -> bool:
        """Read `mark` where it comes next."""
        if not self._text.startswith(mark, self._at):
            return False
        self._pass(len(mark))
        return True

    def keyword(self) -> str:
        """`name=`."""
        found = _KEYWORD.match(self._text, self._at)
        if found is None:
            self.refuse("no KEY=")
        self._pass(found.end() - self._at)
        return found[1]

    def value(self) -> Any:
        """Whatever stands here."""
        character = self._text[self._at : self._at + 1]
        if character and character in "'\"":
            return self._string(character)
        if self.accept("["):
            return self._items("]")[0]
        if self.accept("("):
            items, is_list = self._items(")")
            return items if is_list else items[0]
        if self.accept("{"):
            return self._dict()
        return self._word()

    def _pass(self, size: int) -> None:
        self._at = _end_of(_SPACE, self._text, self._at + size)

    def _items(self, closer: str) -> tuple[list[Any], bool]:
        """Items up to `closer`, and whether that makes a list: a single one in parentheses and
        without a comma is itself."""
        items: list[Any] = []
        separated = True
        while not self.accept(closer):
            if not separated:
                self.refuse("a comma is missing")
            items.append(self.value())
            separated = self.accept(",")
        return items, closer == "]" or len(items) != 1 or separated

    def _dict(self) -> dict[str, Any]:
        found: dict[str, Any] = {}
        separated = True
        while not self.accept("}"):
            if not separated:
                self.refuse("a comma is missing")
            key = self.value()
            if not isinstance(key, str):
                self.refuse("a dict's key is no text")
            if not self.accept(":"):
                self.refuse("a colon is missing")
            found[key] = self.value()
            separated = self.accept(",")
        return found

    def _word(self) -> Any:
        found = _WORD.match(self._text, self._at)
        word = found.group() if found is not None else ""
        if word not in _WORDS and not _NUMBER.fullmatch(word):
            self.refuse("no value")
        try:
            value = _WORDS[word] if word in _WORDS else _number(word)
        except ValueError as error:
            raise Fault(f"a number is too long: {len(word)} digits") from error
        self._pass(len(word))
        return value

    def _string(self, quote: str) -> str:
        mark = quote * 3 if self._text.startswith(quote * 3, self._at) else quote
        start = end = self._at + len(mark)
        while not self._text.startswith(mark, end):
            if end >= len(self._text):
                self.refuse("a string without an end")
            end += 2 if self._text[end] == "\\" else 1
        self._pass(end + len(mark) - self._at)
        text = _ESCAPE.sub(_escaped, self._text[start:end])
        # JSON's way to write one character as two escapes.
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "surrogatepass")


def _escaped(found: re.Match[str]) -> str:
    rest = found.group()[1:]
    if rest in _ESCAPES:
        return _ESCAPES[rest]
    base, digits = (8, rest) if rest[0] in "01234567" else (16, rest[1:])
    number = int(digits, base)
    return chr(number) if number <= 0x10FFFF else found.group()


def _number(word: str) -> int | float:
    return float(word) if {".", "e", "E"} & set(word) else int(word)


def _end_of(pattern: re.Pattern[str], text: str, at: int) -> int:
    found = pattern.match(text, at)
    return found.end() if found is not None else at
