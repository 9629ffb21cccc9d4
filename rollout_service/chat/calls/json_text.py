"""JSON in a reply: where it ends, what it holds, and the calls written in it."""

from __future__ import annotations

import json
import re
from typing import Any

from rollout_service.chat.calls.output import Call, Output
from rollout_service.chat.calls.reader import Broken, Fault, Reader, Waiting, accept, spaces
from rollout_service.chat.nesting import MAX_DEPTH, is_too_deep

_CLOSERS = {"{": "}", "[": "]"}
_TOO_DEEP = f"the call's JSON is nested too deeply: more than {MAX_DEPTH} levels"
_STRING = re.compile(r'[^"\\]*(?:\\.[^"\\]*)*', re.DOTALL)
# Between strings and brackets stand numbers, true, false, null and separators. Markers of calls
# have other characters, so that JSON which lost a quote or a bracket ends at the next one.
_PLAIN = re.compile(r"[\s:,+\-.0-9Eaeflnrstu]*")
# Characters of the JSON in which its name is looked for while the rest is on its way.
_MAX_HEAD = 1000
# What stands between a call's name, its first key, and its arguments.
_ARGUMENTS_NEXT = re.compile(r'(?:\s*,\s*"(?:arguments|parameters)"\s*:)?\s*(?=\{)')
# Without what only a lost quote brings into a name.
_NAME_FIRST = re.compile(r'\{\s*"name"\s*:\s*"([^"\\<>{}\x00-\x1f]{1,200})"')


def json_text(
    reader: Reader, call: Call, name: re.Pattern[str] | None = _NAME_FIRST
) -> Waiting[str]:
    """Read one object, array or string; nothing but white space is read where it is broken.

    Args:
        reader: Where it begins.
        call: Begun as soon as the JSON shows its name, and told its arguments as they come.
        name: How the JSON shows it; None where the arguments alone are JSON.

    Raises:
        Broken: It is no JSON, or cut off.
    """
    yield from spaces(reader)
    end, arguments = _End(), _Arguments(call, name)
    while True:
        if name is not None and not call.name:
            found = name.match(reader.text, 0, _MAX_HEAD)
            if found is not None and found[1].strip():
                call.begin(found[1])
        try:
            is_whole = end.find(reader.text)
        finally:
            arguments.tell(reader.text[: end.at])
        if is_whole:
            return reader.take(end.at)
        if reader.ended:
            raise Broken(
                "the call was cut off " + ("inside" if reader.text else "before") + " its JSON"
            )
        yield


def loads(text: str) -> Any:
    """The value of `text`.

    Raises:
        Fault: It has none.
    """
    try:
        value = json.loads(text, parse_constant=_refuse)
    except json.JSONDecodeError as error:
        what = f"{error.msg} at character {error.pos}"
        raise Fault(f"the call is no valid JSON: {what}") from error
    except (ValueError, RecursionError) as error:
        raise Fault(f"the call is no valid JSON: {error}") from error
    if is_too_deep(value):
        raise Fault(_TOO_DEEP)
    return value


def finish_object(call: Call, text: str, *, own_id: re.Pattern[str] | None = None) -> None:
    """Finish a call that is one JSON object with its name and arguments in it.

    Args:
        call: The call.
        text: The object.
        own_id: What its "id" looks like where models write one; None where they do not.

    Raises:
        Fault: It is none.
    """
    body = loads(text)
    if not isinstance(body, dict):
        raise Fault("the call is no JSON object")
    if isinstance(body.get("function"), dict):
        body = body["function"]
    name = body.get("name")
    if not isinstance(name, str) or not name.strip():
        raise Fault('the call has no "name"')
    call.begin(name)
    call_id = body.get("id")
    if own_id is not None and isinstance(call_id, str) and own_id.fullmatch(call_id):
        call.named_by_model(call_id)
    key = "parameters" if "arguments" not in body and "parameters" in body else "arguments"
    beside = sorted(body.keys() - {"name", "type", "id", key})
    if key not in body and beside:
        raise Fault(f'"arguments" is missing, and the call has {", ".join(beside)[:100]} instead')
    call.finish(_as_object(body.get(key), f'"{key}"'))


def finish_arguments(call: Call, text: str) -> None:
    """Finish a call whose arguments alone are JSON; none at all are empty.

    Raises:
        Fault: They are no JSON object.
    """
    call.finish(_as_object(loads(text) if text else None, "the arguments"))


