"""GLM-4.5 and later: the name, then `<arg_key>` and `<arg_value>` pairs in `<tool_call>` tags."""

from __future__ import annotations

from typing import Any

from rollout_service.chat.calls.answer import THINK, Family, read_call, tagged
from rollout_service.chat.calls.arguments import typed
from rollout_service.chat.calls.output import Call, Output
from rollout_service.chat.calls.reader import (
    Broken,
    Reader,
    Waiting,
    accept,
    pass_until,
    spaces,
    until,
    until_closed,
)

_OPEN, _CLOSE = "<tool_call>", "</tool_call>"
_KEY, _KEY_END = "<arg_key>", "</arg_key>"
_VALUE, _VALUE_END = "<arg_value>", "</arg_value>"
_FORM = "<tool_call>NAME\n<arg_key>KEY</arg_key>\n<arg_value>VALUE</arg_value>\n</tool_call>"
_CLOSINGS = {
    _VALUE_END: (_KEY, _CLOSE),
    # The value was never closed; without this it would swallow the next call.
    _CLOSE: (_OPEN,),
}


def _read_tool_call(reader: Reader, out: Output) -> Waiting[None]:
    reader.take(len(_OPEN))
    yield from read_call(reader, out.call(_FORM), _read, end=(_CLOSE,), others=(_OPEN,))


def _read(reader: Reader, call: Call) -> Waiting[None]:
    name: list[str] = []
    marker = yield from pass_until(reader, name.append, (_KEY, _CLOSE, _OPEN))
    if not marker:
        raise Broken(f"the call was cut off before {_CLOSE}")
    call.begin_checked("".join(name))
    arguments: dict[str, Any] = {}
    while True:
        yield from spaces(reader)
        tag = yield from accept(reader, _KEY, _CLOSE)
        if tag == _CLOSE:
            call.finish(arguments)
            return
        if not tag and reader.ended:
            raise Broken(f"the call was cut off before {_CLOSE}")
        if not tag:
            raise Broken(f"text stands where {_KEY} or {_CLOSE} should")
        key = yield from until(reader, _KEY_END, _VALUE, _CLOSE)
        yield from spaces(reader)
        if not (yield from accept(reader, _VALUE)):
            raise Broken(f"{_VALUE} is missing behind {_KEY}{key[:40]}{_KEY_END}")
        text, closed = yield from until_closed(reader, _CLOSINGS)
        if closed != _VALUE_END:
            raise Broken(f"the value of {key[:40]} is not closed")
        arguments[key] = typed(text, call.properties.get(key))
        call.tell_argument(key, arguments[key])


GLM = Family(name="glm", parse=tagged({_OPEN: _read_tool_call}), taught_by=(_KEY,), reasoning=THINK)
