"""Llama 4 and 3.2 as vLLM's templates ask them: `[name(key=value), ...]` at a line's beginning."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from rollout_service.chat.calls.answer import THINK, Family, leave_broken, tagged
from rollout_service.chat.calls.arguments import typed
from rollout_service.chat.calls.output import Call, Output
from rollout_service.chat.calls.python_text import arguments_text, keyword_arguments
from rollout_service.chat.calls.reader import Broken, Fault, Reader, Waiting, accept, spaces, until

_START, _END = "<|python_start|>", "<|python_end|>"
_FORM = '[NAME(KEY="VALUE")]'
# A list in an answer may begin alike: a known name makes it a call, or a key, or nothing between
# the parentheses where no link follows, as in Markdown's `[main()](...)`.
_HEAD = re.compile(r"\[\s*([^\W\d][\w.\-]*)\s*\((?:\s*(?:([^\W\d][\w.\-]*\s*=)|\)\s*(,|\][^(])))?")
_HEAD_BEGUN = re.compile(r"\[\s*(?:[^\W\d][\w.\-]*\s*(?:\(\s*(?:[^\W\d][\w.\-]*\s*|\)\s*\]?)?)?)?")
_MAX_HEAD = 300
# At which a next list begins, behind one that broke off.
_OTHERS = ("\n[", _START)


def _read_bracket(reader: Reader, out: Output) -> Waiting[None]:
    if reader.line_is_blank and (yield from _looks_like_calls(reader, out)):
        reader.take(1)
        yield from _read_list(reader, out)
    else:
        out.text(reader.take(1))


def _looks_like_calls(reader: Reader, out: Output) -> Waiting[bool]:
    while True:
        head = reader.text[:_MAX_HEAD]
        found = _HEAD.match(head)
        if found is not None and (found[2] or found[3] or out.knows(found[1])):
            return True
        is_open = _HEAD_BEGUN.fullmatch(head) is not None
        if not is_open or len(head) == _MAX_HEAD:
            return False
        if reader.ended:
            return head.endswith("]")
        yield


def _read_list(reader: Reader, out: Output) -> Waiting[None]:
    while True:
        yield from spaces(reader)
        if (yield from accept(reader, "]")):
            return
        call = out.call(_FORM)
        try:
            yield from _read(reader, call)
        except Broken as fault:
            call.fail(fault)
            yield from leave_broken(reader, (), _OTHERS)
            return
        except Fault as fault:
            call.fail(fault)
        yield from spaces(reader)
        if (yield from accept(reader, ",", "]")) != ",":
            return


def _read(reader: Reader, call: Call) -> Waiting[None]:
    call.begin_checked((yield from until(reader, "(", ")", "]", *_OTHERS)))
    arguments = keyword_arguments((yield from arguments_text(reader)))
    call.finish(_as_typed(arguments, call.properties))


def _as_typed(arguments: Mapping[str, Any], properties: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments, those of other types than text too where they were written as text: the
    templates themselves put quotes around every value."""
    return {
        key: typed(value, properties[key])
        if isinstance(value, str) and properties.get(key)
        else value
        for key, value in arguments.items()
    }


PYTHONIC = Family(
    name="pythonic",
    parse=tagged({"[": _read_bracket}, dropped=(_START, _END)),
    taught_by=("[func_name1(",),
    reasoning=THINK,
)
