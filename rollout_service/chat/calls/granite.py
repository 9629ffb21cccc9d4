"""Granite: `<|tool_call|>` and a JSON list (3.x), or a JSON object in `<tool_call>` tags (4)."""

from __future__ import annotations

from rollout_service.chat.calls.answer import THINK, Family, leave_broken, tagged
from rollout_service.chat.calls.hermes import OPEN, read_tool_call
from rollout_service.chat.calls.json_text import call_list
from rollout_service.chat.calls.output import Output
from rollout_service.chat.calls.reader import Reader, Waiting

_LIST = "<|tool_call|>"
_FORM = f'{_LIST}[{{"name": ..., "arguments": {{...}}}}]'


def _read_list(reader: Reader, out: Output) -> Waiting[None]:
    reader.take(len(_LIST))
    if not (yield from call_list(reader, out, _FORM)):
        yield from leave_broken(reader, (), (_LIST, OPEN))


GRANITE = Family(
    name="granite",
    parse=tagged({_LIST: _read_list, OPEN: read_tool_call}, dropped=("<response>", "</response>")),
    taught_by=(_LIST,),
    reasoning=THINK,
)
