"""Mistral: `[TOOL_CALLS]`, then a JSON list, or a name and its arguments."""

from __future__ import annotations

import re

from rollout_service.chat.calls.answer import THINK, Family, leave_broken, read_call, tagged
from rollout_service.chat.calls.json_text import arguments_text, call_list, finish_arguments
from rollout_service.chat.calls.output import Call, Output
from rollout_service.chat.calls.reader import (
    Reader,
    Waiting,
    accept,
    comes,
    pass_until,
    spaces,
    until,
)

_OPEN = "[TOOL_CALLS]"
_ARGS, _ID = "[ARGS]", "[CALL_ID]"
_OWN_ID = re.compile(r"[A-Za-z0-9]{9}")
_LIST_FORM = f'{_OPEN}[{{"name": ..., "arguments": {{...}}}}]'
_NAME_FORM = f"{_OPEN}NAME{{...}}"
_REASONING = {**THINK, "[THINK]": "[/THINK]"}


def _read_calls(reader: Reader, out: Output) -> Waiting[None]:
    reader.take(len(_OPEN))
    yield from spaces(reader)
    # They begin with a bracket too.
    control = yield from comes(reader, _ARGS, _ID, _OPEN)
    if not control and reader.text.startswith(("[", "{")):
        if not (yield from call_list(reader, out, _LIST_FORM, own_id=_OWN_ID)):
            yield from leave_broken(reader, (), (_OPEN,))
    else:
        yield from read_call(reader, out.call(_NAME_FORM), _read_named, end=(), others=(_OPEN,))


def _read_named(reader: Reader, call: Call) -> Waiting[None]:
    name: list[str] = []
    marker = yield from pass_until(reader, name.append, (_ID, _ARGS, "{", _OPEN))
    call.begin_checked("".join(name))
    if marker == _ID:
        reader.take(len(_ID))
        call_id = (yield from until(reader, _ARGS, "{", _OPEN)).strip()
        if _OWN_ID.fullmatch(call_id):
            call.named_by_model(call_id)
    else:
        yield from accept(reader, _ARGS)
    finish_arguments(call, (yield from arguments_text(reader, call, (_OPEN,))))


MISTRAL = Family(
    name="mistral",
    parse=tagged({_OPEN: _read_calls}, reasoning=_REASONING),
    taught_by=(_OPEN,),
    reasoning=_REASONING,
)