def arguments_text(
    reader: Reader, call: Call, ends: tuple[str, ...], *, may_be_cut: bool = False
) -> Waiting[str]:
    """Read a call's arguments; empty where an end marker comes at once.

    Args:
        reader: Behind the call's name.
        call: The call.
        ends: Markers that end it.
        may_be_cut: The end of the text is an end too.

    Raises:
        Broken: They are no JSON, or cut off.
    """
    yield from spaces(reader)
    while not reader.text.startswith(ends):
        if not any(end.startswith(reader.text) for end in ends):
            return (yield from json_text(reader, call, None))
        if reader.ended and may_be_cut:
            break
        if reader.ended:
            raise Broken("the call was cut off before its arguments")
        yield
    return ""


def call_list(
    reader: Reader, out: Output, form: str, *, own_id: re.Pattern[str] | None = None
) -> Waiting[bool]:
    """Read `[{...}, {...}]`, or one object without brackets, as calls.

    Args:
        reader: Where they begin.
        out: Where they go.
        form: How they are written, for the model that wrote one wrong.
        own_id: What a call's "id" looks like where models write one.

    Returns:
        Whether its end was found; else what follows is not known.
    """
    yield from spaces(reader)
    listed = yield from accept(reader, "[")
    while True:
        yield from spaces(reader)
        if listed and (yield from accept(reader, "]")):
            return True
        call = out.call(form)
        try:
            finish_object(call, (yield from json_text(reader, call)), own_id=own_id)
        except Broken as fault:
            call.fail(fault)
            return False
        except Fault as fault:
            call.fail(fault)
        if not listed:
            return True
        yield from spaces(reader)
        separated = yield from accept(reader, ",", "]")
        if separated != ",":
            return True


class _Arguments:
    """Tells a call its arguments while they come.

    Args:
        call: The call.
        name: How the JSON shows its name; None where it is the arguments themselves.
    """

    def __init__(self, call: Call, name: re.Pattern[str] | None) -> None:
        self._call = call
        self._name = name
        self._end: _End | None = None
        self._told = 0
        self._is_over = False

    def tell(self, text: str) -> None:
        """Tell what is new of `text`, which is whole or the beginning of a whole."""
        if self._end is None:
            self._begin(text)
        if self._end is not None and self._call.name and not self._is_over:
            self._is_over = self._end.find(text)
            self._call.tell(text[self._told : self._end.at])
            self._told = self._end.at

    def _begin(self, text: str) -> None:
        at = 0
        if self._name is not None:
            found = self._name.match(text, 0, _MAX_HEAD)
            between = _ARGUMENTS_NEXT.match(text, found.end(), _MAX_HEAD) if found else None
            if between is None:
                return
            at = between.end()
        elif not text.startswith("{"):
            # A string that holds the object, or nothing yet.
            return
        self._end, self._told = _End(at), at


class _End:
    """Looks for the end of a JSON value in text that grows; each character is read once."""

    def __init__(self, start: int = 0) -> None:
        self.at = self._start = start
        self._open: list[str] = []
        self._in_string = False

    def find(self, text: str) -> bool:
        """Whether the value is whole; then it ends at `at`.

        Raises:
            Broken: No text behind this one could make it whole.
        """
        while self.at < len(text):
            if self._in_string:
                self._read_string(text)
                if self._in_string:
                    return False
            else:
                self._read_plain(text)
            if self.at > self._start and not self._open and not self._in_string:
                return True
        return False

    def _read_string(self, text: str) -> None:
        found = _STRING.match(text, self.at)
        assert found is not None
        self.at = found.end()
        if text.startswith('"', self.at):
            self.at += 1
            self._in_string = False

    def _read_plain(self, text: str) -> None:
        if self._open:
            found = _PLAIN.match(text, self.at)
            assert found is not None
            self.at = found.end()
        character = text[self.at : self.at + 1]
        if not character:
            return
        if character == '"':
            self._in_string = True
        elif character in _CLOSERS:
            self._open.append(_CLOSERS[character])
            if len(self._open) > MAX_DEPTH:
                raise Broken(_TOO_DEEP)
        elif not self._open:
            raise Broken("the call is no JSON object")
        elif self._open.pop() != character:
            raise Broken(f"the call is no valid JSON: {character!r} at character {self.at}")
        self.at += 1


def _as_object(value: Any, what: str) -> dict[str, Any]:
    if isinstance(value, str):
        # Some models write the object once more as a string.
        try:
            value = loads(value) if value.strip() else {}
        except Fault as fault:
            raise Fault(f"{what} is no JSON object") from fault
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise Fault(f"{what} is no JSON object")
    return value


def _refuse(constant: str) -> Any:
    raise ValueError(f"{constant} is no JSON")
