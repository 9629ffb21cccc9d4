"""DeepSeek V3.2 and V4: `<｜DSML｜invoke name="...">` with a tag for each parameter."""

from __future__ import annotations

import re
from typing import Any

from rollout_service.chat.calls.answer import THINK, Family, read_call, tagged
from rollout_service.chat.calls.arguments import typed, value_of
from rollout_service.chat.calls.output import Call, Output
from rollout_service.chat.calls.reader import (
    Broken,
    Reader,
    Waiting,
    accept,
    spaces,
    until,
    until_closed,
)

_D = "｜DSML｜"
# V3.2's, then V4's.
_SECTIONS = ("function_calls", "tool_calls")
_STARTS = tuple(f"<{_D}{name}>" for name in _SECTIONS)
_ENDS = tuple(f"</{_D}{name}>" for name in _SECTIONS)
_OPEN, _CLOSE = f"<{_D}invoke", f"</{_D}invoke>"
_PARAMETER, _PARAMETER_END = f"<{_D}parameter", f"</{_D}parameter>"
_FORM = (
    f'{_STARTS[0]}\n{_OPEN} name="NAME">\n{_PARAMETER} name="KEY" string="true">VALUE'
    f"{_PARAMETER_END}\n{_CLOSE}\n{_ENDS[0]}"
)
_OTHERS = (_OPEN, *_STARTS, *_ENDS)
_CLOSINGS = {
    _PARAMETER_END: (_PARAMETER, _CLOSE, *_ENDS),
    # The parameter was never closed; without this it would swallow the next call.
    _CLOSE: (_OPEN, *_STARTS, *_ENDS),
}
_NAME = re.compile(r'\s+name="([^"]*)"\s*')
_NAME_AND_KIND = re.compile(r'\s+name="(.*?)"(?:\s+string="(true|false)")?\s*', re.DOTALL)


def _read_invoke(reader: Reader, out: Output) -> Waiting[None]:
    reader.take(len(_OPEN))
    yield from read_call(reader, out.call(_FORM), _read, end=(_CLOSE,), others=_OTHERS)


def _read(reader: Reader, call: Call) -> Waiting[None]:
    head = yield from until(reader, ">", _CLOSE, _PARAMETER, *_OTHERS)
    named = _NAME.fullmatch(head)
    if named is None:
        raise Broken(f'{_OPEN} has no name="NAME"')
    call.begin_checked(named[1])
    arguments: dict[str, Any] = {}
    while True:
        yield from spaces(reader)
        tag = yield from accept(reader, _PARAMETER, _CLOSE)
        if tag == _CLOSE:
            call.finish(arguments)
            return
        if not tag and reader.ended and not reader.text:
            raise Broken(f"the call was cut off before {_CLOSE}")
        if not tag:
            raise Broken(f"text stands where {_PARAMETER} or {_CLOSE} should")
        key, value = yield from _read_parameter(reader, call)
        arguments[key] = value
        call.tell_argument(key, value)


def _read_parameter(reader: Reader, call: Call) -> Waiting[tuple[str, Any]]:
    head = yield from until(reader, ">", _CLOSE, _PARAMETER_END, *_OTHERS)
    named = _NAME_AND_KIND.fullmatch(head)
    if named is None:
        raise Broken(f'{_PARAMETER} has no name="KEY" string="true"')
    key, is_text = named.groups()
    text, closed = yield from until_closed(reader, _CLOSINGS)
    if closed != _PARAMETER_END:
        raise Broken(f"the parameter {key[:40]} is not closed")
    if is_text == "true":
        return key, text
    return key, value_of(text) if is_text else typed(text, call.properties.get(key))


DSML = Family(
    name="dsml",
    parse=tagged({_OPEN: _read_invoke}, dropped=(*_STARTS, *_ENDS)),
    taught_by=(_OPEN,),
    reasoning=THINK,
)
