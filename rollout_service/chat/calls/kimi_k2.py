"""Kimi K2: `functions.name:0` and JSON arguments between `<|tool_call_begin|>` and its end."""

from __future__ import annotations

import re

from rollout_service.chat.calls.answer import THINK, Family, read_call, tagged
from rollout_service.chat.calls.json_text import arguments_text, finish_arguments
from rollout_service.chat.calls.output import Call, Output
from rollout_service.chat.calls.reader import Reader, Waiting, closing, until

_SECTION, _SECTION_END = "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"
_OPEN, _CLOSE = "<|tool_call_begin|>", "<|tool_call_end|>"
_ARGUMENT = "<|tool_call_argument_begin|>"
_FORM = f"{_SECTION}{_OPEN}functions.NAME:0{_ARGUMENT}{{...}}{_CLOSE}{_SECTION_END}"
_OWN_ID = re.compile(r"functions\..+:[0-9]{1,3}")
_OTHERS = (_OPEN, _SECTION_END)


def _read_tool_call(reader: Reader, out: Output) -> Waiting[None]:
    reader.take(len(_OPEN))
    yield from read_call(reader, out.call(_FORM), _read, end=(_CLOSE,), others=_OTHERS)


def _read(reader: Reader, call: Call) -> Waiting[None]:
    call_id = (yield from until(reader, _ARGUMENT, _CLOSE, *_OTHERS)).strip()
    name, colon, index = call_id.removeprefix("functions.").rpartition(":")
    call.begin_checked(name if colon and index.isdecimal() else f"{name}{colon}{index}")
    if _OWN_ID.fullmatch(call_id):
        call.named_by_model(call_id)
    text = yield from arguments_text(reader, call, (_CLOSE, *_OTHERS))
    yield from closing(reader, (_CLOSE,), _OTHERS)
    finish_arguments(call, text)


KIMI_K2 = Family(
    name="kimi_k2",
    parse=tagged({_OPEN: _read_tool_call}, dropped=(_SECTION, _SECTION_END)),
    taught_by=(_SECTION,),
    reasoning=THINK,
)
