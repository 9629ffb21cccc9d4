"""Qwen3-Coder, Qwen3.5: `<function=name>` and `<parameter=key>` in `<tool_call>` tags."""

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
    closing,
    spaces,
    until,
    until_closed,
)

_OPEN, _CLOSE = "<tool_call>", "</tool_call>"
_FUNCTION, _FUNCTION_END = "<function=", "</function>"
_PARAMETER, _PARAMETER_END = "<parameter=", "</parameter>"
_FORM = (
    "<tool_call>\n<function=NAME>\n<parameter=KEY>\nVALUE\n</parameter>\n</function>\n</tool_call>"
)
_CLOSINGS = {
    _PARAMETER_END: (_PARAMETER, _FUNCTION_END, _CLOSE),
    # The parameter was never closed; without this it would swallow the next call.
    _FUNCTION_END: (_CLOSE,),
}


def _read_tool_call(reader: Reader, out: Output) -> Waiting[None]:
    reader.take(len(_OPEN))
    yield from read_call(reader, out.call(_FORM), _read, end=(_CLOSE,), others=(_OPEN,))


def _read_bare_call(reader: Reader, out: Output) -> Waiting[None]:
    """These models at times leave the outer tag out."""
    others = (_OPEN, _FUNCTION)
    yield from read_call(reader, out.call(_FORM), _read_function, end=(_CLOSE,), others=others)
    yield from spaces(reader)
    yield from accept(reader, _CLOSE)


def _read(reader: Reader, call: Call) -> Waiting[None]:
    yield from spaces(reader)
    arguments = yield from _read_arguments(reader, call)
    yield from closing(reader, (_CLOSE,), (_OPEN,))
    call.finish(arguments)


def _read_function(reader: Reader, call: Call) -> Waiting[None]:
    call.finish((yield from _read_arguments(reader, call)))


def _read_arguments(reader: Reader, call: Call) -> Waiting[dict[str, Any]]:
    if not (yield from accept(reader, _FUNCTION)):
        raise Broken(f"{_FUNCTION}NAME> is missing")
    call.begin_checked((yield from until(reader, ">", "\n", _CLOSE)))
    arguments: dict[str, Any] = {}
    while True:
        yield from spaces(reader)
        tag = yield from accept(reader, _PARAMETER, _FUNCTION_END)
        if tag == _FUNCTION_END:
            return arguments
        if not tag and reader.ended and not reader.text:
            raise Broken(f"the call was cut off before {_FUNCTION_END}")
        if not tag:
            raise Broken(f"text stands where {_PARAMETER}KEY> or {_FUNCTION_END} should")
        key = yield from until(reader, ">", "\n", _CLOSE)
        arguments[key] = yield from _read_value(reader, call, key)
        call.tell_argument(key, arguments[key])


def _read_value(reader: Reader, call: Call, key: str) -> Waiting[Any]:
    text, closed = yield from until_closed(reader, _CLOSINGS)
    if closed != _PARAMETER_END:
        raise Broken(f"the parameter {key[:40]} is not closed")
    # The template puts the value on lines of its own.
    return typed(text.removeprefix("\n").removesuffix("\n"), call.properties.get(key))


QWEN_XML = Family(
    name="qwen_xml",
    parse=tagged({_OPEN: _read_tool_call, _FUNCTION: _read_bare_call}),
    taught_by=(_PARAMETER,),
    reasoning=THINK,
)
